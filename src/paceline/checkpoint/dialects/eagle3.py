"""EAGLE-3 in Llama or Qwen3 flavour: `LlamaForCausalLMEagle3` and its like. Our own form, and SpecForge's.

Two forms share the architecture strings and differ in meaning, so the form decides, never a value:

* `eagle_aux_hidden_state_layer_ids` at the top level (vLLM, our own): ids of hidden states, one more than the layer;
  `norm_output` says that the next draft step gets the state after the final norm.
* ids only inside `eagle_config` (SpecForge, SGLang): layers whose *output* is tapped; `norm_output` says that the final
  norm comes before the head, which it always does here. The first layer may be stored as `midlayer`.

Our own form writes the taps in both places, each in its own numbering, so that either engine reads the same layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract, Eagle3Settings, TargetLayerId
from paceline.checkpoint.dialects.fields import (
    NO_MASK,
    OWN_KEY,
    PLAIN_ATTENTION,
    PLAIN_SCORES,
    read_decoder,
    read_dtype,
    read_num_steps,
    read_own,
    read_own_tables,
    read_sample_method,
    read_scores,
    read_stream,
    read_use_aux,
    read_vocabulary,
    require,
    write_decoder,
    write_own,
)
from paceline.checkpoint.dialects.keys import (
    DECODER_KEYS,
    INERT_OF_DRAFTERS,
    NEUTRAL_OF_DRAFTERS,
    UNSTATED,
    Place,
    check_keys,
    contradiction,
    lift,
    nested,
    same_names,
)
from paceline.checkpoint.dialects.layer_attention import (
    FULL,
    SLIDING,
    effective_window,
    layer_attention_keys,
    resolve_layer_attention,
)
from paceline.checkpoint.dialects.taps import agree_on_taps, read_engine_taps, read_output_taps, write_engine_taps
from paceline.errors import CheckpointError

LLAMA_FLAVOUR, QWEN3_FLAVOUR = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
ENGINE_KEY = "eagle_aux_hidden_state_layer_ids"
_NESTED_KEY = f"eagle_config.{ENGINE_KEY}"
SPECFORGE_TAPS = 3  # its trainer knows no other number
# in either place, the same in both forms
_EITHER_PLACE = (
    "norm_before_residual",
    "norm_before_fc",
    "norm_output",
    "fc_norm",
    "target_hidden_size",
    "num_aux_hidden_states",
    "num_aux_layers",
    "use_aux_hidden_state",
    "ttt_length",
    # our own additions
    "doubles_every_layer",
    "aux_hidden_stream",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
_READ = (
    DECODER_KEYS
    | {*_EITHER_PLACE, ENGINE_KEY, "eagle_config", "draft_vocab_size", "has_own_lm_head", "num_target_layers"}
    | {"is_neox_style", OWN_KEY}
)
_TRAINING = frozenset({"step_loss_decay", "embed_requires_grad"})


def read(
    config: Mapping[str, Any], origin: str, names: Collection[str], *, is_qwen3: bool, is_specforge: bool
) -> DrafterContract:
    """Read either form of either flavour.

    Args:
        config: the whole object.
        origin: the file, for messages.
        names: tensor names of the file, canonical; empty if the file was not looked at.
        is_qwen3: whether attention norms its queries and keys.
        is_specforge: whether the ids stand inside `eagle_config` only.
    Raises:
        CheckpointError: a key is unknown, a needed field is missing, or two contradict.
    Source: EAGLE-3 config files of SpecForge and vLLM.
    """
    top = ConfigReader(config, origin)
    inner = nested(config, "eagle_config", top)
    check_keys(
        Place("", config),
        top,
        kind="EAGLE-3",
        read=_READ,
        neutral={**NEUTRAL_OF_DRAFTERS, "is_causal": (True, None)},
        inert=INERT_OF_DRAFTERS | _TRAINING,
    )
    check_keys(inner, top, kind="EAGLE-3", read={*_EITHER_PLACE, ENGINE_KEY}, inert=_TRAINING)
    flat = lift(same_names(*_EITHER_PLACE), (inner, Place("", config)), top)
    either, own = ConfigReader(flat, origin), ConfigReader(read_own(config, top), origin)
    read_use_aux(flat["use_aux_hidden_state"], top)
    depth = _depth(top, own)
    taps = _taps(config, inner, depth, top)
    for key in ("num_aux_hidden_states", "num_aux_layers"):
        if flat[key] is not None and flat[key] != len(taps):
            raise contradiction(key, flat[key], f"the number of ids in {ENGINE_KEY}", len(taps), top)
    decoder, vocab_size = read_decoder(config, origin), top.whole("vocab_size")
    return DrafterContract(
        family="eagle3",
        origin=origin,
        target_name=own.text("target_name", default=""),
        target_num_layers=depth,
        target_hidden_size=either.whole("target_hidden_size", default=decoder["hidden_size"]),
        target_layer_ids=taps,
        aux_hidden_stream=read_stream(either),
        has_tap_norm=either.flag("fc_norm", default=False),
        block_size=read_num_steps(flat, either, own) + 1,
        layout="autoregressive",
        mask_token_id=own.whole("mask_token_id", default=NO_MASK, minimum=NO_MASK),
        is_neox_style=top.flag("is_neox_style", default=True),
        draft_sample_method=read_sample_method(own, "greedy"),
        dtype=read_dtype(top, config),
        eagle3=_switches(flat, either, is_specforge=is_specforge),
        has_qk_norm=is_qwen3,
        **decoder,
        **read_windows(config, decoder["num_layers"], top, has_windows=is_qwen3 or OWN_KEY in config),
        **read_vocabulary(top, vocab_size, own.whole("target_vocab_size", default=vocab_size)),
        **read_scores(flat, either),
        **read_own_tables(config, names, top),
    )


def read_windows(
    config: Mapping[str, Any], num_layers: int, reader: ConfigReader, *, has_windows: bool
) -> dict[str, Any]:
    """Windows of an EAGLE-3 decoder, whose layers are all causal.

    Args:
        config: object with `layer_types` and `sliding_window`.
        num_layers: drafter layers.
        reader: for the file in messages.
        has_windows: whether readers of this flavour honour `layer_types`; the Llama flavour does not.
    """
    types = config.get("layer_types")
    if not has_windows and types and SLIDING in types:
        raise reader.error(f"layer_types is {types}; EAGLE-3 of the Llama flavour has {FULL!r} only")
    try:
        windows, causal = resolve_layer_attention(
            num_layers,
            layer_types=types,
            sliding_window=effective_window(config),
            dflash_config={},
            is_causal=True,
        )
    except CheckpointError as error:
        raise reader.error(error.message, hint=error.hint) from error
    return {"layer_windows": windows, "layer_causal": causal}


def check_norms(reader: ConfigReader, *, norm_before_fc: bool, fc_norm: bool) -> None:
    """Refuse two norms before `fc`.

    Raises:
        CheckpointError: both are on.
    """
    if norm_before_fc and fc_norm:
        raise reader.error(
            "norm_before_fc and fc_norm are both true; one norm over all taps and one per tap exclude each other"
        )


def _taps(config: Mapping[str, Any], inner: Place, depth: int, top: ConfigReader) -> tuple[TargetLayerId, ...]:
    engine_ids, output_ids = config.get(ENGINE_KEY), inner.values.get(ENGINE_KEY)
    if engine_ids is None:
        hint = (
            "writing the trained layers to it; engines fall back to three layers of their own choice, "
            "in output ids usually [1, L/2 - 1, L - 4]"
        )
        return read_output_taps(output_ids, depth, top, key=_NESTED_KEY, hint=hint)
    taps = read_engine_taps(engine_ids, depth, top, key=ENGINE_KEY)
    if output_ids is not None:
        others = read_output_taps(output_ids, depth, top, key=_NESTED_KEY)
        agree_on_taps(taps, f"the top-level {ENGINE_KEY}", others, _NESTED_KEY, top)
    return taps


def _depth(top: ConfigReader, own: ConfigReader) -> int:
    """Layers of the target: a field of ours at the top level, or among our additions to SpecForge's form."""
    ours = own.whole("target_num_layers", default=UNSTATED, minimum=UNSTATED)
    stated = top.whole("num_target_layers", default=ours, minimum=UNSTATED)
    if ours != UNSTATED and stated != ours:
        raise contradiction("num_target_layers", stated, f"{OWN_KEY}.target_num_layers", ours, top)
    return stated


