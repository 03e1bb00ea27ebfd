"""Whether a decode step can be recorded: its launches follow from shapes and flags alone, and nothing asks the host.

On a CPU two steps from different states are compared call by call, with kernels interpreted; on a GPU a step is
captured, and played back beside steps that are run.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from tests.unit.engine.step_benches import KINDS, Kind, StepBench
from tests.unit.engine.step_calls import recorded, refusals, take_kernels
from tests.unit.ops.conftest import let_the_interpreter_count

from paceline.engine import slots as slots_module
from paceline.engine import step as step_module
from paceline.engine.attends import AttentionChoice
from paceline.engine.slots import SlotState
from paceline.ops import target_distribution

PAGED = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
# Launches around the layers, at most.
MOST_CALLS = {
    "plain greedy": 14,
    "plain sampled": 14,
    "plain truncated": 51,
    "dflash greedy": 46,
    "dflash sampled": 48,
    "dflash2 greedy": 53,
    "dflash2 sampled": 54,
    "dflash2 planned": 56,
}


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted, on a CPU."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here")
    let_the_interpreter_count(monkeypatch)


@torch.inference_mode()
def calls_of_two_steps(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    bench = StepBench(kind, PAGED)
    bench.step()
    take_kernels(monkeypatch)
    monkeypatch.setattr(target_distribution, "_NUCLEUS_GUESSES", (2**20,))  # a CPU alone may look at how many it needs
    both: list[list[str]] = []
    for is_alive in (1, 0):  # in the second step a request has ended, drafts are missing, all stand elsewhere
        bench.state.is_alive[2] = is_alive
        if not is_alive:
            bench.state.draft_ids[0, 1:] = -1
            bench.state.lengths[0] = 40
        with recorded(bench.target, bench.drafter) as calls:
            bench.step()
        both.append(calls.calls)
    return both[0], both[1]


@functools.cache
def calls_of_two_sound_steps(kind: Kind) -> tuple[list[str], list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        return calls_of_two_steps(kind, patch)


def differences(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would go wrong if the first step were recorded and played back for the second."""
    return refusals(*calls_of_two_steps(kind, monkeypatch))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_step_launches_the_same_whatever_the_device_holds(kind: Kind) -> None:
    assert refusals(*calls_of_two_sound_steps(kind)) == []


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in MOST_CALLS], ids=lambda kind: kind.name)
def test_the_number_of_launches_does_not_grow(kind: Kind) -> None:
    """Each costs a recorded step on a GPU one to two microseconds, even if it does next to nothing."""
    calls, _ = calls_of_two_sound_steps(kind)
    assert len(calls) <= MOST_CALLS[kind.name], "\n".join(calls)


def stop_where_all_have_ended(state: SlotState, rows: Any) -> None:
    assert state.is_alive[rows.slots_B].sum() >= 0


def cut_to_the_longest(state: SlotState, rows: Any) -> None:
    torch.zeros(int(state.lengths.max()))


def look_at_the_dead(state: SlotState, rows: Any) -> None:
    state.anchors[state.is_alive == 0]


def write_a_number(state: SlotState, rows: Any) -> None:
    state.anchors[rows.slots_B] = 3


def set_one_number(state: SlotState, rows: Any) -> None:
    state.anchors[-1] = 3


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    "plant", [stop_where_all_have_ended, cut_to_the_longest, look_at_the_dead, write_a_number, set_one_number]
)
def test_a_step_that_asks_the_device_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = SlotState.commit

    def asks(self: SlotState, rows: Any, verdict: Any) -> Any:
        plant(self, rows)
        return commit(self, rows, verdict)

    monkeypatch.setattr(step_module.SlotState, "commit", asks)
    assert differences(KINDS[0], monkeypatch)


def test_what_the_host_has_to_say_is_written_before_a_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = StepBench(KINDS[0], PAGED)
    monkeypatch.setattr(slots_module, "is_capturing", lambda device: True)
    bench.step()
    bench.state.restore(0, length=3, anchor=4, step=5)
    with pytest.raises(AssertionError, match="again and again"):
        bench.step()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@torch.inference_mode()
def test_a_captured_step_does_what_a_step_does(kind: Kind) -> None:
    """50 replays from one starting state, to the bit: the same kernels run on the same shapes."""
    eager = StepBench(kind, PAGED, "cuda")
    expected = [eager.step().report_BX.clone() for _ in range(50)]
    bench = StepBench(kind, PAGED, "cuda")
    for _ in range(2):
        bench.step()
    bench.begin()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    before = [tensor.clone() for tensor in bench.state.tensors()]
    with torch.cuda.graph(graph):
        output = bench.step()
    assert all(torch.equal(one, other) for one, other in zip(before, bench.state.tensors(), strict=True))
    for index, report in enumerate(expected):
        graph.replay()
        assert torch.equal(output.report_BX, report), f"step {index}"
    for one, other in zip(eager.state.tensors(), bench.state.tensors(), strict=True):
        assert torch.equal(one[[0, 2]], other[[0, 2]])
