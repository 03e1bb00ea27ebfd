"""Window and causality of each drafter layer: how the layouts state them, resolved and written.

Engines resolve these keys differently; a sliding layer that is served causally although it was trained bidirectionally
accepts less and raises nothing. The table of cases in the tests is the specification's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.contract import DrafterContract
from paceline.errors import CheckpointError

SLIDING, FULL = "sliding_attention", "full_attention"


def resolve_layer_attention(
    num_layers: int,
    *,
    layer_types: Sequence[str] | None,
    sliding_window: int | None,
    dflash_config: Mapping[str, Any],
    is_causal: bool | None,
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Decide window and causality of each drafter layer.

    Args:
        num_layers: drafter layers.
        layer_types: one of `sliding_attention`, `full_attention` per layer; None or empty counts as absent.
        sliding_window: tokens that a sliding layer may see, the query included.
        dflash_config: `use_swa`, `swa_window_size` and `causal` are read.
        is_causal: the top-level override, above all else.
    Returns:
        (window per layer or None for all tokens, causality per layer).
    Raises:
        CheckpointError: a sliding layer has no window, a window has no layer, or a value is malformed.
    Source: the resolver of vLLM for DFlash drafters, the most permissive of those in use.
    """
    types = _listed(layer_types)
    if types and (len(types) != num_layers or not set(types) <= {SLIDING, FULL}):
        raise CheckpointError(f"layer_types is {types}, expected {num_layers} of {SLIDING!r} or {FULL!r}")
    use_swa = _optional_flag("use_swa", dflash_config.get("use_swa", False)) or False
    is_causal = _optional_flag("is_causal", is_causal)
    causal_override = is_causal if is_causal is not None else _optional_flag("causal", dflash_config.get("causal"))

    if not types or (use_swa and SLIDING not in types):
        sliding = [use_swa] * num_layers
    else:
        sliding = [kind == SLIDING for kind in types]
    window = None
    stated = dflash_config.get("swa_window_size")
    if stated is not None and not any(sliding) and dflash_config.get("use_swa") is not False:
        raise CheckpointError(
            f"dflash_config.swa_window_size is {stated!r}, and no layer slides",
            hint="use_swa true or sliding layer_types if the drafter was trained with a window; use_swa false if not",
        )
    if any(sliding):
        has_own_window = "swa_window_size" in dflash_config
        window = dflash_config["swa_window_size"] if has_own_window else sliding_window
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            key = "dflash_config.swa_window_size" if has_own_window else "sliding_window"
            raise CheckpointError(
                f"layers {[i for i, s in enumerate(sliding) if s]} are sliding and {key} is {window!r}",
                hint="the trained window in tokens, and use_sliding_window true (when false, readers drop the window)",
            )
    if causal_override is not None:
        causal = [causal_override] * num_layers
    else:
        causal = [kind == SLIDING for kind in types] if types else [False] * num_layers
    return tuple(window if slides else None for slides in sliding), tuple(causal)


def layer_attention_keys(contract: DrafterContract) -> tuple[list[str], int | None, bool | None]:
    """State a contract's windows and causality in the keys of the dialect.

    Args:
        contract: the drafter.
    Returns:
        (`layer_types`, `sliding_window`, `is_causal`); the last is None where causality follows the layer types.
    Raises:
        CheckpointError: layers differ in a way that the dialect cannot state.
    """
    windows = {window for window in contract.layer_windows if window is not None}
    if len(windows) > 1:
        raise CheckpointError(f"the layers have the windows {sorted(windows)}; this dialect can state only one")
    layer_types = [FULL if window is None else SLIDING for window in contract.layer_windows]
    causal: bool | None = None
    if len(set(contract.layer_causal)) == 1:
        causal = contract.layer_causal[0]
    elif list(contract.layer_causal) != [kind == SLIDING for kind in layer_types]:
        raise CheckpointError(
            f"layer causality {list(contract.layer_causal)} follows neither one rule nor the windows "
            f"{list(contract.layer_windows)}; this dialect cannot state it"
        )
    return layer_types, next(iter(windows), None), causal


def resolve_sliding_causal(
    num_layers: int, *, layer_types: Sequence[str] | None, sliding_window: int | None, non_causal: bool
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Decide window and causality as speculators trains: causal only in sliding layers, and only unless `non_causal`.

    Args:
        num_layers: drafter layers.
        layer_types: as for `resolve_layer_attention`.
        sliding_window: tokens that a sliding layer may see, the query included.
        non_causal: `sliding_window_non_causal`.
    Returns:
        (window per layer or None for all tokens, causality per layer).
    Raises:
        CheckpointError: a sliding layer has no window, or a value is malformed.
    Source: speculators 0.9; engines that carry the flag over to full layers serve another drafter than was trained.
    """
    windows, _ = resolve_layer_attention(
        num_layers, layer_types=layer_types, sliding_window=sliding_window, dflash_config={}, is_causal=None
    )
    return windows, tuple(window is not None and not non_causal for window in windows)


def require_full_attention(layer_types: Sequence[str] | None, layout: str) -> None:
    """Refuse windows in a layout whose trainers have none; a list of another length is a copy of the target's.

    Raises:
        CheckpointError: a layer is not of full attention.
    """
    if layer_types and set(_listed(layer_types)) != {FULL}:
        raise CheckpointError(
            f"layer_types has {sorted(set(layer_types))}; drafters of the {layout} layout have {FULL!r} only"
        )


def effective_window(config: Mapping[str, Any]) -> int | None:
    """`sliding_window` as Hugging Face reads it: dropped where its switch is off."""
    window: int | None = None if config.get("use_sliding_window") is False else config.get("sliding_window")
    return window


def _listed(layer_types: object) -> list[str]:
    """The types of a config that may hold anything in their place."""
    if layer_types is None:
        return []
    if not isinstance(layer_types, Sequence) or not all(isinstance(kind, str) for kind in layer_types):
        raise CheckpointError(f"layer_types is {layer_types!r}, expected a list of {SLIDING!r} or {FULL!r}")
    return list(layer_types)


def _optional_flag(key: str, value: object) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r}, expected true, false or null")
    return value
