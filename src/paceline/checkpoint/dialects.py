"""Drafter config files: the z-lab DFlash dialect to a `DrafterContract` and back.

The dialect is a Qwen3-like top level plus a nested `dflash_config`. A field that may stand in both places is taken from
either and refused if they differ. Every key must be known: read, inert, or allowed at the one value that asks for
nothing. A drafter served otherwise than it was trained only accepts less and never fails, so nothing is guessed:
missing taps, mask id, block size, theta or depth are refusals.

Tap ids of this dialect name the layer whose *output* is tapped (`TargetLayerId`). Our own additions
(`draft_sample_method`, `target_name`, `target_vocab_size`, ...) live in `dflash_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast, get_args

from paceline.checkpoint.contract import AuxHiddenStream, DrafterContract, DraftSampleMethod, TargetLayerId
from paceline.checkpoint.drafter_keys import ARCHITECTURE, merge_places, refuse_other_kinds, refuse_unknown
from paceline.checkpoint.layer_attention import layer_attention_keys, resolve_layer_attention
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.rope_keys import read_rope, write_rope
from paceline.checkpoint.target_config import ConfigReader
from paceline.errors import CheckpointError

__all__ = [
    "contract_from_config",
    "default_target_layer_ids",
    "read_drafter_contract",
    "resolve_layer_attention",
    "write_drafter_config",
]


def read_drafter_contract(folder: Path) -> DrafterContract:
    """Read what a drafter folder promises.

    Args:
        folder: a drafter in the z-lab DFlash layout.
    Returns:
        The contract; `origin` is the config file.
    Raises:
        CheckpointError: the folder or its config is missing or damaged, it is a target, it belongs to a family or
            layout that is not supported, a key is unknown, a needed field is missing, or two fields contradict.
    Source: z-lab DFlash config.json, as read by z-lab's code and vLLM.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    override = folder / "mask_embedding.pt"
    if override.exists():
        raise CheckpointError(f"{override} replaces the embedding of the mask token, which is not supported")
    file = folder / "config.json"
    return contract_from_config(read_json(file), str(file))


def contract_from_config(config: Mapping[str, Any], origin: str) -> DrafterContract:
    """Turn the content of a z-lab config.json into a contract.

    Args:
        config: the whole object.
        origin: the file, for messages and for `DrafterContract.origin`.
    Returns:
        The contract.
    Raises:
        CheckpointError: as `read_drafter_contract`.
    """
    top = ConfigReader(config, origin)
    refuse_other_kinds(config, top)
    nested = config.get("dflash_config", {})
    if not isinstance(nested, Mapping):
        raise top.error(f"dflash_config is {nested!r}, expected an object")
    refuse_unknown(config, nested, top)
    merged = merge_places(config, nested, top)
    either = ConfigReader(merged, origin)
    own = ConfigReader(nested, origin)
    num_layers, hidden_size = top.whole("num_hidden_layers"), top.whole("hidden_size")
    vocab_size, depth = top.whole("vocab_size"), top.whole("num_target_layers")
    try:
        windows, causal = resolve_layer_attention(
            num_layers,
            layer_types=config.get("layer_types"),
            # Hugging Face drops the window when its switch is off
            sliding_window=None if config.get("use_sliding_window") is False else config.get("sliding_window"),
            dflash_config=nested,
            is_causal=config.get("is_causal"),
        )
    except CheckpointError as error:
        raise top.error(error.message, hint=error.hint) from error
    return DrafterContract(
        family="dflash",
        origin=origin,
        target_name=own.text("target_name", default=""),
        target_num_layers=depth,
        target_hidden_size=either.whole("target_hidden_size", default=hidden_size),
        target_vocab_size=own.whole("target_vocab_size", default=vocab_size),
        target_layer_ids=_taps(merged["target_layer_ids"], depth, num_layers, top),
        aux_hidden_stream=cast(AuxHiddenStream, _one_of(either, "aux_hidden_stream", AuxHiddenStream, "prefix")),
        has_tap_norm=either.flag("fc_norm", default=False),
        block_size=either.whole("block_size", minimum=1 if either.flag("sample_from_anchor", default=False) else 2),
        layout="anchor_sampling" if either.flag("sample_from_anchor", default=False) else "fill_in",
        mask_token_id=_mask_token_id(either, vocab_size),
        vocab_size=vocab_size,
        draft_vocab_size=_full_vocabulary(top, vocab_size),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=top.whole("intermediate_size"),
        num_heads=top.whole("num_attention_heads"),
        num_kv_heads=_num_kv_heads(top),
        head_size=_even_head_size(top),
        rms_norm_eps=top.positive("rms_norm_eps"),
        attention_bias=top.flag("attention_bias", default=False),
        rope=read_rope(config, origin),
        is_neox_style=top.flag("is_neox_style", default=True),
        max_position_embeddings=top.whole("max_position_embeddings"),
        layer_windows=windows,
        layer_causal=causal,
        input_embedding_scale=either.positive("input_embedding_scale", default=1.0),
        output_multiplier=either.positive("output_multiplier", default=1.0),
        # 0 and null both mean off in this dialect
        final_logit_softcapping=(
            either.positive("final_logit_softcapping") if merged["final_logit_softcapping"] else None
        ),
        draft_sample_method=cast(DraftSampleMethod, _one_of(own, "draft_sample_method", DraftSampleMethod, "greedy")),
        dtype=_dtype(config, top),
    )


