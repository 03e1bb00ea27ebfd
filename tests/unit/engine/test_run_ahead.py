"""A step launched before the one before is read: the same requests, a step late, and nothing of one touches another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import hybrid_runs, schedules
from tests.helped_drafts import help_drafts
from tests.schedules import EngineKind
from tests.tiny import loaded, tiny_prompts

import paceline.engine.graphs as graphs_module
from paceline.checkpoint.contract import DrafterFamily
from paceline.engine import step as step_module
from paceline.engine.blocks import BlockPool
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.in_flight import InFlight, Launched
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.results import FinishedRequests
from paceline.engine.sampling import StructuredOutput
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import SentOutput
from paceline.errors import EngineFaultError

GREEDY = SamplingParameters(max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParameters(max_tokens=15, ignore_eos=True, temperature=0.8, top_p=0.9, seed=5)
PENALISED = SamplingParameters(max_tokens=17, ignore_eos=True, repetition_penalty=1.3, bad_words=("ab",))
ONE = SamplingParameters(max_tokens=1, ignore_eos=True)
FAMILIES: tuple[DrafterFamily, ...] = ("dflash", "dflash2", "dspark", "eagle3")


def engine_of(family: DrafterFamily | None, **settings: Any) -> Engine:
    target, drafter = loaded("qwen3", drafter_family=family or "dflash")
    return Engine(
        target, None if family is None else drafter, EngineSettings(max_num_seqs=3, check_invariants=True, **settings)
    )


def serve(engine: Engine, prompts: list[list[int]], samplings: list[SamplingParameters]) -> list[RequestResult]:
    names = [engine.add_request(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    while engine.has_unfinished():
        engine.step()
    return [engine.result(name) for name in names]


def steps_of(result: RequestResult) -> list[tuple[Any, ...]]:
    """Everything about a request's steps but their times."""
    return [
        (record.anchor_position, record.anchor_id, record.proposed_ids, record.num_accepted, record.emitted_ids)
        for record in result.trace.records
    ]


@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_every_request_has_the_steps_that_it_has_without(family: str | None) -> None:
    prompts = tiny_prompts([9, 40, 17, 3, 22])
    samplings = [GREEDY, SAMPLED, PENALISED, ONE, replace(GREEDY, max_tokens=2)]
    reads = [serve(engine_of(family, run_ahead=ahead), prompts, samplings) for ahead in (False, True)]
    for without, ahead in zip(*reads, strict=True):
        assert (ahead.token_ids, ahead.text, ahead.finish_reason) == (
            without.token_ids,
            without.text,
            without.finish_reason,
        )
        assert steps_of(ahead) == steps_of(without)


@pytest.mark.parametrize("family", ["dflash", "eagle3", "dspark-latent"])
def test_states_that_cannot_be_cut_back_are_the_same_too(family: str) -> None:
    """A hybrid target with a prefix cache: states are committed, kept and restored a step before the host knows."""
    target = hybrid_runs.small_target()
    drafter = hybrid_runs.drafter_for(target, family)
    head, *rests = hybrid_runs.prompts_of([24, 9, 3, 17], seed=1)
    prompts = {name: head + rest for name, rest in zip("abc", rests, strict=True)}
    samplings = {"a": hybrid_runs.GREEDY, "b": hybrid_runs.SAMPLED, "c": hybrid_runs.UNDRAFTED}
    found = []
    for ahead in (False, True):
        engine = hybrid_runs.helped(target, drafter, prompts, max_num_seqs=2, run_ahead=ahead)
        for _ in range(2):  # the second time behind what the first left
            for name, sampling in samplings.items():
                engine.add_request(prompts[name], sampling, name)
            found.append(hybrid_runs.run(engine, list(samplings)))
        assert engine.stats().num_hit_tokens > 60
        hybrid_runs.require_empty(engine)
    for without, ahead_of in zip(found[0] + found[1], found[2] + found[3], strict=True):
        assert steps_of(ahead_of) == steps_of(without)


def watch_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes launches ("step 1") and reads ("read 1") as they happen."""
    noted: list[str] = []
    count, read = InFlight.count, Launched.read

    def counted(self: InFlight) -> int:
        number = count(self)
        noted.append(f"launch {number}")
        return number

    def noted_read(self: Launched) -> Any:
        noted.append(f"read {self.number}")
        return read(self)

    monkeypatch.setattr(InFlight, "count", counted)
    monkeypatch.setattr(Launched, "read", noted_read)
    return noted


def test_each_result_is_read_once_the_next_pass_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch_order(monkeypatch)
    serve(engine_of(None, run_ahead=True), tiny_prompts([5]), [replace(GREEDY, max_tokens=4)])
    assert noted == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4", "read 3", "read 4"]


def test_without_it_each_result_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = watch_order(monkeypatch)
    serve(engine_of(None), tiny_prompts([5]), [replace(GREEDY, max_tokens=3)])
    assert noted == ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]


def test_no_step_is_launched_for_a_budget_that_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps give one token each, so the host knows the end before it reads it."""
    noted = watch_order(monkeypatch)
    results = serve(engine_of(None, run_ahead=True), tiny_prompts([5, 7]), [replace(GREEDY, max_tokens=6), ONE])
    assert [len(result.token_ids) for result in results] == [6, 1]
    assert sum(each.startswith("launch") for each in noted) == 2 + 5


