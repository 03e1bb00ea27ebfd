"""Faults of what is trained: norms that stay at 1, masters that lose small updates, a target that moves.

Each check stands beside the fault that it has to find.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import tiny_target
from tests.tiny_run import chat_target, random_rows, tiny_settings, write_token_file
from tests.unit.models.conftest import tiny_drafter
from tests.unit.models.conftest import tiny_target as small_target
from torch import Tensor, nn

from paceline.checkpoint.contract import TargetLayerId
from paceline.configuration.run import TrainRun
from paceline.models.drafters.table import Drafter
from paceline.models.loading import LoadedTarget
from paceline.training.contract import drafter_contract
from paceline.training.data import Batch, read_conversations
from paceline.training.features import TargetFeatures
from paceline.training.objective import Objective
from paceline.training.optimizer import make_optimizer
from paceline.training.starting import starting_drafter
from paceline.training.step import StepSettings, train_step

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"drafter_tap_norm": True},
    "dflash2": {"drafter_family": "dflash2", "drafter_selector_rank": 8, "drafter_selector_top_k": 4},
    "dspark": {"drafter_family": "dspark", "drafter_markov_rank": 8},
    "eagle3": {"drafter_family": "eagle3", "drafter_mask_token_id": None},
}
OBJECTIVE = Objective(kl=0.5, ce=0.5, gamma=4.0, chunk_rows=64)


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chat_target(hidden_size=32, intermediate_size=48, head_size=8)


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> TrainRun:
    data = write_token_file(tmp_path / "data.npz", random_rows(12, 20, vocab_size=400), num_prompt_tokens=4)
    return tiny_settings(tmp_path / "run", data, **FAMILIES[getattr(request, "param", "dflash")])


def untrained(run: TrainRun, target: LoadedTarget) -> Drafter:
    text = read_conversations(run.data.files[0], vocab_size=512)
    return starting_drafter(run, drafter_contract(run, target.contract), target, text, CPU)


def learn(drafter: Drafter, target: LoadedTarget, run: TrainRun, num_steps: int, *, rate: float) -> dict[str, Tensor]:
    """Some steps; the change of every parameter."""
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    features = TargetFeatures(target.model, drafter.contract.target_layer_ids)
    batch = read_conversations(run.data.files[0], vocab_size=512).batch(range(8), 24)
    settings = StepSettings(OBJECTIVE, 99, clip_norm=1.0, mixed_precision=False)
    optimizer = make_optimizer(drafter, weight_decay=0.0, betas=(0.9, 0.95))
    for _ in range(num_steps):
        train_step(drafter, features, optimizer, [batch], lambda part: torch.Generator(), rate, settings)
    return {name: parameter.detach() - before[name] for name, parameter in drafter.named_parameters()}


def frozen_gains(drafter: Drafter, target: LoadedTarget, run: TrainRun) -> list[str]:
    """Gains of norms that training does not move; all start at exactly 1."""
    changes = learn(drafter, target, run, 2, rate=1e-4)
    gains = [name for name in changes if "norm" in name and name.endswith("weight")]
    assert gains and all(bool((dict(drafter.named_parameters())[name] - changes[name] == 1).all()) for name in gains)
    return [name for name in gains if torch.count_nonzero(changes[name]) < changes[name].numel() // 2]


# --- 30: frozen norms ---


@pytest.mark.parametrize("run", FAMILIES, indirect=True)
def test_every_norm_gain_receives_a_gradient_and_moves(target: LoadedTarget, run: TrainRun) -> None:
    assert frozen_gains(untrained(run, target), target, run) == []


@pytest.mark.parametrize("fault", ["no gradient", "bf16 masters"])
def test_norms_that_stay_at_one_are_found(target: LoadedTarget, run: TrainRun, fault: str) -> None:
    """An update of 1e-4 is less than half the distance of 1 to its neighbours in bf16, and is lost every time."""
    drafter = untrained(run, target)
    if fault == "no gradient":
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_("norm" not in name)
    else:
        drafter.to(torch.bfloat16)
    wholly = [name for name, _ in drafter.named_parameters() if "norm" in name]
    assert frozen_gains(drafter, target, run) == wholly


# --- 30: masters and moments ---


def moved_share(drafter: nn.Module) -> float:
    """Least relative change of any matrix element after 1,000 updates of 1e-4 of its size, all one way."""
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1e-4)
    matrices = [parameter for parameter in drafter.parameters() if parameter.dim() > 1]
    before = [parameter.detach().clone().float() for parameter in matrices]
    for _ in range(1000):
        for parameter in matrices:
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    changes = [1 - parameter.detach().float() / old for parameter, old in zip(matrices, before, strict=True)]
    return min(float(change[old != 0].min()) for change, old in zip(changes, before, strict=True))


def test_a_thousand_tiny_updates_change_the_weights_of_a_fresh_drafter(target: LoadedTarget, run: TrainRun) -> None:
    """(1 - 1e-4) ** 1000 is 0.905; in bf16 every one of the thousand rounds away."""
    assert moved_share(untrained(run, target)) == pytest.approx(0.095, abs=0.002)
    assert moved_share(untrained(run, target).to(torch.bfloat16)) == 0.0


@pytest.mark.parametrize("mixed_precision", [False, True])
def test_gradients_and_moments_are_float32(mixed_precision: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, target = tiny_drafter(), small_target()
    optimizer = make_optimizer(drafter, weight_decay=0.0, betas=(0.9, 0.95))
    dtypes: set[torch.dtype] = set()
    step = optimizer.step

    def watched(*arguments: Any) -> Any:
        dtypes.update(parameter.grad.dtype for parameter in drafter.parameters() if parameter.grad is not None)
        return step(*arguments)

    monkeypatch.setattr(optimizer, "step", watched)
    batch = Batch.of_rows(torch.arange(20)[None], torch.arange(20)[None] > 4)
    features = TargetFeatures(target, drafter.contract.target_layer_ids)
    settings = StepSettings(OBJECTIVE, 99, clip_norm=1.0, mixed_precision=mixed_precision)
    train_step(drafter, features, optimizer, [batch], lambda part: torch.Generator(), 1e-3, settings)
    moments = {state[key].dtype for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}
    assert dtypes == moments == {torch.float32}


# --- 37: the frozen target ---


def is_the_target_moved(target: LoadedTarget, run: TrainRun, optimize: Callable[..., torch.optim.Optimizer]) -> bool:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    drafter = untrained(run, target)
    features = TargetFeatures(target.model, drafter.contract.target_layer_ids)
    batch = read_conversations(run.data.files[0], vocab_size=512).batch(range(4), 24)
    settings = StepSettings(OBJECTIVE, 8, clip_norm=1.0, mixed_precision=False)
    optimizer = optimize(drafter, weight_decay=0.1, betas=(0.9, 0.95))
    for _ in range(2):
        train_step(drafter, features, optimizer, [batch], lambda part: torch.Generator(), 1e-2, settings)
    return any(not torch.equal(value, before[name]) for name, value in target.model.state_dict().items())


def test_the_target_is_bit_equal_after_training(run: TrainRun) -> None:
    """B107; the planted fault hands the target's layers over as well, which weight decay alone then moves."""
    target = chat_target(hidden_size=32, intermediate_size=48, head_size=8)
    assert not is_the_target_moved(target, run, make_optimizer)

    def of_both(drafter: Drafter, **options: Any) -> torch.optim.Optimizer:
        for parameter in target.model.layers.parameters():
            parameter.requires_grad_(True).grad = torch.zeros_like(parameter)
        return make_optimizer(nn.ModuleList((drafter, target.model.layers)), **options)

    assert is_the_target_moved(target, run, of_both)