def write_drafter_config(contract: DrafterContract) -> dict[str, Any]:
    """Write a contract as the content of a z-lab config.json.

    Every optional field is explicit and rotary settings stand in both spellings: readers differ in their defaults.

    Args:
        contract: the drafter.
    Returns:
        An object that `contract_from_config` reads back to the same contract.
    Raises:
        CheckpointError: windows or causality differ between layers in a way that the dialect cannot say.
    """
    layer_types, window, causal = layer_attention_keys(contract)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": contract.dtype,
        "num_hidden_layers": contract.num_layers,
        "hidden_size": contract.hidden_size,
        "intermediate_size": contract.intermediate_size,
        "num_attention_heads": contract.num_heads,
        "num_key_value_heads": contract.num_kv_heads,
        "head_dim": contract.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": contract.rms_norm_eps,
        "attention_bias": contract.attention_bias,
        "max_position_embeddings": contract.max_position_embeddings,
        **write_rope(contract.rope),
        "is_neox_style": contract.is_neox_style,
        "layer_types": layer_types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "is_causal": causal,
        "vocab_size": contract.vocab_size,
        "draft_vocab_size": contract.draft_vocab_size,
        "tie_word_embeddings": False,
        "has_own_lm_head": False,
        "num_target_layers": contract.target_num_layers,
        "target_hidden_size": contract.target_hidden_size,
        "block_size": contract.block_size,
        "dflash_config": {
            "target_layer_ids": list(contract.target_layer_ids),
            "mask_token_id": contract.mask_token_id,
            "block_size": contract.block_size,
            "sample_from_anchor": contract.layout == "anchor_sampling",
            "causal": causal,
            "use_swa": False,
            "fc_norm": contract.has_tap_norm,
            "aux_hidden_stream": contract.aux_hidden_stream,
            "use_aux_hidden_state": True,
            "attention_sink_bias": False,
            "input_embedding_scale": contract.input_embedding_scale,
            "output_multiplier": contract.output_multiplier,
            "final_logit_softcapping": contract.final_logit_softcapping,
            "draft_sample_method": contract.draft_sample_method,
            "target_name": contract.target_name,
            "target_hidden_size": contract.target_hidden_size,
            "target_vocab_size": contract.target_vocab_size,
        },
    }


