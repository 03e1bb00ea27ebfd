"""What a target folder promises: config.json and generation_config.json read into a `TargetContract`.

A config key that is neither read nor known to be without effect is refused: it may change the network, and then the
"target's own output" would be another model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.config_reader import (
    ConfigReader,
    read_first_id,
    read_stop_token_ids,
    read_stored_dtype,
    refuse_unread,
)
from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.gguf import read_gguf_config
from paceline.checkpoint.kimi_config import (
    MULTIMODAL_ARCHITECTURE,
    MULTIMODAL_MODEL_TYPE,
    TEXT_ARCHITECTURE,
    TEXT_MODEL_TYPE,
    read_kimi_contract,
)
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.rope_keys import ROPE_CONFIG_KEYS, read_rope
from paceline.errors import CheckpointError

_ARCHITECTURE_OF_MODEL_TYPE: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    TEXT_MODEL_TYPE: TEXT_ARCHITECTURE,
    MULTIMODAL_MODEL_TYPE: MULTIMODAL_ARCHITECTURE,
}

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
    if architecture in (TEXT_ARCHITECTURE, MULTIMODAL_ARCHITECTURE):
        return read_kimi_contract(config, path, name)
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
        stop_token_ids=read_stop_token_ids(path, config, reader),
        bos_token_id=read_first_id(config.get("bos_token_id"), reader),
        dtype=read_stored_dtype(path, config, reader),
    )


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
    refuse_unread(config, reader, read=_READ_KEYS)
    layer_types = config.get("layer_types")
    is_full = isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
    if layer_types is not None and not is_full:
        found = list(dict.fromkeys(map(repr, layer_types))) if isinstance(layer_types, list) else [repr(layer_types)]
        raise reader.error(f"layer_types has {', '.join(found)}; supported is full_attention in every layer")
    window = config.get("sliding_window")
    # Qwen3 configs keep a number here while the switch is off; without a switch the number may be in use
    if config.get("use_sliding_window") or (window is not None and "use_sliding_window" not in config):
        raise reader.error(f"the target uses a sliding window of {window}; supported is full attention")
