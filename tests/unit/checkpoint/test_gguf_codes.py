"""Codes of a GGUF file mean, to the bit, what dequantising gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny_codes import meant

from paceline.checkpoint import gguf_codes
from paceline.checkpoint.gguf import open_gguf
from paceline.checkpoint.gguf_codes import HoldsCodes, has_codes, join, nearest_codes

NAMES = [f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_codes_mean_what_dequantising_gives(tiny_gguf: Any, kind: str) -> None:
    tiny_gguf.types = {name: kind for name, tensor in tiny_gguf.tensors.items() if tensor.ndim == 2}
    source = open_gguf(tiny_gguf.write())
    assert isinstance(source, HoldsCodes) and has_codes(kind)
    for name in NAMES:
        assert source.code_kind(name) == kind
        found = source.codes(name)
        assert torch.equal(meant(found), source.load(name)), "rows of q and k in the order of `load`, too"
        assert (found.minima_OC is None) == (found.codes_OI.dtype == torch.int8) == (kind == "Q8_0")


def test_rows_and_joined_weights(tiny_gguf: Any) -> None:
    tiny_gguf.types = {name: "Q4_1" for name, tensor in tiny_gguf.tensors.items() if tensor.ndim == 2}
    source = open_gguf(tiny_gguf.write())
    assert isinstance(source, HoldsCodes)
    q, k = (source.codes(name) for name in NAMES[:2])
    both = torch.cat([source.load(name) for name in NAMES[:2]])
    assert torch.equal(meant(join((q, k))), both)
    ids = torch.tensor([40, 3, 3])
    assert torch.equal(meant(join((q, k)).rows(ids)), both[ids])


@pytest.mark.parametrize("kind", ["F32", "F16", "Q5_0"])
def test_other_types_have_none(tiny_gguf: Any, kind: str) -> None:
    tiny_gguf.types = {name: kind for name, tensor in tiny_gguf.tensors.items() if tensor.ndim == 2}
    source = open_gguf(tiny_gguf.write())
    assert isinstance(source, HoldsCodes)
    assert source.code_kind(NAMES[0]) is None and source.code_kind("model.norm.weight") is None


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_the_nearest_codes_are_within_half_a_step(size: float) -> None:
    weight = size * torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    weight[1], weight[2, 0] = 0.0, 30.0 * size
    held = nearest_codes(weight)
    assert held is not None and held.minima_OC is None and held.codes_OI.dtype == torch.int8
    step = held.scales_OC.float().repeat_interleave(32, dim=1)
    assert ((held.codes_OI * step - weight).abs() <= 0.5001 * step).all(), "none is cut off"
    largest = weight.abs().unflatten(1, (-1, 32)).amax(-1)
    assert (held.scales_OC.float() * 127 <= 1.07 * largest).all()
    assert held.codes_OI.abs().amax() >= 118 and (held.codes_OI[1] == 0).all()


def test_many_rows_are_rounded_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    at_once = nearest_codes(weight)
    monkeypatch.setattr(gguf_codes, "_ROWS_AT_ONCE", 7)
    in_parts = nearest_codes(weight)
    assert at_once is not None and in_parts is not None
    assert torch.equal(at_once.codes_OI, in_parts.codes_OI) and torch.equal(at_once.scales_OC, in_parts.scales_OC)


def test_what_has_no_codes_of_8_bits() -> None:
    assert nearest_codes(torch.ones(2, 48)) is None, "half a block"
    for size in (1e8, 1e-6):
        assert nearest_codes(torch.full((2, 64), size)) is None, "a scale that half precision has not"
    assert nearest_codes(torch.full((2, 64), torch.nan)) is None
