"""Window and causality per layer: the specification's table of cases, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects.layer_attention import FULL, SLIDING, layer_attention_keys, resolve_layer_attention
from paceline.errors import CheckpointError

S, F = SLIDING, FULL
CASES: list[tuple[str, list[str] | None, int | None, dict[str, Any], bool | None, object, tuple[bool, bool]]] = [
    ("R1", None, None, {}, None, (None, None), (False, False)),
    ("R2", None, 128, {"use_swa": True}, None, (128, 128), (False, False)),
    ("R3", None, 128, {"use_swa": True, "swa_window_size": 64}, None, (64, 64), (False, False)),
    ("R4", None, None, {"use_swa": True}, None, "error", (False, False)),
    ("R5", [F, F], None, {}, None, (None, None), (False, False)),
    ("R6", [F, F], 128, {"use_swa": True}, None, (128, 128), (False, False)),
    ("R7", [S, F], 128, {}, None, (128, None), (True, False)),
    ("R8", [S, F], 128, {"use_swa": True}, None, (128, None), (True, False)),
    ("R9", [S, F], 128, {"causal": False}, None, (128, None), (False, False)),
    ("R10", [S, F], 128, {"causal": True}, None, (128, None), (True, True)),
    ("R11", [S, F], 128, {"causal": True}, False, (128, None), (False, False)),
    ("R12", [S, S], 2048, {}, False, (2048, 2048), (False, False)),
    ("R13", [F, F], None, {}, True, (None, None), (True, True)),
]


@pytest.mark.parametrize(
    ("types", "window", "nested", "is_causal", "windows", "causal"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_table(
    types: list[str] | None,
    window: int | None,
    nested: dict[str, Any],
    is_causal: bool | None,
    windows: object,
    causal: tuple[bool, bool],
) -> None:
    def resolve() -> object:
        return resolve_layer_attention(
            2, layer_types=types, sliding_window=window, dflash_config=nested, is_causal=is_causal
        )

    if windows == "error":
        with pytest.raises(CheckpointError, match="are sliding and sliding_window is None"):
            resolve()
    else:
        assert resolve() == (windows, causal)


def test_empty_types_count_as_absent() -> None:
    found = resolve_layer_attention(
        2, layer_types=[], sliding_window=16, dflash_config={"use_swa": True}, is_causal=None
    )
    assert found == ((16, 16), (False, False))


def test_null_window_override_is_used_and_refused() -> None:
    with pytest.raises(CheckpointError, match=r"dflash_config\.swa_window_size is None"):
        resolve_layer_attention(
            1, layer_types=[S], sliding_window=16, dflash_config={"swa_window_size": None}, is_causal=None
        )


@pytest.mark.parametrize(
    ("types", "nested", "is_causal", "window"),
    [
        ([S], {}, None, 8),
        ([S, "chunked_attention"], {}, None, 8),
        ([S, S], {}, None, 0),
        ([S, S], {}, None, True),
        ([S, S], {"causal": "yes"}, None, 8),
        ([S, S], {"use_swa": 1}, None, 8),
        ([S, S], {}, "no", 8),
    ],
)
def test_malformed_values_are_refused(types: list[str], nested: dict[str, Any], is_causal: Any, window: int) -> None:
    with pytest.raises(CheckpointError):
        resolve_layer_attention(2, layer_types=types, sliding_window=window, dflash_config=nested, is_causal=is_causal)


@pytest.mark.parametrize(
    ("windows", "causal"),
    [
        ((None, None), (False, False)),
        ((None, None), (True, True)),
        ((64, None), (True, False)),
        ((64, None), (False, False)),
        ((64, 64), (True, True)),
        ((64, 64), (False, False)),
    ],
)
def test_keys_resolve_back(
    make_drafter: Callable[..., DrafterContract], windows: tuple[int | None, ...], causal: tuple[bool, ...]
) -> None:
    types, window, is_causal = layer_attention_keys(make_drafter(layer_windows=windows, layer_causal=causal))
    found = resolve_layer_attention(
        2, layer_types=types, sliding_window=window, dflash_config={"causal": is_causal}, is_causal=is_causal
    )
    assert found == (windows, causal)


def test_what_the_dialect_cannot_say_is_refused(make_drafter: Callable[..., DrafterContract]) -> None:
    with pytest.raises(CheckpointError, match=r"the windows \[32, 64\]"):
        layer_attention_keys(make_drafter(layer_windows=(32, 64)))
    with pytest.raises(CheckpointError, match="follows neither"):
        layer_attention_keys(make_drafter(layer_windows=(64, None), layer_causal=(False, True)))


def test_a_window_without_a_layer_is_refused_unless_it_is_switched_off() -> None:
    for types in ([F, F], []):
        for nested in ({"swa_window_size": 64}, {"swa_window_size": 64, "use_swa": None}):
            with pytest.raises(CheckpointError, match=r"swa_window_size is 64, and no layer slides") as caught:
                resolve_layer_attention(2, layer_types=types, sliding_window=None, dflash_config=nested, is_causal=None)
            assert "use_swa true" in str(caught.value)
        for nested in ({"swa_window_size": 64, "use_swa": False}, {"swa_window_size": None}):
            windows, _ = resolve_layer_attention(
                2, layer_types=types, sliding_window=None, dflash_config=nested, is_causal=None
            )
            assert windows == (None, None)
