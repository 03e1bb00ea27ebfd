"""Work beside a step's main line: when it begins, who waits for it, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.unit.engine.step_benches import KINDS, StepBench

from paceline.engine import step as step_module
from paceline.engine.attends import AttentionChoice
from paceline.engine.proposal import BlockProposer
from paceline.engine.side_stream import SideStream

PAGED = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
KIND = next(kind for kind in KINDS if kind.name == "dflash greedy")


class WatchedSide:
    """Notes what a side stream is asked for."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen
        self.held: tuple[torch.Tensor, ...] = ()

    @contextmanager
    def forked(self, *held: torch.Tensor) -> Iterator[None]:
        self._seen.append("fork")
        self.held = held
        yield
        self._seen.append("end of the side")

    def join(self) -> None:
        self._seen.append("join")


def order_of_a_step(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    bench, seen = StepBench(KIND, PAGED), []
    proposer = bench.proposer
    assert isinstance(proposer, BlockProposer)
    side = WatchedSide(seen)
    proposer._side = side  # type: ignore[assignment]

    def noted(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            seen.append(label)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    noted(proposer._drafter.backbone, "context_features", "context")
    noted(bench.target, "logits", "head")
    noted(step_module, "judge", "judge")
    noted(bench.state, "commit", "commit")
    noted(proposer, "propose", "propose")
    bench.step()
    assert len(side.held) > 2, "taps, positions and cells"
    return seen[: seen.index("propose") + 1]


RIGHT = ["fork", "context", "end of the side", "head", "judge", "commit", "join", "propose"]


@torch.inference_mode()
def test_context_is_written_beside_the_head_and_waited_for_before_the_next_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert order_of_a_step(monkeypatch) == RIGHT


@torch.inference_mode()
def test_a_step_that_forgets_to_wait_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockProposer, "settle", lambda *arguments: None)
    assert order_of_a_step(monkeypatch) == [step for step in RIGHT if step != "join"]


def test_on_a_cpu_everything_happens_in_order() -> None:
    side, seen = SideStream(torch.device("cpu")), []
    with side.forked(torch.zeros(1)):
        seen.append(1)
    side.join()
    side.join()
    assert seen == [1] and side._held == ()


@pytest.mark.gpu
@pytest.mark.parametrize("is_captured", [False, True])
@torch.inference_mode()
def test_steps_are_the_same_with_and_without_a_side(is_captured: bool) -> None:
    reports: list[list[torch.Tensor]] = []
    for has_side in (False, True):
        bench = StepBench(KIND, PAGED, "cuda")
        assert isinstance(bench.proposer, BlockProposer)
        if not has_side:
            bench.proposer._side = SideStream(torch.device("cpu"))
        for _ in range(2):
            bench.step()
        bench.begin()
        graph = torch.cuda.CUDAGraph()
        if is_captured:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                output = bench.step()
        found = []
        for _ in range(50):
            if is_captured:
                graph.replay()
            else:
                output = bench.step()
            found.append(output.report_BX.clone())
        reports.append(found)
    for index, (one, other) in enumerate(zip(*reports, strict=True)):
        assert torch.equal(one, other), f"step {index}"
