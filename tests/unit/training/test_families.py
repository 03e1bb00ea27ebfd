"""DFlash2 through the same loop: every part is trained, a resume is exact, and the walk is what serving does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_run import chat_target, random_rows, tiny_settings, write_token_file

from paceline.configuration.run import TrainRun
from paceline.engine.engine import Engine
from paceline.engine.request import SamplingParameters
from paceline.errors import ConfigError
from paceline.models.building import initialise_drafter
from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.loading import LoadedDrafter, LoadedTarget, load_drafter
from paceline.training import loop
from paceline.training.data import read_conversations
from paceline.training.features import TargetFeatures
from paceline.training.loop import drafter_contract, train
from paceline.training.resume import latest_checkpoint
from paceline.training.simulate import simulate
from paceline.training.step import StepResult

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chat_target()


def settings(folder: Path, data: Path, **changes: object) -> TrainRun:
    family = {"drafter_family": "dflash2", "drafter_selector_rank": 8, "drafter_selector_top_k": 4}
    return tiny_settings(folder, data, **(family | changes))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_token_file(tmp_path / "data.npz", random_rows(24, 20, vocab_size=400), num_prompt_tokens=4)


def masters(run: TrainRun) -> dict[str, torch.Tensor]:
    checkpoint = latest_checkpoint(run.output / "checkpoints")
    assert checkpoint is not None
    (file,) = checkpoint.glob("*.safetensors")
    return {name: value for name, value in load_file(file).items() if name.startswith("master.")}


class Crash(Exception):
    """Stands for a lost machine."""


def test_every_part_is_trained_and_a_resume_is_exact(
    target: LoadedTarget, tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = settings(tmp_path / "whole", data), settings(tmp_path / "parts", data)
    train(whole, target)
    before = dict(initialise_drafter(drafter_contract(whole, target.contract), CPU, seed=0).named_parameters())
    after = masters(whole)
    assert {name.removeprefix("master.") for name in after} == set(before)
    assert [name for name, start in before.items() if torch.equal(after[f"master.{name}"], start.detach())] == []

    steps, step = itertools.count(), loop.train_step

    def crash_in_step_13(*arguments: Any) -> StepResult:
        if next(steps) == 12:
            raise Crash
        return step(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(loop, "train_step", crash_in_step_13)
        train(parts, target)
    assert train(parts, target, resume=True).is_finished
    assert all(torch.equal(value, after[name]) for name, value in masters(parts).items())


def test_the_walk_is_what_serving_does(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    """Simulated and served acceptance over the same greedy text, with a selector that was really trained."""
    run = settings(tmp_path / "run", data, schedule_num_steps=20, optimizer_learning_rate=1e-2)
    outcome = train(run, target)
    assert outcome.drafter is not None
    loaded = load_drafter(str(outcome.drafter), target)
    assert isinstance(loaded.model, DFlash2Drafter)
    prompts = random_rows(6, 4, vocab_size=400, seed=5)
    results = Engine(target, LoadedDrafter(loaded.model, loaded.contract, loaded.num_draft_tokens)).generate(
        prompts, SamplingParameters(max_tokens=24, ignore_eos=True)
    )
    texts = [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]
    file = write_token_file(tmp_path / "served.npz", texts, num_prompt_tokens=4)
    conversations = read_conversations(file, vocab_size=512, encoder=None)
    features = TargetFeatures(target.model, loaded.contract.target_layer_ids)
    found = simulate(loaded.model, features, conversations, batch_size=2, max_length=64, mixed_precision=False)
    served = [(len(result.token_ids) - 1, len(result.trace.records)) for result in results]
    assert list(found.per_conversation) == served


def test_groups_must_divide_the_width(target: LoadedTarget, tmp_path: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match="conv_group_size 24 does not divide the width, 64"):
        train(settings(tmp_path / "run", data, drafter_conv_group_size=24), target)
