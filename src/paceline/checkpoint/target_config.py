"""What a target folder promises: config.json and generation_config.json read into a `TargetContract`.

A config key that is neither read nor known to be without effect is refused: it may change the network, and then the
"target's own output" would be another model's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.gguf import read_gguf_config
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.rope_keys import ROPE_CONFIG_KEYS, read_rope
from paceline.checkpoint.weights import FLOAT_DTYPES, open_safetensors
from paceline.errors import CheckpointError

_ARCHITECTURE_OF_MODEL_TYPE: Mapping[str, str] = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DTYPES = ("bfloat16", "float16", "float32")

_READ_KEYS = ROPE_CONFIG_KEYS | {
    "architectures",
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "eos_token_id",
    "bos_token_id",
    "dtype",
    "torch_dtype",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
}
# keys that would change the network; allowed at the values that do not
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "rope_interleaved": (False, None),  # SmolLM2 writes it
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "num_experts": (0, None),
    "num_nextn_predict_layers": (0, None),
    "attn_logit_softcapping": (0, None),
    "final_logit_softcapping": (0, None),
    "embedding_multiplier": (1, 1.0, None),
    "residual_multiplier": (1, 1.0, None),
    "attention_multiplier": (None,),
    "logits_scaling": (1, 1.0, None),
    "logit_scale": (1, 1.0, None),
    "torchscript": (False, None),
}
# keys without effect on what a forward pass computes
INERT_KEYS = frozenset(
    {
        # training only
        "attention_dropout",
        "hidden_dropout",
        "embd_pdrop",
        "resid_pdrop",
        "initializer_range",
        # where the first sliding layer would be; `use_sliding_window` decides whether there is one
        "max_window_layers",
        # of the writer or of its caching
        "transformers_version",
        "transformers.js_config",
        "use_cache",
        "auto_map",  # names remote code, which is never run
        "is_llama_config",
        "bf16",
        "fp16",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "return_dict",
        "return_dict_in_generate",
        "output_scores",
        "use_bfloat16",
        "gradient_checkpointing",
        "chunk_size_feed_forward",
        "tf_legacy_loss",
        # tokenizer hints; the tokenizer's own files decide
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "tokenizer_class",
        "prefix",
        # classification heads of the same base class
        "id2label",
        "label2id",
        "num_labels",
        "finetuning_task",
        "task_specific_params",
        "problem_type",
        # sampling defaults of the oldest writers; requests carry their own
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "max_length",
        "min_length",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "diversity_penalty",
        "early_stopping",
        "bad_words_ids",
        "begin_suppress_tokens",
        "suppress_tokens",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
    }
)
_ANNOTATION_PREFIXES = ("_", "unsloth")  # notes that tools leave behind


def read_target_contract(path: Path, name: str) -> TargetContract:
    """Read what a target promises.

    Args:
        path: a Hugging Face folder (config.json, generation_config.json) or a `.gguf` file.
        name: as the user gave it; kept in the contract.
    Returns:
        The contract. Stop ids are those of generation_config.json, then those of config.json, each once.
    Raises:
        CheckpointError: a file is missing or damaged, the folder is a drafter's, or the config asks for something that
            is not supported or not known; the message names key, value and what is supported.
    """
    if path.is_file() and path.suffix == ".gguf":
        return dataclasses.replace(read_gguf_config(path), name=name)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder" if path.exists() else f"{path} does not exist")
    file = path / "config.json"
    config = read_json(file)
    refuse_drafter(config, file)
    reader = ConfigReader(config, str(file))
    architecture = _architecture(config, reader)
    _refuse_unsupported(config, reader)
    num_heads, hidden_size = reader.whole("num_attention_heads"), reader.whole("hidden_size")
    is_llama = architecture == "LlamaForCausalLM"
    # Hugging Face's own defaults differ per family: Llama derives both, Qwen3 has constants that fit no other size
    num_kv_heads = reader.whole("num_key_value_heads", default=num_heads if is_llama else None)
    if num_heads % num_kv_heads:
        raise reader.error(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    derived_head_size = hidden_size // num_heads if is_llama and hidden_size % num_heads == 0 else None
    head_size = reader.whole("head_dim", default=derived_head_size)
    if head_size % 2:
        raise reader.error(f"head_dim is {head_size}; rotary positions need an even one")
    return TargetContract(
        architecture=architecture,
        name=name,
        origin=str(file),
        num_layers=reader.whole("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=reader.whole("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=reader.whole("vocab_size"),
        rms_norm_eps=reader.positive("rms_norm_eps"),
        rope=read_rope(config, str(file)),
        max_position_embeddings=reader.whole("max_position_embeddings"),
        has_qk_norm=not is_llama,
        attention_bias=reader.flag("attention_bias", default=False),
        mlp_bias=is_llama and reader.flag("mlp_bias", default=False),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        stop_token_ids=_stop_token_ids(path, config, reader),
        bos_token_id=_first_id(config.get("bos_token_id"), reader),
        dtype=_dtype(path, config, reader),
    )


class ConfigReader:
    """Typed access to the top level of a config.json; each refusal names key, value and file."""

    def __init__(self, config: Mapping[str, Any], origin: str) -> None:
        self._config = config
        self._origin = origin

    def error(self, message: str, *, hint: str | None = None) -> CheckpointError:
        """A `CheckpointError` that names the file."""
        return CheckpointError(message, origin={"config": self._origin}, hint=hint)

    def whole(self, key: str, *, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least `minimum`; null counts as absent."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{key} is {value!r}, expected an integer of at least {minimum}")
        return value

    def positive(self, key: str, *, default: float | None = None) -> float:
        """A positive, finite number; null counts as absent."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(f"{key} is {value!r}, expected a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """True or false; null counts as absent."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}, expected true or false")
        return value

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string; null counts as absent."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} is {value!r}, expected a string")
        return value

    def _present(self, key: str, default: object) -> object:
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def refuse_drafter(config: Mapping[str, Any], file: Path) -> None:
    """Refuse a drafter's config where a target's is wanted.

    Raises:
        CheckpointError: the config has a drafter's keys or architecture.
    """
    architectures = config.get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    signs = [key for key in ("dflash_config", "speculators_model_type", "eagle_config") if key in config]
    if any(part in first for part in ("DFlash", "DSpark", "Eagle", "EAGLE", "Speculator")):
        signs.insert(0, f"architecture {first}")
    if signs:
        raise CheckpointError(
            f"{file.parent} is a drafter, not a target: its config has {' and '.join(signs)}",
            hint="this folder as the drafter, and the model that it rides on as the target",
        )


def _architecture(config: Mapping[str, Any], reader: ConfigReader) -> str:
    model_type = reader.text("model_type")
    supported = ", ".join(_ARCHITECTURE_OF_MODEL_TYPE.values())
    architectures = config.get("architectures")
    found = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    if model_type not in _ARCHITECTURE_OF_MODEL_TYPE:
        raise reader.error(f"model_type {model_type!r} ({found}) is not supported; supported are {supported}")
    expected = _ARCHITECTURE_OF_MODEL_TYPE[model_type]
    if found is not None and found != expected:
        raise reader.error(f"architecture {found!r} is not supported; supported are {supported}")
    return expected


def _refuse_unsupported(config: Mapping[str, Any], reader: ConfigReader) -> None:
    for key, allowed in NEUTRAL_VALUES.items():
        if key in config and config[key] not in allowed:
            value = config[key]
            shown = value.get("quant_method", value) if isinstance(value, Mapping) else value
            raise reader.error(f"{key} is {shown!r}; supported is {' or '.join(repr(v) for v in allowed)}")
    unknown = sorted(
        key
        for key in config
        if key not in _READ_KEYS | INERT_KEYS | NEUTRAL_VALUES.keys() and not key.startswith(_ANNOTATION_PREFIXES)
    )
    if unknown:
        shown = ", ".join(f"{key}={config[key]!r}" for key in unknown[:8])
        raise reader.error(
            f"unknown config key {shown}: it might change the network",
            hint="removing it from a copy of the folder, if it is known to have no effect",
        )
    layer_types = config.get("layer_types")
    if layer_types is not None and any(kind != "full_attention" for kind in layer_types):
        raise reader.error(f"layer_types has {sorted(set(layer_types))}; supported is full_attention in every layer")
    window = config.get("sliding_window")
    # Qwen3 configs keep a number here while the switch is off; without a switch the number may be in use
    if config.get("use_sliding_window") or (window is not None and "use_sliding_window" not in config):
        raise reader.error(f"the target uses a sliding window of {window}; supported is full attention")


def _stop_token_ids(folder: Path, config: Mapping[str, Any], reader: ConfigReader) -> tuple[int, ...]:
    file = folder / "generation_config.json"
    generation = read_json(file) if file.exists() else {}
    ids = _ids(generation.get("eos_token_id"), ConfigReader(generation, str(file)))
    return tuple(dict.fromkeys(ids + _ids(config.get("eos_token_id"), reader)))


def _ids(value: object, reader: ConfigReader) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in values:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise reader.error(f"eos_token_id is {value!r}, expected a token id or a list of them")
    return list(values)


def _first_id(value: object, reader: ConfigReader) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise reader.error(f"bos_token_id is {value!r}, expected a token id")


def _dtype(folder: Path, config: Mapping[str, Any], reader: ConfigReader) -> str:
    found = config.get("dtype") or config.get("torch_dtype")
    if config.get("dtype") and config.get("torch_dtype") not in (None, found):
        raise reader.error(f"dtype is {found!r} and torch_dtype is {config['torch_dtype']!r}")
    if found in (None, "auto"):
        source = open_safetensors(folder)
        stored = source.load("model.norm.weight" if "model.norm.weight" in source.names() else source.names()[0]).dtype
        found = str(stored).removeprefix("torch.") if stored in FLOAT_DTYPES else found
    if found not in _DTYPES:
        raise reader.error(f"dtype is {found!r}; supported are {', '.join(_DTYPES)}")
    return str(found)
