"""The native form of a layer against its modules in float64, and which layers have none."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.unit.models.conftest import randomise
from tests.unit.models.test_flat_layer import LAYERS, SHAPES, Layer, layer_with_convolutions, plain_layer, prepared, run
from torch import Tensor

from paceline.models.layers import GatedMLP, Linear, set_linear_mode
from paceline.ops.native import rows as native_rows
from paceline.ops.native.rows import can_run

pytestmark = pytest.mark.skipif(
    not can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)


def exact(layer: Layer, x_BTD: Tensor, offset_R: Tensor | None = None) -> Tensor:
    """The modules in float64, with the same weights."""
    wide = copy.deepcopy(layer)
    set_linear_mode(wide, "plain")
    return run(wide.double(), x_BTD.double(), offset_R=offset_R)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_native_form_computes_the_layer(name: str, shape: tuple[int, int]) -> None:
    layer = prepared(LAYERS[name](), "native")
    assert layer._native is not None
    x = torch.randn(*shape, layer.input_layernorm.weight.shape[0]).to(torch.bfloat16)
    y = run(layer, x)
    error, size = (y.double() - exact(layer, x)).norm(), exact(layer, x).norm()
    assert error < 2**-6 * size


def test_blocks_within_a_row_are_kept_apart() -> None:
    layer = prepared(layer_with_convolutions(2), "native")
    x, offset = torch.randn(1, 6, 24).to(torch.bfloat16), torch.arange(6) % 3
    two_blocks = run(layer, x, offset_R=offset)
    assert (two_blocks.double() - exact(layer, x, offset)).norm() < 2**-6 * two_blocks.double().norm()
    assert not torch.equal(two_blocks[:, 3:], run(layer, x)[:, 3:])


@pytest.mark.parametrize("name", LAYERS)
def test_every_part_takes_part(name: str) -> None:
    """Each weight that is changed before packing changes the native form, too: none was forgotten or taken twice."""
    layer = prepared(LAYERS[name](), "native")
    x = torch.randn(1, 4, layer.input_layernorm.weight.shape[0]).to(torch.bfloat16)
    y = run(layer, x)
    for part, parameter in layer.named_parameters():
        for factor, is_same in ((-0.5, False), (-2.0, True)):
            with torch.no_grad():
                parameter.mul_(factor)
            set_linear_mode(layer, "native")
            assert torch.equal(run(layer, x), y) is is_same, part


@pytest.mark.parametrize("name", LAYERS)
def test_rows_do_not_depend_on_the_batch(name: str) -> None:
    layer = prepared(LAYERS[name](), "native")
    x = torch.randn(3, 6, layer.input_layernorm.weight.shape[0]).to(torch.bfloat16)
    together = run(layer, x)
    assert torch.equal(run(layer, x[:1]), together[:1])


def test_the_stream_that_comes_in_stays() -> None:
    layer = prepared(plain_layer(), "native")
    x = torch.randn(1, 4, 48).to(torch.bfloat16)
    before = x.clone()
    run(layer, x)
    assert torch.equal(x, before), "it may have been tapped"


def test_layers_that_the_native_form_leaves_out() -> None:
    assert prepared(plain_layer(has_sink=True), "native")._native is None
    assert prepared(plain_layer(value_scale=0.5), "native")._native is None
    assert prepared(plain_layer(), "row_invariant")._native is None
    layer = prepared(plain_layer(), "native")
    set_linear_mode(layer, "packed")
    assert layer._native is None and layer._flat is not None
    wide = plain_layer()
    set_linear_mode(wide, "native")  # float32 has no native form
    assert wide._native is None


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_modules_alone_compute_the_same(is_neox_style: bool) -> None:
    """What a layer without a native form, or with pairs of channels, does with native parts."""
    layer = prepared(plain_layer(bias=True, qk_norm=True), "native")
    layer._native = None
    x = torch.randn(2, 4, 48).to(torch.bfloat16)
    y = run(layer, x, is_neox_style=is_neox_style)
    wide = copy.deepcopy(layer)
    set_linear_mode(wide, "plain")
    assert (y.double() - run(wide.double(), x.double(), is_neox_style=is_neox_style)).norm() < 2**-6 * y.double().norm()


def test_gates_are_laid_out_and_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = GatedMLP(48, 40).to(torch.bfloat16).requires_grad_(False)
    sizes, pack = [], native_rows.pack

    def counted(weight: Tensor, bias: Tensor | None, *, is_gated: bool) -> native_rows.NativeWeight:
        sizes.append(weight.shape[0])
        return pack(weight, bias, is_gated=is_gated)

    monkeypatch.setattr(native_rows, "pack", counted)
    set_linear_mode(mlp, "native")
    assert sorted(sizes) == [48, 80]
    assert mlp.native_gate_up is not None and mlp.gate_up_proj.native is None and mlp.down_proj.native is not None
    set_linear_mode(mlp, "plain")
    assert mlp.native_gate_up is None and mlp.down_proj.native is None


def test_inputs_without_a_partner_stay_with_torch() -> None:
    linear = Linear(5, 4).to(torch.bfloat16)
    randomise(linear, 0)
    set_linear_mode(linear.requires_grad_(False), "native")
    assert linear.native is None
    x = torch.randn(2, 5).to(torch.bfloat16)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight))