def _switches(flat: Mapping[str, Any], either: ConfigReader, *, is_specforge: bool) -> Eagle3Settings:
    norm_before_fc = either.flag("norm_before_fc", default=False)
    check_norms(either, norm_before_fc=norm_before_fc, fc_norm=either.flag("fc_norm", default=False))
    if is_specforge:
        if not either.flag("norm_output", default=True):
            raise either.error(
                "norm_output is False; as SpecForge means it, the head would read the state before the final norm"
            )
        recycles_normed = False
    else:
        recycles_normed = either.flag("norm_output", default=False)
    return Eagle3Settings(
        norm_before_residual=either.flag("norm_before_residual", default=False),
        norm_before_fc=norm_before_fc,
        norm_output=recycles_normed,
        doubles_every_layer=either.flag("doubles_every_layer", default=False),
    )


def write(contract: DrafterContract) -> dict[str, Any]:
    """Write EAGLE-3 in its native form; every switch is explicit.

    Raises:
        CheckpointError: the contract has parts of another family, or windows that the layout cannot state.
    """
    settings = _settings(contract)
    require(
        contract,
        "native EAGLE-3",
        **PLAIN_ATTENTION,
        layout="autoregressive",
        convolution=None,
        selector=None,
        markov=None,
        confidence=None,
        draft_top_k=None,
        latent=None,
        has_mask_embedding=False,
        layer_causal=(True,) * contract.num_layers,
    )
    layer_types, window, _ = layer_attention_keys(contract)
    return {
        **_write_decoder(contract),
        "layer_types": layer_types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "num_target_layers": contract.target_num_layers,
        ENGINE_KEY: write_engine_taps(contract),
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": settings.norm_before_fc,
        "norm_output": settings.norm_output,
        "fc_norm": contract.has_tap_norm,
        "eagle_config": {
            ENGINE_KEY: list(contract.target_layer_ids),
            "use_aux_hidden_state": True,
            "doubles_every_layer": settings.doubles_every_layer,
            "aux_hidden_stream": contract.aux_hidden_stream,
            "input_embedding_scale": contract.input_embedding_scale,
            "output_multiplier": contract.output_multiplier,
            "final_logit_softcapping": contract.final_logit_softcapping,
        },
        **write_own(contract),
    }