# --- 34: what was loaded is what is trained on ---


def test_a_step_at_rate_zero_leaves_loaded_weights_as_they_are(target: LoadedTarget, run: TrainRun) -> None:
    """There is no second copy of the weights that a first step could write over them."""
    source, drafter = untrained(run, target), untrained(run.model_copy(update={"seed": 7}), target)
    drafter.load_state_dict(source.state_dict())
    changes = learn(drafter, target, run, 1, rate=0.0)
    assert all(torch.count_nonzero(change) == 0 for change in changes.values())
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in drafter.state_dict().items())


# --- 50: layers start random, not as the target's ---


def likeness(drafter: Drafter, target: LoadedTarget) -> float:
    """Largest cosine between a drafter's matrix and one of the target of the same shape."""
    theirs = [parameter for parameter in target.model.parameters() if parameter.dim() > 1]
    return max(
        float(torch.cosine_similarity(ours.detach().flatten(), other.flatten(), dim=0).abs())
        for ours in drafter.parameters()
        for other in theirs
        if ours.shape == other.shape
    )


@pytest.mark.parametrize("run", FAMILIES, indirect=True)
def test_no_layer_starts_as_a_copy_of_the_targets(target: LoadedTarget, run: TrainRun) -> None:
    same_size = run.model_copy(
        update={"drafter": run.drafter.model_copy(update={"intermediate_size": target.contract.intermediate_size})}
    )
    drafter = untrained(same_size, target)
    assert likeness(drafter, target) < 0.3
    with torch.no_grad():
        ours = next(parameter for name, parameter in drafter.named_parameters() if "down_proj" in name)
        ours.copy_(target.model.state_dict()["layers.3.mlp.down_proj.weight"])
    assert likeness(drafter, target) > 0.99


# --- 38: one tensor for embedding and head ---


def test_a_tied_head_teaches_with_the_embedding() -> None:
    """A head that is left as it was made would teach noise."""
    tied = tiny_target()
    assert TargetFeatures(tied, (TargetLayerId(0),)).head_VD.data_ptr() == tied.embed_tokens.weight.data_ptr()
