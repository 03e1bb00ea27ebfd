"""Weights in the codes of their file: who reads them, when they no longer count, and that a lent head stays in them."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch
from tests.tiny import loaded, tiny_target
from tests.tiny_codes import coded, meant, store_in_codes, store_target_in_codes
from tests.unit.checkpoint.conftest import TinyGguf
from torch import Tensor

from paceline.errors import ConfigError
from paceline.models import layers as layers_module
from paceline.models import loading
from paceline.models.layers import GatedMLP, Linear, LinearMode, set_linear_mode
from paceline.models.loading import resolve_linear_mode
from paceline.models.target_weights import fill_target
from paceline.ops.native import integers, quantized, rows
from paceline.ops.native.integers import can_run_integers
from paceline.ops.native.quantized import can_run_quantized

has_integers = pytest.mark.skipif(not can_run_integers(), reason="no products in whole numbers on this machine")
has_codes = pytest.mark.skipif(not can_run_quantized(), reason="no products with codes on this machine")


def linear_in_codes(num_outputs: int = 96, num_inputs: int = 64, bits: int = 4) -> Linear:
    linear = Linear(num_inputs, num_outputs).to(torch.bfloat16).requires_grad_(False)
    linear.weight.copy_(torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(0)))
    store_in_codes(linear, bits)
    return linear


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


@has_codes
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_multiplies_codes_and_native_their_copy(bits: int) -> None:
    linear, x = linear_in_codes(bits=bits), numbers(3, 64)
    held = coded(linear.weight, bits)
    set_linear_mode(linear, "quantized")
    assert linear.native is not None and linear.native.form != rows.BFLOATS
    assert linear.native.panels.numel() < 0.6 * linear.weight.numel() * 2
    assert not torch.equal(linear(x), rows.linear(x, rows.pack(linear.weight)))
    set_linear_mode(linear, "native")
    assert torch.equal(linear(x), rows.linear(x, rows.pack(linear.weight))), "native is what it was, bit for bit"
    assert held.codes_OI.shape == linear.weight.shape


@has_integers
@pytest.mark.parametrize("bits", [4, 8])
def test_int8_multiplies_codes_with_rounded_rows(bits: int) -> None:
    linear, x = linear_in_codes(bits=bits), numbers(3, 64)
    exact = integers.round_rows(x).double() @ meant(coded(linear.weight, bits)).double().T
    set_linear_mode(linear, "int8")
    assert linear.native is not None and linear.native.form in (rows.INTEGERS_4, rows.INTEGERS_8)
    assert (linear(x) - exact).norm() < 0.003 * exact.norm()


@has_integers
def test_int8_rounds_a_drafters_weights_and_no_targets() -> None:
    target, drafter = loaded("llama", linear_mode="native", dtype=torch.bfloat16, drafter_family="dflash2")
    set_linear_mode(target.model, "int8")
    drafter.model.prepare_for_serving("int8")
    forms = {
        name: {part.native.form for part in model.modules() if isinstance(part, Linear) and part.native is not None}
        for name, model in (("target", target.model), ("drafter", drafter.model))
    }
    assert forms == {"target": {rows.BFLOATS}, "drafter": {rows.INTEGERS_8}}
    part = drafter.model.backbone.fc
    x, kept = numbers(3, part.weight.shape[1]), part.weight.clone()
    assert torch.equal(part.weight, kept), "the parameter stays what the file says"
    exact = x.double() @ part.weight.double().T
    assert 0 < (part(x) - exact).norm() < 0.02 * exact.norm()
    assert part.some_outputs(torch.tensor([3, 1])).native.form == rows.INTEGERS_8  # type: ignore[union-attr]
    drafter.model.prepare_for_serving("quantized")
    assert torch.equal(part(x), rows.linear(x, rows.pack(part.weight))), '"quantized" rounds nothing'


@has_codes
def test_a_weight_that_changed_or_was_copied_is_no_longer_what_codes_say() -> None:
    linear, x = linear_in_codes(), numbers(3, 64)
    other = copy.deepcopy(linear)
    assert linear.has_codes and not other.has_codes
    linear.weight.mul_(2.0)
    assert not linear.has_codes
    for changed in (linear, other):
        set_linear_mode(changed, "quantized")
        assert torch.equal(changed(x), rows.linear(x, rows.pack(changed.weight))), "the weight counts, not the file"


@has_codes
def test_some_outputs_keep_their_codes() -> None:
    linear, x, ids = linear_in_codes(), numbers(3, 64), torch.tensor([90, 2, 3, 40])
    set_linear_mode(linear, "quantized")
    part = linear.some_outputs(ids)
    assert part.native is not None and part.native.form == rows.CODES_4
    assert torch.equal(part(x), linear(x)[:, ids])


@has_codes
def test_codes_that_products_cannot_take_leave_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = linear_in_codes(), numbers(3, 64)
    monkeypatch.setattr(layers_module.quantized, "can_pack_codes", lambda *_parts: False)
    set_linear_mode(linear, "quantized")
    assert linear.native is not None and linear.native.form == rows.BFLOATS
    assert torch.equal(linear(x), rows.linear(x, rows.pack(linear.weight)))


@has_codes
def test_gate_and_up_stay_in_codes() -> None:
    mlp, x = GatedMLP(64, 96).to(torch.bfloat16).requires_grad_(False), numbers(3, 64)
    for part in (mlp.gate_up_proj, mlp.down_proj):
        part.weight.copy_(torch.randn(part.weight.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    held = store_in_codes(mlp.gate_up_proj, 4)
    set_linear_mode(mlp, "quantized")
    assert mlp.native_gate_up is not None and mlp.native_gate_up.form == rows.CODES_4
    gate, up = (x.double() @ meant(held).double().T).chunk(2, dim=-1)
    gated = (torch.nn.functional.silu(gate) * up).bfloat16()
    assert (rows.linear(x, mlp.native_gate_up) - gated).abs().max() <= 2**-7 * gated.abs().max()


@has_codes
def test_a_drafter_drafts_with_the_targets_head_in_codes() -> None:
    target, drafter = loaded("llama", linear_mode="native", dtype=torch.bfloat16)
    store_target_in_codes(target.model)
    set_linear_mode(target.model, "quantized")
    head = target.model.lm_head
    assert head.native is not None and head.native.form == rows.CODES_8
    assert drafter.model.vocabulary.lm_head is None, "it brings none of its own"
    hidden = numbers(1, 7, head.weight.shape[1])
    drafted = drafter.model.vocabulary.logits(hidden, target.model)
    assert torch.equal(drafted, rows.linear(hidden, head.native)), "the target's own apply"
    assert not torch.equal(drafted, rows.linear(hidden, rows.pack(head.weight))), "and no copy of its weight"


@has_codes
@pytest.mark.parametrize(
    ("mode", "module", "asked"), [("quantized", quantized, "can_run_quantized"), ("int8", integers, "can_run_integers")]
)
def test_without_its_instructions_a_mode_multiplies_the_copy(
    mode: LinearMode, module: ModuleType, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, asked, lambda: False)
    linear = linear_in_codes()
    linear.allow_rounding()
    set_linear_mode(linear, mode)
    assert linear.native is not None and linear.native.form == rows.BFLOATS


@pytest.mark.parametrize("kinds", [("Q4_1", "Q8_0"), ("Q4_0", "Q4_0"), ("Q5_0", "F16")])
def test_a_loaded_file_tells_its_linears(tmp_path: Path, kinds: tuple[str, str]) -> None:
    from paceline.checkpoint.target_config import read_target_contract
    from paceline.models.building import empty_target

    file = TinyGguf(tmp_path / "tiny.gguf")
    file.types = {name: kinds[0] for name, tensor in file.tensors.items() if tensor.ndim == 2}
    file.types |= {"token_embd.weight": kinds[1], "blk.1.attn_k.weight": "F16"}
    path = file.write()
    contract = read_target_contract(path, "tiny")
    model = empty_target(contract, torch.bfloat16, torch.device("cpu"))
    fill_target(model, contract, path)
    found = {name for name, part in model.named_modules() if isinstance(part, Linear) and part.has_codes}
    everything = {name for name, part in model.named_modules() if isinstance(part, Linear)}
    mixed = {"layers.1.self_attn.qkv_proj"}  # tensors of two types make it up
    assert found == (everything - mixed if kinds[0].startswith("Q4") else set())
    for name, part in model.named_modules():
        if name in found:
            assert isinstance(part, Linear) and part._stored is not None
            assert torch.equal(meant(part._stored.read()).bfloat16(), part.weight), "the weight is what codes mean"


@has_integers
def test_codes_are_not_taken_where_states_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TinyGguf(tmp_path / "tiny.gguf")
    file.types = {name: "Q8_0" for name, tensor in file.tensors.items() if tensor.ndim == 2}
    path = str(file.write())
    monkeypatch.setattr(loading, "has_amx", lambda: False)
    monkeypatch.setattr(loading, "open_tokenizer", lambda _path: None)

    def mode(asked: LinearMode | Literal["auto"], *, takes_codes: bool) -> str:
        target = loading.load_target(path, dtype="bfloat16", device="cpu", linear_mode=asked, takes_codes=takes_codes)
        return target.linear_mode

    assert mode("auto", takes_codes=True) == "int8" and mode("auto", takes_codes=False) == "native"
    assert mode("int8", takes_codes=False) == "int8", "who asks gets it"


def test_auto_takes_codes_where_they_run_and_they_are_refused_where_not(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama").to(torch.bfloat16)
    weight, contract = target.norm.weight, target.contract
    monkeypatch.setattr(loading, "can_run_native", lambda _weight: True)
    monkeypatch.setattr(loading, "has_amx", lambda: False)
    monkeypatch.setattr(loading, "can_run_quantized", lambda: True)
    monkeypatch.setattr(loading, "can_run_integers", lambda: True)
    assert resolve_linear_mode("auto", weight, contract, has_codes=True) == "int8"
    assert resolve_linear_mode("quantized", weight, contract, has_codes=True) == "quantized"
    monkeypatch.setattr(loading, "can_run_integers", lambda: False)
    assert resolve_linear_mode("auto", weight, contract, has_codes=True) == "quantized"
    with pytest.raises(ConfigError, match=r"'int8'.*no such form"):
        resolve_linear_mode("int8", weight, contract, has_codes=True)
    assert resolve_linear_mode("auto", weight, contract) == "native"
    assert resolve_linear_mode("native", weight, contract, has_codes=True) == "native"
    for mode in ("quantized", "int8"):
        with pytest.raises(ConfigError, match=mode):
            resolve_linear_mode(mode, weight, contract)
        with pytest.raises(ConfigError, match="one process holds"):
            resolve_linear_mode(mode, weight, None, has_codes=True)
    monkeypatch.setattr(loading, "can_run_quantized", lambda: False)
    assert resolve_linear_mode("auto", weight, contract, has_codes=True) == "native"
    with pytest.raises(ConfigError, match="quantized"):
        resolve_linear_mode("quantized", weight, contract, has_codes=True)
    monkeypatch.setattr(loading, "has_amx", lambda: True)
    assert resolve_linear_mode("auto", weight, contract, has_codes=True) != "quantized"


def test_without_the_library_or_its_instructions_there_are_no_products_with_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (quantized, integers):
        monkeypatch.setattr(module, "library", lambda: None)
    assert not can_run_quantized() and not can_run_integers()
    monkeypatch.undo()
    monkeypatch.setattr(quantized, "permutes_bytes", lambda: False)
    monkeypatch.setattr(integers, "multiplies_bytes", lambda: False)
    assert not can_run_quantized() and not can_run_integers()
