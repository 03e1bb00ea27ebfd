"""The fingerprint passes on the target it was recorded on, and names what is wrong with any other."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from tests.tiny import tiny_drafter, tiny_prompts, tiny_target
from torch import Tensor

from paceline.checkpoint.contract import TargetLayerId
from paceline.errors import CheckpointError, CompatibilityError
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.fingerprint import (
    TOLERANCE,
    check_fingerprint,
    compared_positions,
    record_fingerprint,
    replay_fingerprint,
)
from paceline.models.layers import LinearMode, set_linear_mode
from paceline.models.targets.dense import DenseTarget

LAYERS = tuple(TargetLayerId(layer) for layer in (-1, 1, 2))
(PROBE,) = tiny_prompts([40], seed=3)


@pytest.fixture(scope="module")
def target() -> DenseTarget:
    return tiny_target()


@pytest.fixture
def drafter(target: DenseTarget) -> DFlashDrafter:
    return tiny_drafter(target.contract, target_layer_ids=LAYERS)


@pytest.fixture
def stored(target: DenseTarget, drafter: DFlashDrafter) -> dict[str, Tensor]:
    return record_fingerprint(target, drafter, PROBE)


def with_layers(drafter: DFlashDrafter, layers: Sequence[int]) -> DFlashDrafter:
    """The same weights under an edited config."""
    contract = dataclasses.replace(drafter.contract, target_layer_ids=tuple(map(TargetLayerId, layers)))
    edited = DFlashDrafter(contract)
    edited.load_state_dict(drafter.state_dict())
    return edited.requires_grad_(False)


def in_dtype(model: DenseTarget, dtype: torch.dtype) -> DenseTarget:
    cast = copy.deepcopy(model).to(dtype)
    cast.position_table = model.position_table
    return cast


def test_what_is_stored(stored: dict[str, Tensor], target: DenseTarget) -> None:
    assert sorted(stored) == ["context", "probe_ids", "tap.0", "tap.1", "tap.2"]
    assert stored["probe_ids"].tolist() == PROBE
    assert all(stored[name].shape == (8, 64) and stored[name].dtype == torch.float32 for name in stored if "." in name)
    # Tap -1 is the embedding: of the last eight tokens, bit for bit.
    assert torch.equal(stored["tap.0"], target.embed_tokens.weight[torch.tensor(PROBE[-8:])])


@pytest.mark.parametrize(("num_tokens", "positions"), [(48, [40, 47]), (9, [1, 8]), (4, [1, 3]), (2, [1, 1])])
def test_compared_positions(num_tokens: int, positions: list[int]) -> None:
    found = compared_positions(num_tokens)
    assert [found[0], found[-1]] == positions and found == sorted(found)


def test_the_same_target_is_exact(target: DenseTarget, drafter: DFlashDrafter, stored: dict[str, Tensor]) -> None:
    check_fingerprint(target, drafter, stored)
    for comparison, layer in zip(replay_fingerprint(target, drafter, stored), LAYERS, strict=True):
        assert comparison.error == 0.0
        assert comparison.best == comparison.configured == layer + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["plain", "packed", "row_invariant"])
def test_another_precision_or_arithmetic_passes(
    target: DenseTarget, drafter: DFlashDrafter, stored: dict[str, Tensor], dtype: torch.dtype, mode: LinearMode
) -> None:
    """Recorded in float32, replayed as served; the tiny network is rougher than a real one and still well inside."""
    served = in_dtype(target, dtype)
    set_linear_mode(served, mode)
    reader = copy.deepcopy(drafter).to(dtype)
    check_fingerprint(served, reader, stored)
    assert max(comparison.error for comparison in replay_fingerprint(served, reader, stored)) < TOLERANCE / 2


def test_a_record_in_bf16_passes_in_float32(target: DenseTarget, drafter: DFlashDrafter) -> None:
    stored = record_fingerprint(in_dtype(target, torch.bfloat16), copy.deepcopy(drafter).to(torch.bfloat16), PROBE)
    check_fingerprint(target, drafter, stored)


@pytest.mark.parametrize(
    ("layers", "texts"),
    [
        ([-1, 0, 2], ["tap 1 differs", "matches layer 1, the config says 0"]),
        ([0, 1, 2], ["tap 0 differs", "matches layer -1, the config says 0"]),
        ([-1, 0, 1], ["matches layer 1, the config says 0", "matches layer 2, the config says 1"]),
    ],
)
def test_an_edited_layer_list_is_named(
    target: DenseTarget, drafter: DFlashDrafter, stored: dict[str, Tensor], layers: list[int], texts: list[str]
) -> None:
    with pytest.raises(CompatibilityError) as caught:
        check_fingerprint(target, with_layers(drafter, layers), stored)
    assert all(text in caught.value.message for text in texts)
    assert caught.value.hint is not None and "target_layer_ids" in caught.value.hint
    assert caught.value.origin == {"drafter": "tests/tiny-drafter", "target": "tests/tiny-llama"}


def test_other_weights_are_told_from_a_moved_tap(drafter: DFlashDrafter, stored: dict[str, Tensor]) -> None:
    with pytest.raises(CompatibilityError) as caught:
        check_fingerprint(tiny_target(seed=9), drafter, stored)
    assert "matches layer" not in caught.value.message
    assert caught.value.hint is not None
    assert "no layer of this target matches" in caught.value.hint and "'tiny-llama'" in caught.value.hint


def test_a_slightly_tuned_target_passes(target: DenseTarget, drafter: DFlashDrafter, stored: dict[str, Tensor]) -> None:
    """The check is for wrong models, not for small differences: those cost little acceptance."""
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1 + 1e-3)
    check_fingerprint(tuned, drafter, stored)


@pytest.mark.parametrize("name", ["fc", "fc_norm.1", "hidden_norm"])
def test_altered_projection_weights_are_found(
    target: DenseTarget, drafter: DFlashDrafter, stored: dict[str, Tensor], name: str
) -> None:
    weight = drafter.backbone.get_parameter(f"{name}.weight")
    with torch.no_grad():
        # As if a gain was read as 1 + w, or a matrix with its inputs in another order.
        weight.copy_(weight.flip(-1) if weight.dim() > 1 else weight + 1)
    with pytest.raises(CompatibilityError, match="context features differ") as caught:
        check_fingerprint(target, drafter, stored)
    assert caught.value.hint is not None and "hidden_norm" in caught.value.hint


def test_nan_is_a_difference(target: DenseTarget, drafter: DFlashDrafter, stored: dict[str, Tensor]) -> None:
    """NaN compares false with everything, so a check for "greater than" would let it through."""
    broken = copy.deepcopy(target)
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))  # behind the taps
    check_fingerprint(broken, drafter, stored)
    with torch.no_grad():
        broken.embed_tokens.weight[PROBE[0]] = float("nan")
    with pytest.raises(CompatibilityError, match="tap 1"):
        check_fingerprint(broken, drafter, stored)
    with torch.no_grad():
        drafter.backbone.hidden_norm.weight.fill_(float("nan"))
    with pytest.raises(CompatibilityError, match="context features"):
        check_fingerprint(target, drafter, stored)


@pytest.mark.parametrize("name", ["tap.2", "context", "probe_ids"])
def test_an_incomplete_fingerprint_is_refused(
    target: DenseTarget, drafter: DFlashDrafter, stored: dict[str, Tensor], name: str
) -> None:
    del stored[name]
    with pytest.raises(CheckpointError, match="the contract has 3 taps"):
        check_fingerprint(target, drafter, stored)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("probe_ids", torch.tensor([5]), "expected several ids"),
        ("probe_ids", torch.rand(40), "torch.float32"),
        ("probe_ids", torch.full((40,), 512), "512, outside the target's vocabulary"),
        ("probe_ids", torch.full((40,), -1), "outside the target's vocabulary"),
        ("tap.1", torch.zeros(8, 63), r"tap.1 has shape \[8, 63\], expected \[8, 64\]"),
        ("tap.0", torch.zeros(0, 64), r"expected \[8, 64\]"),
        ("context", torch.zeros(7, 64), "context has shape"),
    ],
)
def test_a_damaged_fingerprint_is_refused(
    target: DenseTarget, drafter: DFlashDrafter, stored: dict[str, Tensor], name: str, value: Tensor, text: str
) -> None:
    """An empty comparison would pass on any target."""
    stored[name] = value
    with pytest.raises(CheckpointError, match=text):
        check_fingerprint(target, drafter, stored)
