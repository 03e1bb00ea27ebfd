"""Folders that hold configs and no weights: enough for whatever reads promises only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.checkpoint.contract import DrafterContract, RopeSettings, TargetLayerId
from paceline.checkpoint.dialects import write_drafter_config

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


def target_folder(folder: Path, **changes: Any) -> Path:
    """A tiny Llama's config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TARGET, **changes}))
    return folder


def drafter_contract(**changes: Any) -> DrafterContract:
    """A drafter for that target."""
    values: dict[str, Any] = {
        "family": "dflash",
        "origin": "test",
        "target_name": "tiny",
        "target_num_layers": 6,
        "target_hidden_size": 32,
        "target_vocab_size": 64,
        "target_layer_ids": (TargetLayerId(1), TargetLayerId(3)),
        "aux_hidden_stream": "prefix",
        "has_tap_norm": True,
        "block_size": 4,
        "layout": "fill_in",
        "mask_token_id": 0,
        "vocab_size": 64,
        "draft_vocab_size": 64,
        "num_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope": RopeSettings(theta=10000.0),
        "is_neox_style": True,
        "max_position_embeddings": 128,
        "layer_windows": (None, None),
        "layer_causal": (False, False),
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "draft_sample_method": "greedy",
        "dtype": "bfloat16",
    }
    return DrafterContract(**{**values, **changes})


def drafter_folder(folder: Path, **changes: Any) -> Path:
    """Its config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_drafter_config(drafter_contract(**changes))))
    return folder
