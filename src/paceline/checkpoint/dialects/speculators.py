"""The speculators layout: `speculators_model_type`, a nested `transformer_layer_config`, method fields flat beside it.

Tap ids number hidden states, one more than the layer; a mirror `target_layer_ids` numbers layers. Sliding layers are
causal unless `sliding_window_non_causal`, full layers never, as speculators trains them; engines that carry the flag
over to full layers serve another drafter. The layout has no word for the target's depth; our own files add it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract, DrafterFamily, Eagle3Settings, TargetLayerId
from paceline.checkpoint.dialects.eagle3 import check_norms, read_windows
from paceline.checkpoint.dialects.fields import (
    NO_MASK,
    OWN_KEY,
    PLAIN_ATTENTION,
    PLAIN_SCORES,
    read_confidence,
    read_decoder,
    read_dtype,
    read_markov,
    read_mask_token_id,
    read_own,
    read_own_tables,
    read_sample_method,
    read_vocabulary,
    require,
    require_stated,
    write_decoder,
    write_dspark_heads,
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
    nested,
)
from paceline.checkpoint.dialects.layer_attention import (
    effective_window,
    layer_attention_keys,
    resolve_sliding_causal,
)
from paceline.checkpoint.dialects.taps import agree_on_taps, read_engine_taps, read_output_taps, write_engine_taps
from paceline.checkpoint.dialects.zlab import DFLASH2_FIELDS, read_dflash2, write_dflash2
from paceline.errors import CheckpointError

MARKER = "speculators_model_type"
_FAMILIES: Mapping[str, DrafterFamily] = {
    "dflash": "dflash",
    "dflash2": "dflash2",
    "dspark": "dspark",
    "eagle3": "eagle3",
}
_OTHERS = {"peagle": "P-EAGLE", "xpress": "XPress", "mtp": "multi-token prediction", "eagle": "EAGLE-1"}
_ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "dflash": ("DFlashSpeculator", "DFlashDraftModel"),
    "dflash2": ("DFlash2DraftModel",),
    "dspark": ("DSparkSpeculator", "DSparkDraftModel"),
    "eagle3": ("Eagle3Speculator", "Eagle3DraftModel"),
}
_ENGINE_KEY: Mapping[str, str] = dict.fromkeys(_FAMILIES, "aux_hidden_state_layer_ids") | {
    "eagle3": "eagle_aux_hidden_state_layer_ids"
}
_LAYER, _METHOD = "transformer_layer_config", "speculators_config"
_COMMON = {MARKER, "speculators_version", _METHOD, _LAYER, "architectures", "model_type", "draft_vocab_size"} | {
    "target_hidden_size",
    "target_layer_ids",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
    OWN_KEY,
}
_BLOCK = {"block_size", "mask_token_id", "sliding_window_non_causal", "sample_from_anchor"}
_OF_FAMILY: Mapping[str, frozenset[str]] = {
    "dflash": frozenset(_BLOCK),
    "dflash2": frozenset(_BLOCK | {*DFLASH2_FIELDS}),
    "dspark": frozenset(
        _BLOCK | {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
    ),
    "eagle3": frozenset({"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"}),
}


def read(config: Mapping[str, Any], origin: str, names: Collection[str]) -> DrafterContract:
    """Read a speculators config.

    Args:
        config: the whole object.
        origin: the file, for messages.
        names: canonical tensor names; empty if the file was not looked at.
    Raises:
        CheckpointError: the method is not supported, a key is unknown, a needed field is missing, or two contradict.
    Source: config classes of speculators 0.9.
    """
    top = ConfigReader(config, origin)
    method = _method(config, top)
    engine_key = _ENGINE_KEY[method]
    check_keys(
        Place("", config),
        top,
        kind=f"{method} in the speculators layout",
        read=_COMMON | _OF_FAMILY[method] | {engine_key},
        neutral=NEUTRAL_OF_DRAFTERS,
        inert=INERT_OF_DRAFTERS | {"embed_requires_grad"},
    )
    layer_place = nested(config, _LAYER, top)
    check_keys(
        layer_place,
        top,
        kind=f"{method} in the speculators layout",
        read=(DECODER_KEYS - {"architectures", "quantization_config"}) | {"is_causal"},
        neutral={**NEUTRAL_OF_DRAFTERS, "quantization_config": (None,)},  # the one at the top level counts
        inert=INERT_OF_DRAFTERS | {"architectures"},
    )
    layer_config = layer_place.values
    if config.get("draft_vocab_size") is None:
        raise top.error("draft_vocab_size is missing; speculators would take 32000, other engines the full vocabulary")
    layer, own = ConfigReader(layer_config, origin), ConfigReader(read_own(config, top), origin)
    decoder, vocab_size = read_decoder(layer_config, origin), layer.whole("vocab_size")
    depth = own.whole("target_num_layers", default=UNSTATED, minimum=UNSTATED)
    name, num_proposed = _read_method(config, method, top, origin)
    if name and own.text("target_name", default="") not in ("", name):
        raise contradiction("verifier.name_or_path", name, f"{OWN_KEY}.target_name", own.text("target_name"), top)
    common: dict[str, Any] = {
        "family": _FAMILIES[method],
        "origin": origin,
        "target_name": own.text("target_name", default=name),
        "target_num_layers": depth,
        "target_hidden_size": top.whole("target_hidden_size", default=decoder["hidden_size"]),
        "target_layer_ids": _taps(config, engine_key, depth, top),
        "aux_hidden_stream": "prefix",
        "is_neox_style": True,
        "dtype": read_dtype(top, config, layer_config),
        **PLAIN_SCORES,
        **decoder,
        **read_vocabulary(
            top,
            vocab_size,
            vocab_size,
            full_because="a DFlash2 selector" if method == "dflash2" else None,
        ),
        **read_own_tables(config, names, top),
    }
    if method == "eagle3":
        contract = DrafterContract(
            **common, **_read_eagle3(layer_config, decoder["num_layers"], num_proposed, top, own)
        )
    else:
        contract = DrafterContract(**common, **_read_block(config, layer_config, decoder, vocab_size, method, top, own))
        if num_proposed > contract.num_draft_tokens:
            raise contradiction(
                "speculative_tokens",
                num_proposed,
                "the number of rows that block_size leaves to predict",
                contract.num_draft_tokens,
                top,
            )
    _check_is_causal(layer_config.get("is_causal"), contract, top)
    return contract


def write(contract: DrafterContract) -> dict[str, Any]:
    """Write any family for speculators and vLLM.

    Raises:
        CheckpointError: the drafter needs a field that speculators does not have.
    """
    method: str = contract.family
    require_stated(contract, "speculators", "vocab_size", "target_vocab_size", "draft_vocab_size")
    _require(contract, method)
    layer_types, window, _ = layer_attention_keys(contract)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[method][0]],
        MARKER: method,
        "speculators_version": "0.9.0",
        _METHOD: {
            "algorithm": method,
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": contract.num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": contract.target_name or None, "architectures": []},
        },
        _LAYER: {
            "model_type": "qwen3" if contract.has_qk_norm else "llama",
            **write_decoder(contract),
            "vocab_size": contract.target_vocab_size,
            "layer_types": layer_types,
            "sliding_window": window,
            "use_sliding_window": window is not None,
        },
        "dtype": contract.dtype,
        "tie_word_embeddings": False,
        "draft_vocab_size": contract.draft_vocab_size,
        "target_hidden_size": contract.target_hidden_size,
        _ENGINE_KEY[method]: write_engine_taps(contract),
        **write_own(contract),
    }
    if contract.eagle3 is not None:
        return config | {
            "norm_before_residual": contract.eagle3.norm_before_residual,
            "norm_before_fc": contract.eagle3.norm_before_fc,
            "norm_output": contract.eagle3.norm_output,
            "fc_norm": contract.has_tap_norm,
        }
    return config | {
        "block_size": contract.block_size,
        "mask_token_id": contract.mask_token_id,
        # without effect in training where no layer slides, but false would let engines make full layers causal
        "sliding_window_non_causal": not any(contract.layer_causal),
        "sample_from_anchor": contract.layout == "anchor_sampling",
        **(write_dflash2(contract) if contract.family != "dspark" else write_dspark_heads(contract)),
    }


def _method(config: Mapping[str, Any], top: ConfigReader) -> str:
    method = config.get(MARKER)
    if not isinstance(method, str) or method not in _FAMILIES:
        spoken = f" ({_OTHERS[method]})" if isinstance(method, str) and method in _OTHERS else ""
        raise top.error(f"{MARKER} is {method!r}{spoken}, which is not supported; supported are {', '.join(_FAMILIES)}")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in _ARCHITECTURES[method]:
        raise top.error(
            f"architectures is {architectures!r} and {MARKER} {method!r}; its architecture is "
            f"{' or '.join(_ARCHITECTURES[method])}"
        )
    return method


def _read_method(config: Mapping[str, Any], method: str, top: ConfigReader, origin: str) -> tuple[str, int]:
    """Name of the target, and proposals per step."""
    spec = nested(config, _METHOD, top)
    check_keys(
        spec,
        top,
        kind=f"{method} in the speculators layout",
        read=("algorithm", "proposal_methods", "default_proposal_method", "verifier"),
    )
    if spec.values.get("algorithm") != method:
        raise contradiction(MARKER, method, f"{_METHOD}.algorithm", spec.values.get("algorithm"), top)
    methods = spec.values.get("proposal_methods")
    if not isinstance(methods, list) or len(methods) != 1 or not isinstance(methods[0], Mapping):
        raise top.error(f"{_METHOD}.proposal_methods is {methods!r}, expected a list of one object")
    check_keys(
        Place(f"{_METHOD}.proposal_methods[0]", methods[0]),
        top,
        kind="a speculator",
        read=("speculative_tokens",),
        # anything else accepts tokens that the target would not have chosen
        neutral={"proposal_type": ("greedy",), "verifier_accept_k": (1,), "accept_tolerance": (0, 0.0)},
    )
    if spec.values.get("default_proposal_method") not in (None, "greedy"):
        raise top.error(
            f"{_METHOD}.default_proposal_method is {spec.values['default_proposal_method']!r}; supported is 'greedy'"
        )
    verifier = nested(spec.values, "verifier", top)
    check_keys(verifier, top, kind="a speculator", read=("name_or_path",), inert=("architectures",))
    name = ConfigReader(verifier.values, origin).text("name_or_path", default="")
    return name, ConfigReader(methods[0], origin).whole("speculative_tokens")


def _taps(config: Mapping[str, Any], engine_key: str, depth: int, top: ConfigReader) -> tuple[TargetLayerId, ...]:
    hint = "writing the trained ones; speculators falls back to the hidden states [2, L/2, L - 3]"
    taps = read_engine_taps(config.get(engine_key), depth, top, key=engine_key, hint=hint)
    if config.get("target_layer_ids") is not None:
        mirror = read_output_taps(config["target_layer_ids"], depth, top)
        agree_on_taps(taps, engine_key, mirror, "target_layer_ids", top)
    return taps


def _read_block(
    config: Mapping[str, Any],
    layer_config: Mapping[str, Any],
    decoder: Mapping[str, Any],
    vocab_size: int,
    method: str,
    top: ConfigReader,
    own: ConfigReader,
) -> dict[str, Any]:
    if layer_config.get("model_type") not in (None, "qwen3", "llama"):
        raise top.error(f"{_LAYER}.model_type is {layer_config['model_type']!r}; supported are 'qwen3' and 'llama'")
    try:
        windows, causal = resolve_sliding_causal(
            decoder["num_layers"],
            layer_types=layer_config.get("layer_types"),
            sliding_window=effective_window(layer_config),
            non_causal=top.flag("sliding_window_non_causal", default=method == "dflash2"),
        )
    except CheckpointError as error:
        raise top.error(error.message, hint=error.hint) from error
    from_anchor = top.flag("sample_from_anchor", default=method == "dspark")
    markov = read_markov(top) if method == "dspark" else None
    return {
        "has_tap_norm": False,
        "layer_windows": windows,
        "layer_causal": causal,
        "block_size": top.whole("block_size", minimum=1 if from_anchor else 2),
        "layout": "anchor_sampling" if from_anchor else "fill_in",
        "mask_token_id": read_mask_token_id(top, vocab_size),
        "draft_sample_method": read_sample_method(own, "greedy" if method == "dflash" else "probabilistic"),
        "markov": markov,
        "confidence": read_confidence(config, top, markov, enabled_default=True) if method == "dspark" else None,
        **(read_dflash2(top, decoder["hidden_size"], vocab_size) if method == "dflash2" else {}),
    }


def _check_is_causal(value: object, contract: DrafterContract, top: ConfigReader) -> None:
    """Speculators never reads it; where it is stated all the same it must say what the layers are."""
    if value is not None and any(value is not causal for causal in contract.layer_causal):
        causal = list(contract.layer_causal)
        raise contradiction(f"{_LAYER}.is_causal", value, "layer by layer, by the layout's own fields, it", causal, top)


def _read_eagle3(
    layer_config: Mapping[str, Any], num_layers: int, num_proposed: int, top: ConfigReader, own: ConfigReader
) -> dict[str, Any]:
    flavour = layer_config.get("model_type")
    if flavour not in ("llama", "qwen3"):
        raise top.error(f"{_LAYER}.model_type is {flavour!r}; supported are 'llama' and 'qwen3'")
    norm_before_fc, fc_norm = top.flag("norm_before_fc", default=False), top.flag("fc_norm", default=False)
    check_norms(top, norm_before_fc=norm_before_fc, fc_norm=fc_norm)
    try:
        norm_before_residual = top.flag("norm_before_residual")
    except CheckpointError as error:
        hint = "the trained value; where it is missing, engines take true and speculators false"
        raise top.error(error.message, hint=hint) from error
    return {
        "has_tap_norm": fc_norm,
        "has_qk_norm": flavour == "qwen3",
        **read_windows(layer_config, num_layers, top, has_windows=True),
        "block_size": num_proposed + 1,
        "layout": "autoregressive",
        "mask_token_id": own.whole("mask_token_id", default=NO_MASK, minimum=NO_MASK),
        "draft_sample_method": read_sample_method(own, "greedy"),
        "eagle3": Eagle3Settings(
            norm_before_residual=norm_before_residual,
            norm_before_fc=norm_before_fc,
            norm_output=top.flag("norm_output", default=False),
            doubles_every_layer=False,
        ),
    }


def _require(contract: DrafterContract, method: str) -> None:
    sliding = tuple(window is not None for window in contract.layer_windows)
    common: dict[str, Any] = {
        **PLAIN_SCORES,
        **PLAIN_ATTENTION,
        "aux_hidden_stream": "prefix",
        "is_neox_style": True,
        "latent": None,
        "draft_top_k": None,
        "has_mask_embedding": False,
        "vocab_size": contract.target_vocab_size,
    }
    if contract.eagle3 is not None:
        require(
            contract,
            "speculators",
            **common,
            layout="autoregressive",
            layer_causal=(True,) * contract.num_layers,
            markov=None,
            confidence=None,
            convolution=None,
            selector=None,
            eagle3=Eagle3Settings(
                contract.eagle3.norm_before_residual,
                contract.eagle3.norm_before_fc,
                contract.eagle3.norm_output,
                doubles_every_layer=False,
            ),
        )
        return
    is_reduced = contract.has_vocabulary_map
    require(
        contract,
        "speculators",
        **common,
        eagle3=None,
        has_qk_norm=True,
        has_tap_norm=False,
        # readers take the target's embedding, and its head unless the vocabulary is reduced
        has_own_embedding=False,
        has_own_head=is_reduced,
        layer_causal=sliding if any(contract.layer_causal) else (False,) * contract.num_layers,
        **({"markov": None, "confidence": None} if method != "dspark" else {"convolution": None, "selector": None}),
    )