def write_specforge(contract: DrafterContract) -> dict[str, Any]:
    """Write EAGLE-3 as SpecForge and SGLang read it: output ids inside `eagle_config`, one layer, three taps.

    Raises:
        CheckpointError: the drafter needs a field that SpecForge does not have.
    """
    settings = _settings(contract)
    require(
        contract,
        "SpecForge",
        **PLAIN_SCORES,
        **PLAIN_ATTENTION,
        layout="autoregressive",
        convolution=None,
        selector=None,
        markov=None,
        confidence=None,
        draft_top_k=None,
        latent=None,
        aux_hidden_stream="prefix",
        has_qk_norm=False,
        has_mask_embedding=False,
        is_neox_style=True,
        num_layers=1,
        num_taps=SPECFORGE_TAPS,
        has_own_head=True,
        layer_windows=(None,) * contract.num_layers,
        layer_causal=(True,) * contract.num_layers,
        eagle3=Eagle3Settings(False, settings.norm_before_fc, False, doubles_every_layer=False),
    )
    return {
        **_write_decoder(contract),
        "norm_output": True,  # in SpecForge's meaning: the head reads the state after the final norm
        "eagle_config": {
            ENGINE_KEY: list(contract.target_layer_ids),
            "use_aux_hidden_state": True,
            "norm_before_fc": settings.norm_before_fc,
            "fc_norm": contract.has_tap_norm,
        },
        **write_own(contract),
    }


def _settings(contract: DrafterContract) -> Eagle3Settings:
    if contract.eagle3 is None:
        raise CheckpointError(
            f"the EAGLE-3 layouts are for family eagle3; the drafter's is {contract.family}",
            origin={"drafter": contract.origin},
        )
    return contract.eagle3


def _write_decoder(contract: DrafterContract) -> dict[str, Any]:
    return {
        "architectures": [QWEN3_FLAVOUR if contract.has_qk_norm else LLAMA_FLAVOUR],
        "model_type": "qwen3" if contract.has_qk_norm else "llama",
        **write_decoder(contract),
        "vocab_size": contract.vocab_size,
        "draft_vocab_size": contract.draft_vocab_size,
        "target_hidden_size": contract.target_hidden_size,
        "has_own_lm_head": contract.has_own_head,
        "is_neox_style": contract.is_neox_style,
    }
