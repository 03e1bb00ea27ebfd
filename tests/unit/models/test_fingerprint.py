"""The fingerprint passes on the target it was recorded on, in every precision; one that proves nothing is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import tiny_drafter, tiny_prompts, tiny_target, wrap_drafter, wrap_target
from tests.unit.models.probing import PROBE, old_format, without_hints
from torch import Tensor

from paceline.checkpoint.contract import DrafterFamily
from paceline.errors import CheckpointError, CompatibilityError
from paceline.models.drafters.table import DRAFTERS, Drafter
from paceline.models.fingerprint import (
    NEAR_TOLERANCE,
    TAP_TOLERANCE,
    check_fingerprint,
    record_fingerprint,
    replay_fingerprint,
)
from paceline.models.layers import LinearMode
from paceline.models.probe.stages import MEASURES
from paceline.models.readings import reread
from paceline.models.targets.dense import DenseTarget

FAMILIES: tuple[DrafterFamily, ...] = tuple(DRAFTERS)


@pytest.fixture(scope="module")
def target() -> DenseTarget:
    return tiny_target()


@pytest.fixture
def drafter(target: DenseTarget) -> Drafter:
    return tiny_drafter(target.contract)


@pytest.fixture
def stored(target: DenseTarget, drafter: Drafter) -> dict[str, Tensor]:
    return record_fingerprint(target, drafter, PROBE)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stage_of_every_family_fits_where_it_was_recorded(target: DenseTarget, family: DrafterFamily) -> None:
    drafter = tiny_drafter(target.contract, family=family)
    stored = record_fingerprint(target, drafter, PROBE)
    check_fingerprint(target, drafter, stored)
    replay = replay_fingerprint(target, drafter, stored)
    stages = [result.stage for result in replay.results]
    wanted = ["taps", "fc_input", "context", "keys", "embeddings", "rows", "logits", "drafts", "config"]
    assert sorted(stages) == sorted(wanted + (["recycled"] if family == "eagle3" else []))
    assert stages[0] == "taps" and max(result.error for result in replay.results) < 0.06, "bf16 storage alone"
    assert all(stored[name].dtype == torch.bfloat16 for name in stored if name.startswith(("tap.", "context")))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["plain", "packed", "row_invariant"])
def test_another_precision_or_arithmetic_passes(family: DrafterFamily, dtype: torch.dtype, mode: LinearMode) -> None:
    """Recorded plainly in float32, replayed as served, stacked projections included."""
    stored = record_fingerprint(tiny_target(), tiny_drafter(tiny_target().contract, family=family), PROBE)
    served = wrap_target(tiny_target().to(dtype), mode)
    pair = wrap_drafter(tiny_drafter(served.contract, family=family).to(dtype), mode)
    check_fingerprint(served.model, pair.model, stored)
    replay = replay_fingerprint(served.model, pair.model, stored)
    assert max(comparison.error for comparison in replay.taps) < NEAR_TOLERANCE / 3
    assert max(result.error for result in replay.results[1:]) < 0.6


def test_a_record_in_bf16_passes_in_float32(target: DenseTarget, drafter: Drafter) -> None:
    coarse = wrap_target(tiny_target().to(torch.bfloat16), "plain").model
    stored = record_fingerprint(coarse, wrap_drafter(copy.deepcopy(drafter).to(torch.bfloat16)).model, PROBE)
    check_fingerprint(target, drafter, stored)


def quantised(target: DenseTarget, kind: str) -> DenseTarget:
    """A copy whose matrices went through a GGUF quantisation and back."""
    gguf = pytest.importorskip("gguf")
    which = gguf.GGMLQuantizationType[kind]
    copied = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.dim() == 2:
                packed = gguf.quants.quantize(np.ascontiguousarray(parameter.float().numpy()), which)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, which)))
    return copied


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_1"])
def test_a_quantised_copy_of_the_right_target_passes(target: DenseTarget, family: DrafterFamily, kind: str) -> None:
    drafter = tiny_drafter(target.contract, family=family)
    stored = record_fingerprint(target, drafter, PROBE)
    served = quantised(target, kind)
    assert not torch.equal(served.embed_tokens.weight, target.embed_tokens.weight)
    check_fingerprint(served, drafter, stored)


def test_a_coarse_copy_is_said(
    target: DenseTarget, drafter: Drafter, stored: dict[str, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    check_fingerprint(quantised(target, "Q8_0"), drafter, stored)
    assert not caplog.records
    check_fingerprint(quantised(target, "Q4_1"), drafter, stored)
    assert "coarser quantisation" in caplog.text


def test_a_tuned_target_passes_and_another_does_not(
    target: DenseTarget, drafter: Drafter, stored: dict[str, Tensor]
) -> None:
    """The check is for wrong models, not for small differences: those cost little acceptance."""
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1 + 1e-3)
    check_fingerprint(tuned, drafter, stored)
    with pytest.raises(CompatibilityError) as caught:
        check_fingerprint(tiny_target(seed=9), drafter, stored)
    assert "no layer of this target matches" in caught.value.message
    assert caught.value.hint is not None and "'tiny-llama'" in caught.value.hint
    assert caught.value.origin == {"drafter": "tests/tiny-drafter", "target": "tests/tiny-llama"}


def test_nan_is_a_difference(target: DenseTarget, drafter: Drafter, stored: dict[str, Tensor]) -> None:
    """NaN compares false with everything, so a check for "greater than" would let it through."""
    broken = copy.deepcopy(target)
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))  # behind the taps
    check_fingerprint(broken, drafter, stored)
    with torch.no_grad():
        broken.embed_tokens.weight[PROBE[0]] = float("nan")
    with pytest.raises(CompatibilityError, match="tap 1"):
        check_fingerprint(broken, drafter, stored)
    for name, stage in (("hidden_norm", "context features"), ("norm", "hidden rows")):
        sick = reread(drafter)
        gain = sick.get_parameter(f"backbone.{name}.weight")
        sick.get_submodule(f"backbone.{name}").weight = torch.nn.Parameter(gain * float("nan"), requires_grad=False)
        with pytest.raises(CompatibilityError, match=stage):
            check_fingerprint(target, sick, stored)


def test_the_one_place_that_matters_is_the_best_one(target: DenseTarget, stored: dict[str, Tensor]) -> None:
    """Neighbouring layers of a deep target may lie within any tolerance: what counts is which fits best."""
    near = copy.deepcopy(target)
    with torch.no_grad():
        for layer in near.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    drafter = tiny_drafter(near.contract)
    record = record_fingerprint(near, drafter, PROBE)
    moved = reread(drafter, target_layer_ids=tuple(layer + 1 for layer in drafter.contract.target_layer_ids))
    replay = replay_fingerprint(near, moved, record)
    assert max(comparison.error for comparison in replay.taps) < TAP_TOLERANCE
    assert [result.stage for result in replay.failed] == ["taps", "config"]


def test_a_fingerprint_of_format_1_still_checks_what_it_has(target: DenseTarget, drafter: Drafter) -> None:
    stored = old_format(target, drafter, PROBE)
    check_fingerprint(target, drafter, stored)
    assert [result.stage for result in replay_fingerprint(target, drafter, stored).results] == ["taps", "context"]
    moved = reread(drafter, target_layer_ids=(-1, 1, 2))
    with pytest.raises(CompatibilityError, match="it matches layer 0, the config says -1"):
        check_fingerprint(target, moved, stored)
    with pytest.raises(CompatibilityError, match="context features"):
        check_fingerprint(target, tiny_drafter(target.contract, seed=7), stored)
    with pytest.raises(CheckpointError, match=r"lacks tap\.2"):
        check_fingerprint(target, drafter, {name: tensor for name, tensor in stored.items() if name != "tap.2"})


def test_a_fingerprint_of_one_family_says_nothing_of_another(target: DenseTarget, stored: dict[str, Tensor]) -> None:
    for family in FAMILIES:
        if family != "dflash":
            with pytest.raises(CheckpointError, match=f"family 'dflash', the config says '{family}'"):
                check_fingerprint(target, tiny_drafter(target.contract, family=family), stored)


def test_other_numbers_of_taps_and_later_formats_are_refused(
    target: DenseTarget, drafter: Drafter, stored: dict[str, Tensor]
) -> None:
    with pytest.raises(CheckpointError, match=r"recorded with the taps \[0, 1, 2\], the config says \[0, 2\]"):
        check_fingerprint(target, tiny_drafter(target.contract, target_layer_ids=(0, 2)), stored)
    text = bytes(stored["description"].tolist()).replace(b'"format":2', b'"format":3')
    stored["description"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="of format 3, this version reads 1 and 2"):
        check_fingerprint(target, drafter, stored)


NAMES = sorted(record_fingerprint(tiny_target(), tiny_drafter(tiny_target().contract), PROBE))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "description"])
def test_every_tensor_is_missed_and_looked_at(
    target: DenseTarget, drafter: Drafter, stored: dict[str, Tensor], name: str
) -> None:
    whole = dict(stored)
    tensor = stored.pop(name)
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        check_fingerprint(target, drafter, stored)
    damages = [tensor[:0], tensor.flatten() if tensor.dim() > 1 else tensor.unsqueeze(0)]
    damages += [tensor * 0 - 5] if not tensor.is_floating_point() else [tensor * float("nan"), tensor.long()]
    damages += [tensor * 0 + 10**9] if name in ("probe_ids", "block_lengths") or name.endswith("_positions") else []
    for damaged in damages:
        with pytest.raises(CheckpointError, match="cannot be replayed"):
            check_fingerprint(target, drafter, whole | {name: damaged})


@pytest.mark.parametrize("name", [name for name in NAMES if name in MEASURES or name.startswith("tap.")])
def test_every_witness_has_teeth(target: DenseTarget, drafter: Drafter, stored: dict[str, Tensor], name: str) -> None:
    """Whatever is stored is compared: a poisoned tensor makes the check say no, never pass."""
    tensor = stored[name]
    poisoned = tensor.roll(1, dims=-1) if tensor.is_floating_point() else (tensor + 1) % 512
    if name == "candidate_log_q":
        poisoned = tensor - 2
    changed = without_hints(stored | {name: poisoned.contiguous()})
    if name == "block_hidden_alone":  # a load leaves the repetition out, `paceline check` does not
        assert [result.stage for result in replay_fingerprint(target, drafter, changed).failed] == ["rows"]
        return
    with pytest.raises((CompatibilityError, CheckpointError)):
        check_fingerprint(target, drafter, changed)


@pytest.mark.parametrize(("name", "value"), [("tap.1", 0.0), ("context", 0.0), ("block_hidden", 0.0)])
def test_rows_of_zeros_prove_nothing(
    target: DenseTarget, drafter: Drafter, stored: dict[str, Tensor], name: str, value: float
) -> None:
    with pytest.raises(CheckpointError, match="prove nothing"):
        check_fingerprint(target, drafter, stored | {name: torch.full_like(stored[name], value)})


def test_unknown_tensors_and_broken_descriptions_are_refused(
    target: DenseTarget, drafter: Drafter, stored: dict[str, Tensor]
) -> None:
    with pytest.raises(CheckpointError, match="holds surprise"):
        check_fingerprint(target, drafter, stored | {"surprise": torch.ones(1)})
    for damaged in (torch.ones(4), torch.zeros(9, dtype=torch.uint8), torch.tensor(list(b"[1]"), dtype=torch.uint8)):
        with pytest.raises(CheckpointError, match="description"):
            check_fingerprint(target, drafter, stored | {"description": damaged})


@pytest.mark.parametrize("length", [4, 5, 9, 18, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_short_and_long_probes(target: DenseTarget, family: DrafterFamily, length: int) -> None:
    (probe,) = tiny_prompts([length], seed=4)
    drafter = tiny_drafter(target.contract, family=family)
    check_fingerprint(target, drafter, record_fingerprint(target, drafter, probe))


def test_a_probe_of_three_tokens_is_too_short(target: DenseTarget, drafter: Drafter) -> None:
    with pytest.raises(CheckpointError, match="probe of 4 tokens, this one has 3"):
        record_fingerprint(target, drafter, [5, 6, 7])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_shorter_or_longer_than_in_training_changes_no_number(
    target: DenseTarget, family: DrafterFamily
) -> None:
    """The largest context only sizes the table of positions: no number changes, and only the record can tell."""
    drafter = tiny_drafter(target.contract, family=family)
    stored = record_fingerprint(target, drafter, PROBE)
    for num_positions in (64, 2048):
        other = reread(drafter, max_position_embeddings=num_positions)
        check_fingerprint(target, other, without_hints(stored))
        with pytest.raises(CompatibilityError, match=f"max_position_embeddings 512, the config says {num_positions}"):
            check_fingerprint(target, other, stored)


def test_it_is_small(target: DenseTarget, stored: dict[str, Tensor]) -> None:
    """A hundred and eighty kB for SmolLM2; nothing in it grows with the vocabulary or the depth of the target."""
    large = tiny_target(vocab_size=2048, num_layers=8)
    drafter = tiny_drafter(large.contract, target_layer_ids=(0, 1, 2))
    sizes = [
        sum(tensor.nbytes for name, tensor in found.items() if name != "description")
        for found in (stored, record_fingerprint(large, drafter, PROBE))
    ]
    assert sizes[0] == sizes[1] < 25_000


@pytest.mark.parametrize("family", ["dflash", "dspark", "eagle3"])  # a tiny random convolution amplifies beyond use
def test_a_drafter_quantised_since_passes_if_it_says_so(target: DenseTarget, family: DrafterFamily) -> None:
    """Its weights are rounded copies of those that were recorded; another drafter's are still another's."""
    whole = tiny_drafter(target.contract, family=family)
    stored = record_fingerprint(target, whole, PROBE)
    coarse = reread(whole, quantization="nvfp4")
    gguf = pytest.importorskip("gguf")
    for name, parameter in list(coarse.named_parameters()):
        if parameter.dim() == 2 and ".layers." in f".{name}":
            kind = gguf.GGMLQuantizationType.Q5_0
            packed = gguf.quants.quantize(np.ascontiguousarray(parameter.numpy()), kind)
            rounded = torch.nn.Parameter(torch.from_numpy(gguf.quants.dequantize(packed, kind)), requires_grad=False)
            coarse.get_submodule(name.rpartition(".")[0]).weight = rounded
    check_fingerprint(target, coarse, stored)
    with pytest.raises(CompatibilityError, match="differ"):
        check_fingerprint(target, reread(coarse, quantization=None), stored)
    with pytest.raises(CompatibilityError, match="is_neox_style should be true"):
        check_fingerprint(target, reread(coarse, is_neox_style=False), without_hints(stored))
    with pytest.raises(CompatibilityError):
        other = tiny_drafter(target.contract, seed=3, family=family)
        check_fingerprint(target, reread(other, quantization="nvfp4"), stored)


def test_a_mark_of_a_conversion_counts_as_what_the_config_said_before(target: DenseTarget) -> None:
    """A converted drafter is no longer quantised, but its weights were rounded after the fingerprint was recorded."""
    whole = tiny_drafter(target.contract)
    stored = record_fingerprint(target, whole, PROBE)
    coarse = reread(whole)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in list(coarse.named_parameters()):
        if parameter.dim() == 2 and ".layers." in f".{name}":
            noise = torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.04
            changed = torch.nn.Parameter(parameter + noise, requires_grad=False)
            coarse.get_submodule(name.rpartition(".")[0]).weight = changed
    with pytest.raises(CompatibilityError, match="its weights begin to differ"):
        check_fingerprint(target, coarse, stored)
    mark = torch.tensor(list(b"nvfp4"), dtype=torch.uint8)
    check_fingerprint(target, coarse, stored | {"dequantized_from": mark})
    with pytest.raises(CheckpointError, match="expected bytes"):
        check_fingerprint(target, coarse, stored | {"dequantized_from": mark.float()})


def test_few_rows_are_enough_where_they_leave_no_doubt(
    target: DenseTarget, drafter: Drafter, stored: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load reads the rest of the probe only if the first compared rows are not plainly right."""
    lengths: list[int] = []
    forward = type(target).forward

    def counted(self: DenseTarget, token_ids: Tensor, *arguments: Any) -> Tensor:
        lengths.append(token_ids.shape[1])
        return forward(self, token_ids, *arguments)

    monkeypatch.setattr(DenseTarget, "forward", counted)
    check_fingerprint(target, drafter, stored)
    first = len(PROBE) - 1 - 16
    assert lengths == [first + 1]
    with pytest.raises(CompatibilityError, match="matches layer 0"):
        check_fingerprint(target, reread(drafter, target_layer_ids=(-1, 1, 2)), stored)
    assert lengths[1:3] == [first + 1, first + 16]
