from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from benchmarks.step_driver import StepTimes, _DeviceClock, time_steps
from tests import tiny

from paceline.engine.attends import AttentionChoice
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.recordings import Repeated
from paceline.engine.request import SamplingParameters
from paceline.engine.step import StepBatch, StepOutput

SETTINGS = EngineSettings(max_num_seqs=3, max_model_len=128, prefix_cache=False)


@pytest.mark.parametrize(("is_drafted", "num_drafts", "rows"), [(False, None, 1), (True, None, 8), (True, 3, 4)])
def test_every_step_runs_all_rows_of_all_requests(
    is_drafted: bool, num_drafts: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = tiny.loaded()
    engine = Engine(target, drafter if is_drafted else None, SETTINGS)
    run, seen = engine._loop.run_step, []

    def watched(batch: StepBatch) -> StepOutput:
        output = run(batch)
        seen.append((batch.rows.num_rows, output.positions_B.tolist(), output.tokens_BT[:, 0].tolist()))
        assert batch.plan.num_drafts == (rows - 1,) * 2 and batch.writes_context is is_drafted
        return output

    monkeypatch.setattr(engine._loop, "run_step", watched)
    times = time_steps(engine, batch=2, context=40, num_warm_up=2, num_timed=10, num_drafts=num_drafts)
    assert 0 < times.p10_ms <= times.median_ms <= times.p90_ms
    assert [num_rows for num_rows, _, _ in seen] == [rows] * 12
    positions = torch.tensor([positions for _, positions, _ in seen])
    moved = positions[1:] > positions[:-1]
    assert positions[0].tolist() == [36, 36] == positions[8].tolist(), "requests are set back"
    assert moved[:7].all() and moved[8:].all() and not moved[7].any(), "and move on in between"
    assert min(token for _, _, tokens in seen for token in tokens) >= 0, "no row was one of padding"


def test_the_engine_is_given_back_as_it_was() -> None:
    target, drafter = tiny.loaded()
    prompts, sampling = tiny.tiny_prompts([5, 9, 12]), SamplingParameters(max_tokens=12)
    expected = Engine(target, drafter, SETTINGS).generate(prompts, sampling)
    engine = Engine(target, drafter, SETTINGS)
    time_steps(engine, batch=3, context=30, num_warm_up=1, num_timed=2)
    found = engine.generate(prompts, sampling)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.trace.records[0].proposed_ids for one in found] == [
        one.trace.records[0].proposed_ids for one in expected
    ]


def test_bare_steps_are_those_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU a recording is a step that is run again, and attention by tables has to be asked for.
    paged = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
    monkeypatch.setattr(AttentionChoice, "for_device", lambda *_arguments, **_options: paged)
    monkeypatch.setattr("paceline.engine.loop.make_recorder", lambda _device, wanted: Repeated)
    target, drafter = tiny.loaded(linear_mode="plain")
    engine = Engine(target, drafter, SETTINGS)
    engine.generate(tiny.tiny_prompts([5, 5]), SamplingParameters(max_tokens=40))
    num_recordings, num_replayed = engine.stats().num_recordings, engine.stats().num_replayed_steps
    time_steps(engine, batch=2, context=40, num_warm_up=2, num_timed=3)
    assert engine.stats().num_recordings == num_recordings > 0, "no other shape than requests have"
    assert engine.stats().num_replayed_steps == num_replayed + 5


def test_no_more_steps_are_queued_than_asked_for() -> None:
    waited: list[str] = []
    clock = _DeviceClock(torch.device("cpu"))
    clock._is_gpu = True  # events of a GPU, as far as waiting goes
    for name in ("first", "second", "third"):
        end = SimpleNamespace(synchronize=lambda name=name: waited.append(name))
        clock._events.append((SimpleNamespace(), end))  # type: ignore[arg-type]
        clock.wait_for_all_but(1)
    assert waited == ["first", "second"], "the step before the last one, as an engine that runs ahead by one"
    clock.wait_for_all_but(0)
    assert waited[2:] == ["third"]


def test_summary() -> None:
    times = StepTimes.of([float(value) for value in range(11)])
    assert (times.median_ms, times.p10_ms, times.p90_ms) == (5.0, 1.0, 9.0)