def default_target_layer_ids(num_layers: int, num_taps: int) -> tuple[TargetLayerId, ...]:
    """The taps that the DFlash family chooses by default: evenly spread, clear of both ends.

    Args:
        num_layers: depth of the target.
        num_taps: how many layers to tap.
    Returns:
        Layers whose output is tapped, ascending.
    Raises:
        CheckpointError: the target is too shallow for that many distinct taps below its last layer.
    Source: z-lab DFlash; rounds halves to even, so 59 layers and 5 taps give 28 in the middle, not 29.
    """
    if num_taps < 1:
        raise CheckpointError(f"{num_taps} taps were asked for; at least 1 is needed")
    if num_taps == 1:
        taps = [num_layers // 2]
    else:
        taps = [round(1 + index * (num_layers - 4) / (num_taps - 1)) for index in range(num_taps)]
    if len(set(taps)) < num_taps or taps != sorted(taps) or taps[-1] >= num_layers - 1:
        raise CheckpointError(
            f"{num_taps} taps do not fit a target of {num_layers} layers by the default rule", hint="fewer taps"
        )
    return tuple(TargetLayerId(tap) for tap in taps)


def _taps(value: object, depth: int, num_layers: int, reader: ConfigReader) -> tuple[TargetLayerId, ...]:
    if value is None:
        try:
            default = f"z-lab's default for this depth is {list(default_target_layer_ids(depth, num_layers))}"
        except CheckpointError:
            default = "z-lab's default rule does not fit this depth"
        raise reader.error("target_layer_ids is missing", hint=f"writing the trained ones to dflash_config; {default}")
    if not isinstance(value, list) or not value or not all(type(tap) is int for tap in value):
        raise reader.error(f"target_layer_ids is {value!r}, expected a list of layer numbers")
    if any(first >= second for first, second in pairwise(value)):
        # readers differ: some concatenate in list order, some sort and drop duplicates
        raise reader.error(f"target_layer_ids is {value}, expected each once and in ascending order")
    if value[0] < -1 or value[-1] >= depth - 1:
        last = f"; {depth - 1} is the last layer, whose output engines take before or after the final norm"
        raise reader.error(
            f"target_layer_ids is {value}; legal are -1 (the embedding) to {depth - 2} for a target of {depth} layers"
            f"{last if value[-1] == depth - 1 else ''}",
            hint="num_target_layers must be the target's depth, not the number of taps" if value[-1] >= depth else None,
        )
    return tuple(TargetLayerId(tap) for tap in value)


def _mask_token_id(reader: ConfigReader, vocab_size: int) -> int:
    try:
        mask = reader.whole("mask_token_id", minimum=0)
    except CheckpointError as error:
        raise reader.error(
            error.message, hint="the id that filled the masked rows in training; end or padding ids are no substitute"
        ) from error
    if mask >= vocab_size:
        raise reader.error(f"mask_token_id is {mask}, the vocabulary has {vocab_size} ids")
    return mask


def _full_vocabulary(reader: ConfigReader, vocab_size: int) -> int:
    found = reader.whole("draft_vocab_size", default=vocab_size)
    if found != vocab_size:
        raise reader.error(f"draft_vocab_size is {found}; supported is the full vocabulary, {vocab_size}")
    return found


def _num_kv_heads(reader: ConfigReader) -> int:
    num_heads, num_kv_heads = reader.whole("num_attention_heads"), reader.whole("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise reader.error(f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    return num_kv_heads


def _even_head_size(reader: ConfigReader) -> int:
    head_size = reader.whole("head_dim")
    if head_size % 2:
        raise reader.error(f"head_dim is {head_size}; rotary positions need an even one")
    return head_size


def _one_of(reader: ConfigReader, key: str, values: object, default: str) -> str:
    found = reader.text(key, default=default)
    if found not in get_args(values):
        raise reader.error(f"{key} is {found!r}; legal are {' and '.join(get_args(values))}")
    return found


def _dtype(config: Mapping[str, Any], reader: ConfigReader) -> Literal["bfloat16", "float16", "float32"]:
    found, older = config.get("dtype"), config.get("torch_dtype")
    if found is not None and older is not None and found != older:
        raise reader.error(f"dtype is {found!r} and torch_dtype is {older!r}")
    found = found if found is not None else older
    if found not in ("bfloat16", "float16", "float32"):
        raise reader.error(f"dtype is {found!r}; supported are bfloat16, float16, float32")
    return cast(Literal["bfloat16", "float16", "float32"], found)
