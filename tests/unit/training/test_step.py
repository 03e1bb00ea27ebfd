"""One optimizer step: pooled weights, a frozen target, every parameter trained, and nothing updated on NaN."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.unit.models.conftest import tiny_drafter, tiny_target
from torch import Tensor

from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.targets.dense import DenseTarget
from paceline.training.data import Batch
from paceline.training.features import TargetFeatures
from paceline.training.objective import Objective
from paceline.training.optimizer import make_optimizer
from paceline.training.step import StepResult, StepSettings, train_step

SETTINGS = StepSettings(
    objective=Objective(kl=0.5, ce=0.5, gamma=4.0, chunk_rows=16),
    num_anchors=100,  # more than there are: every candidate is an anchor
    clip_norm=1e9,
    mixed_precision=False,
)


def batch_of(*rows: tuple[int, int], width: int = 24, seed: int = 0) -> Batch:
    """Rows of (prompt length, response length), with tokens that depend on the row's lengths alone."""
    tokens, supervised = (
        torch.zeros(len(rows), width, dtype=torch.long),
        torch.zeros(len(rows), width, dtype=torch.bool),
    )
    for row, (prompt, response) in enumerate(rows):
        generator = torch.Generator().manual_seed(1000 * prompt + response + seed)
        tokens[row, : prompt + response] = torch.randint(0, 60, (prompt + response,), generator=generator)
        supervised[row, prompt : prompt + response] = True
    return Batch.of_rows(tokens, supervised, torch.tensor([sum(row) for row in rows]))


def seeded(part: int) -> torch.Generator:
    return torch.Generator().manual_seed(part)


def one_step(
    drafter: DFlashDrafter,
    target: DenseTarget,
    batches: Sequence[Batch],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    settings: StepSettings = SETTINGS,
    rate: float = 1.0,
) -> StepResult:
    features = TargetFeatures(target, drafter.contract.target_layer_ids)
    # Plain descent at rate 1: the change of a parameter is its gradient.
    optimizer = optimizer or torch.optim.SGD(drafter.parameters(), lr=0.0)
    return train_step(drafter, features, optimizer, batches, seeded, rate, settings)


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradient(batches: Sequence[Batch]) -> tuple[dict[str, Tensor], StepResult]:
    drafter = tiny_drafter()
    before = parameters(drafter)
    result = one_step(drafter, tiny_target(), batches)
    return {name: before[name] - after for name, after in parameters(drafter).items()}, result


def test_accumulated_parts_equal_one_batch() -> None:
    """10 labels in one part and 2 in the other: pooled, not a mean of means."""
    many, few = (4, 5), (6, 3)
    whole, of_whole = gradient([batch_of(many, few)])
    parts, of_parts = gradient([batch_of(many), batch_of(few, width=12)])
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-6, msg=name)
    assert float(of_parts.loss) == pytest.approx(float(of_whole.loss), rel=1e-5)
    assert float(of_parts.gradient_norm) == pytest.approx(float(of_whole.gradient_norm), rel=1e-4)
    assert of_parts.counted_Q.tolist() == of_whole.counted_Q.tolist() == [0, 6, 4, 2]
    assert of_parts.correct_Q.tolist() == of_whole.correct_Q.tolist()
    assert of_parts.num_tokens == of_whole.num_tokens == 18
    # Averaging the two parts' own means is another gradient.
    alone = [gradient([batch_of(row)])[0] for row in (many, few)]
    name = "backbone.fc.weight"
    assert not torch.allclose((alone[0][name] + alone[1][name]) / 2, whole[name], rtol=1e-2)


def test_the_target_is_bit_equal_after_training_and_every_drafter_parameter_moved() -> None:
    drafter, target = tiny_drafter(has_tap_norm=True, attention_bias=True), tiny_target()
    head_before, drafter_before = parameters(target), parameters(drafter)
    optimizer = make_optimizer(drafter, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(4):
        one_step(drafter, target, [batch_of((4, 12), (6, 9), seed=step)], optimizer=optimizer, rate=1e-2)
    assert all(torch.equal(parameter, head_before[name]) for name, parameter in target.named_parameters())
    assert all(parameter.grad is None for parameter in target.parameters())
    for name, parameter in drafter.named_parameters():
        assert not torch.equal(parameter, drafter_before[name]), f"{name} was never trained"


def test_training_lowers_the_loss_on_its_own_data() -> None:
    drafter, target = tiny_drafter(), tiny_target()
    optimizer = make_optimizer(drafter, weight_decay=0.0, betas=(0.9, 0.95))
    batch = batch_of((4, 14), (6, 9))
    losses = [float(one_step(drafter, target, [batch], optimizer=optimizer, rate=3e-3).loss) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_step_without_a_single_anchor_is_finite_and_has_no_gradient() -> None:
    change, result = gradient([batch_of((10, 0), (5, 1))])
    assert float(result.loss) == 0.0 and float(result.gradient_norm) == 0.0 and bool(result.is_finite)
    assert all(torch.count_nonzero(difference) == 0 for difference in change.values())


def test_an_empty_part_changes_nothing_beside_a_full_one() -> None:
    alone, _ = gradient([batch_of((4, 9))])
    beside, result = gradient([batch_of((4, 9)), batch_of((9, 0))])
    assert bool(result.is_finite)
    for name in alone:
        torch.testing.assert_close(beside[name], alone[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_is_updated_when_the_loss_is_not_finite(poison: float) -> None:
    drafter, target = tiny_drafter(), tiny_target()
    optimizer = make_optimizer(drafter, weight_decay=0.1, betas=(0.9, 0.95))
    one_step(drafter, target, [batch_of((4, 9))], optimizer=optimizer, rate=1e-3)
    with torch.no_grad():
        drafter.backbone.norm.weight[0] = poison
    before = parameters(drafter)
    moments = {key: value["exp_avg"].clone() for key, value in optimizer.state.items()}
    result = one_step(drafter, target, [batch_of((4, 9))], optimizer=optimizer, rate=1e-3)
    assert not bool(result.is_finite)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0, equal_nan=True)
        assert parameter.grad is None
    assert all(torch.equal(optimizer.state[key]["exp_avg"], moment) for key, moment in moments.items())


def test_the_gradient_is_clipped_as_one_vector() -> None:
    drafter = tiny_drafter()
    before = parameters(drafter)
    settings = StepSettings(SETTINGS.objective, 100, clip_norm=0.01, mixed_precision=False)
    result = one_step(drafter, tiny_target(), [batch_of((4, 9))], settings=settings)
    change = torch.cat([(before[name] - p.detach()).flatten() for name, p in drafter.named_parameters()])
    assert float(result.gradient_norm) > 0.01
    assert float(change.norm()) == pytest.approx(0.01, rel=1e-3)


def test_a_step_is_a_pure_function_of_its_seeds() -> None:
    settings = StepSettings(SETTINGS.objective, 3, clip_norm=1.0, mixed_precision=False)
    results = []
    for _ in range(2):
        drafter = tiny_drafter()
        one_step(drafter, tiny_target(), [batch_of((4, 15), (5, 13))], settings=settings)
        results.append(parameters(drafter))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_mixed_precision_is_close_to_float32() -> None:
    losses = []
    for mixed_precision in (False, True):
        settings = StepSettings(SETTINGS.objective, 100, clip_norm=1e9, mixed_precision=mixed_precision)
        drafter = tiny_drafter()
        losses.append(float(one_step(drafter, tiny_target(), [batch_of((4, 9))], settings=settings).loss))
        assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=0.05) and losses[0] != losses[1]