def test_a_grammar_makes_the_host_wait_and_comes_out_right(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = SamplingParameters(max_tokens=12, structured_output=StructuredOutput("choice", ("abab", "cdcd")))
    prompts, samplings = tiny_prompts([5]), [wanted]
    without = serve(engine_of("dflash"), prompts, samplings)
    noted = watch_order(monkeypatch)
    found = serve(engine_of("dflash", run_ahead=True), prompts, samplings)
    assert [each.token_ids for each in found] == [each.token_ids for each in without]
    assert found[0].text in ("abab", "cdcd")
    launches = [index for index, each in enumerate(noted) if each.startswith("launch")]
    assert all(noted[index - 1] == f"read {number}" for number, index in enumerate(launches[1:], 1))


@pytest.mark.parametrize("stop_at", range(1, 9))
def test_nothing_is_emitted_behind_a_stop_wherever_it_falls_in_a_block(stop_at: int) -> None:
    """G20: a stop token at each place of a block of four, and the end of the budget there."""
    (prompt,) = tiny_prompts([9])
    (whole,) = serve(engine_of(None), [prompt], [GREEDY])
    stop = whole.token_ids[stop_at]
    end = whole.token_ids.index(stop) + 1
    engine = help_drafts(engine_of("dflash", run_ahead=True), {"r": (*prompt, *whole.token_ids)})
    engine.add_request(prompt, replace(GREEDY, stop_token_ids=(stop,)), "r")
    delivered = [token for _ in range(40) for delta in engine.step() for token in delta.token_ids]
    assert tuple(delivered) == engine.result("r").token_ids == whole.token_ids[:end]
    assert engine.result("r").finish_reason == "stop"
    engine.add_request(prompt, replace(GREEDY, max_tokens=stop_at), "r")
    while engine.has_unfinished():
        engine.step()
    assert engine.result("r").token_ids == whole.token_ids[:stop_at]
    stats = engine.stats()
    assert stats.num_fenced_blocks == 0


def test_two_hundred_aborts_between_launch_and_read_leave_the_others_alone() -> None:
    """G12: blocks of whoever left are written to by a step in flight, and given to the next one all the same."""
    kind, which_ones = EngineKind("dflash", "standard", False), (0, 4, 8, 11)
    alone = [schedules.alone(kind, which, "greedy", True) for which in which_ones]
    greedy = schedules.sampling_parameters("greedy", schedules.MAX_TOKENS, is_drafted=True)
    engine = schedules.make_engine(
        kind, {}, max_num_seqs=3, block_size=4, num_blocks=40, run_ahead=True, check_invariants=True
    )
    generator = torch.Generator().manual_seed(3)
    num_aborted = num_finished = 0
    present: list[str] = []
    while num_aborted < 200:
        while len(present) < 5:
            which = int(torch.randint(4, (), generator=generator))
            present.append(f"{which} {num_aborted} {num_finished} {len(present)}")
            engine.add_request(schedules.PROMPTS[which_ones[which]], greedy, present[-1])
        for delta in engine.step():
            if delta.finish_reason is not None:
                result = engine.take_result(delta.request_id)
                assert result.token_ids == alone[int(delta.request_id[0])].token_ids
                num_finished += 1
                present.remove(delta.request_id)
        running = engine.running_ids()
        if running and float(torch.rand((), generator=generator)) < 0.4:
            present.remove(running[int(torch.randint(len(running), (), generator=generator))])
            engine.abort((set(running) - set(present)).pop())
            num_aborted += 1
    for name in present:
        engine.abort(name)
    stats = engine.stats()
    assert num_finished > 10
    assert (stats.num_fenced_blocks, stats.num_free_slots) == (0, 3)


def spoil_the_third_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    run_rows, calls = step_module.run_rows, 0

    def spoiled(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        hidden: torch.Tensor = run_rows(*arguments, **options)
        if calls == 3:
            hidden[0] = torch.nan
        return hidden

    monkeypatch.setattr(step_module, "run_rows", spoiled)


def forget_what_became_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that comes late counts for a request though it was set back since."""

    def read(self: Launched) -> list[Any]:
        parts = zip(self.requests, self.output.read(), self.num_drawn, strict=True)
        return [part for part in parts if part[0].finish_reason is None]

    monkeypatch.setattr(Launched, "read", read)


@pytest.mark.parametrize("forgets", [False, True], ids=["sound", "planted"])
def test_a_block_with_bad_numbers_is_run_again_though_a_step_followed_it(
    monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    prompts = tiny_prompts([9, 14])
    right = serve(engine_of("dflash"), prompts, [GREEDY, GREEDY])
    engine = engine_of("dflash", run_ahead=True)
    engine._loop._checks = None  # the planted fault has to show in what comes out
    spoil_the_third_pass(monkeypatch)
    if forgets:
        forget_what_became_void(monkeypatch)
    found = serve(engine, prompts, [GREEDY, GREEDY])
    assert (found[0].token_ids == right[0].token_ids) == (not forgets)
    assert found[1].token_ids == right[1].token_ids
    assert engine.stats().num_spoiled_blocks == 1


def test_bad_numbers_without_drafts_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tiny_prompts([9, 14])
    right = serve(engine_of(None), prompts, [GREEDY, GREEDY])
    engine = engine_of(None, run_ahead=True)
    spoil_the_third_pass(monkeypatch)
    found = serve(engine, prompts, [GREEDY, GREEDY])
    assert found[1].token_ids == right[1].token_ids
    assert found[0].finish_reason == "error" and "NaN" in (found[0].error or "")


def test_a_failure_loses_no_token_that_was_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tiny_prompts([9, 14])
    right = serve(engine_of("dflash"), prompts, [GREEDY, SAMPLED])
    engine = engine_of("dflash", run_ahead=True)
    names = [engine.add_request(prompt, one) for prompt, one in zip(prompts, [GREEDY, SAMPLED], strict=True)]
    decode_step, calls = graphs_module.decode_step, 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 7):
            raise ArithmeticError("the device")
        return decode_step(*arguments)

    monkeypatch.setattr(graphs_module, "decode_step", failing)
    num_failures = 0
    while engine.has_unfinished():
        try:
            engine.step()
        except ArithmeticError:
            num_failures += 1
    assert num_failures == 2
    assert engine.result(names[0]).token_ids == right[0].token_ids


def test_a_device_that_stands_elsewhere_is_found_at_the_next_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("dflash", run_ahead=True)
    engine._loop._checks = None  # without debug mode, too
    commit = step_module.SlotState.commit

    def one_too_many(self: Any, rows: Any, verdict: Any) -> Any:
        return commit(self, rows._replace(starts_B=rows.starts_B + 1), verdict)

    monkeypatch.setattr(step_module.SlotState, "commit", one_too_many)
    with pytest.raises(EngineFaultError, match=r"stands at \d+ on the device and stands at \d+ on the host"):
        serve(engine, tiny_prompts([9]), [GREEDY])


def test_a_device_that_sees_an_end_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("dflash", run_ahead=True)
    admit = step_module.SlotState.admit

    def short(self: Any, *arguments: Any, end: int | None = None, **options: Any) -> None:
        admit(self, *arguments, end=None if end is None else end - 4, **options)

    monkeypatch.setattr(step_module.SlotState, "admit", short)
    with pytest.raises(EngineFaultError, match="has ended on the device"):
        serve(engine, tiny_prompts([9]), [GREEDY])


def test_what_is_in_flight_when_the_last_request_ends_is_taken_in() -> None:
    engine = engine_of("dflash", run_ahead=True)
    engine.add_request(tiny_prompts([9])[0], GREEDY, "r")
    for _ in range(3):
        engine.step()
    engine.abort("r")
    stats = engine.stats()
    assert (stats.num_fenced_blocks, stats.num_free_slots) == (0, 3)
    assert not engine.has_unfinished()


def test_results_come_from_the_pass_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """G13: whatever is launched meanwhile, what was sent stays as it was."""
    kept: list[tuple[SentOutput, Any]] = []
    send = step_module.StepOutput.send

    def sent(self: Any) -> SentOutput:
        output = send(self)
        kept.append((output, [list(row) for row in output.packed.wait().tolist()]))
        return output

    monkeypatch.setattr(step_module.StepOutput, "send", sent)
    serve(engine_of("dflash", run_ahead=True), tiny_prompts([9, 5, 12]), [GREEDY, SAMPLED, GREEDY])
    assert len(kept) > 10
    assert all(output.packed.wait().tolist() == rows for output, rows in kept)


@pytest.mark.parametrize("where", ["leave", "results", "free"])
def test_an_interrupted_abort_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Ctrl-C may come while a request is on its way out, between two steps."""
    prompts = tiny_prompts([9, 14])
    (right,) = serve(engine_of("dflash"), prompts[:1], [GREEDY])
    engine = engine_of("dflash", run_ahead=True)
    engine.add_request(prompts[0], GREEDY, "stays")
    engine.add_request(prompts[1], GREEDY, "goes")
    num_free = engine.stats().num_free_blocks
    for _ in range(3):
        engine.step()
    owner, name = {
        "leave": (Scheduler, "remove"),
        "results": (FinishedRequests, "put"),
        "free": (BlockPool, "free"),
    }[where]

    def interrupt(*_arguments: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.abort("goes")
    while engine.has_unfinished():
        engine.step()
    assert engine.result("stays").token_ids == right.token_ids
    assert engine.result("goes").finish_reason == "abort"
    stats = engine.stats()
    assert (stats.num_free_slots, stats.num_free_blocks, stats.num_fenced_blocks) == (3, num_free, 0)
