"""A tiny target, a small token file, and a hook behind every optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_run import chat_target, random_rows, write_token_file
from tests.unit.training.runs import Act

from paceline.models.loading import LoadedTarget
from paceline.training import loop
from paceline.training.step import StepResult, train_step


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return chat_target(vocab_size=512, hidden_size=32, intermediate_size=48, head_size=8)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = random_rows(40, 24, vocab_size=400)
    return write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=6)


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Act], None]:
    """Lets a test act right after the optimizer step of every step, which is counted from 1 in each attempt."""
    original = train_step

    def install(act: Act) -> None:
        count = [0]

        def step(*arguments: Any, **options: Any) -> StepResult:
            result = original(*arguments, **options)
            count[0] += 1
            act(count[0])
            return result

        monkeypatch.setattr(loop, "train_step", step)

    return install
