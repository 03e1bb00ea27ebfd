"""Reading config.json key by key: typed values, and refusal of every key that is neither read nor known to be inert.

Such a key may change the network, and then the "target's own output" would be another model's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.locate import read_json
from paceline.checkpoint.weights import FLOAT_DTYPES, open_safetensors
from paceline.errors import CheckpointError

_DTYPES = ("bfloat16", "float16", "float32")
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


class ConfigReader:
    """Typed access to the top level of a config.json; each refusal names key, value and file."""

    def __init__(self, config: Mapping[str, Any], origin: str) -> None:
        self._config = config
        self.origin = origin  # the file, for messages

    def error(self, message: str, *, hint: str | None = None) -> CheckpointError:
        """A `CheckpointError` that names the file."""
        return CheckpointError(message, origin={"config": self.origin}, hint=hint)

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


def refuse_unread(
    config: Mapping[str, Any],
    reader: ConfigReader,
    *,
    read: Collection[str],
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL_VALUES,
) -> None:
    """Refuse a config with a key that nothing reads and that may change the network.

    Args:
        config: the object.
        reader: of the same object.
        read: keys that the caller reads.
        neutral: other keys, with the values at which they have no effect.
    Raises:
        CheckpointError: names the keys and their values.
    """
    for key, allowed in neutral.items():
        if key in config and config[key] not in allowed:
            value = config[key]
            shown = value.get("quant_method", value) if isinstance(value, Mapping) else value
            raise reader.error(f"{key} is {shown!r}; supported is {' or '.join(repr(v) for v in allowed)}")
    known = INERT_KEYS | neutral.keys() | set(read)
    unknown = sorted(key for key in config if key not in known and not key.startswith(_ANNOTATION_PREFIXES))
    if unknown:
        shown = ", ".join(f"{key}={config[key]!r}" for key in unknown[:8])
        raise reader.error(
            f"unknown config key {shown}: it might change the network",
            hint="removing it from a copy of the folder, if it is known to have no effect",
        )


def read_stop_token_ids(folder: Path, config: Mapping[str, Any], reader: ConfigReader) -> tuple[int, ...]:
    """Ids that end a text: those of generation_config.json, then those of the config, each once."""
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


def read_first_id(value: object, reader: ConfigReader) -> int | None:
    """The id that begins a text, or None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise reader.error(f"bos_token_id is {value!r}, expected a token id")


def read_stored_dtype(
    folder: Path, config: Mapping[str, Any], reader: ConfigReader, *, norm: str = "model.norm.weight"
) -> str:
    """The dtype of the weights, from the config or else from the file.

    Args:
        folder: of the model.
        config: the object that may say it.
        reader: of the same object.
        norm: the tensor to look at.
    Raises:
        CheckpointError: two keys disagree, or the dtype is not supported.
    """
    found = config.get("dtype") or config.get("torch_dtype")
    if config.get("dtype") and config.get("torch_dtype") not in (None, found):
        raise reader.error(f"dtype is {found!r} and torch_dtype is {config['torch_dtype']!r}")
    if found in (None, "auto"):
        source = open_safetensors(folder)
        stored = source.load(norm if norm in source.names() else source.names()[0]).dtype
        found = str(stored).removeprefix("torch.") if stored in FLOAT_DTYPES else found
    if found not in _DTYPES:
        raise reader.error(f"dtype is {found!r}; supported are {', '.join(_DTYPES)}")
    return str(found)
