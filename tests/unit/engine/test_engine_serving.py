"""What a server needs of an engine: priorities, deadlines, a bounded queue, statistics, an end."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny import loaded, tiny_prompts
from tests.unit.engine.serving_runs import GREEDY, checked, require_empty, run, shared_prompts

import paceline.engine.scheduler as scheduler_module
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request_blocks import RequestBlocks
from paceline.engine.running import RunningRequest
from paceline.engine.slots import SlotState
from paceline.errors import ConfigError, EngineClosedError, QueueFullError, RequestError
from paceline.models.layers import Linear
from paceline.ops.native.build import library


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still."""
    now = [50.0]
    monkeypatch.setattr(scheduler_module, "now_s", lambda: now[0])
    return now


def test_deadlines_end_requests_that_wait_and_that_run(clock: list[float]) -> None:
    target, drafter = loaded()
    engine = checked(target, drafter, max_num_seqs=1)
    prompts = tiny_prompts([5, 6, 7])
    running = engine.add_request(prompts[0], GREEDY, timeout_s=2.0)
    waiting = engine.add_request(prompts[1], GREEDY, timeout_s=1.5)
    patient = engine.add_request(prompts[2], GREEDY)
    engine.step()
    clock[0] += 1.6
    (delta,) = [delta for delta in engine.step() if delta.finish_reason is not None]
    assert (delta.request_id, delta.finish_reason, delta.token_ids) == (waiting, "abort", ())
    clock[0] += 10
    deltas = engine.step()
    assert [delta.finish_reason for delta in deltas if delta.request_id == running] == ["abort"]
    (right,) = checked(target).generate([prompts[2]], GREEDY)
    (found,) = run(engine, [patient])
    assert found.token_ids == right.token_ids
    late, never = engine.result(running), engine.result(waiting)
    assert late.error == "its timeout_s of 2 was up while it was running" and len(late.token_ids) >= 2
    assert never.error == "its timeout_s of 1.5 was up while it was waiting" and never.token_ids == ()
    assert late.finish_reason == never.finish_reason == "abort"
    stats = engine.stats()
    assert (stats.num_deadlines_passed, stats.num_aborted, stats.num_finished) == (2, 2, 3)
    require_empty(engine)


def test_blocks_of_a_prompt_that_ended_half_way_come_back_at_once(clock: list[float]) -> None:
    target, drafter = loaded()
    engine = checked(target, drafter, prefill_chunk_size=4)
    late = engine.add_request(tiny_prompts([20])[0], GREEDY, timeout_s=1.0)
    engine.step()
    clock[0] += 2
    engine.step()
    assert engine.result(late).finish_reason == "abort"
    require_empty(engine)
    aborted = engine.add_request(tiny_prompts([20])[0], GREEDY)
    engine.step()
    engine.abort(aborted)
    require_empty(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s is 0; it has to be a positive number"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": "1"}, "timeout_s is '1'"),
        ({"timeout_s": 10**5000}, "timeout_s is a value of type int"),
        ({"timeout_s": 10**400}, "timeout_s is 1000"),
        ({"request_id": 7}, "id is 7; it has to be a text"),
        ({"request_id": ["a"]}, r"id is \['a'\]; it has to be a text"),
        ({"priority": 1.5}, r"priority is 1\.5; it has to be an integer"),
        ({"cache_salt": 3}, "cache_salt is 3; it has to be a text"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    engine = Engine(loaded()[0])
    with pytest.raises(RequestError, match=message):
        engine.add_request([1, 2], GREEDY, **options)
    with pytest.raises(RequestError, match=message):
        engine.add_samples([1, 2], replace(GREEDY, n=2), **options)
    assert not engine.has_unfinished()


def test_more_urgent_requests_are_served_first_and_step_back_last() -> None:
    target, _ = loaded()
    engine = checked(target, max_num_seqs=1)
    prompt = tiny_prompts([5])[0]
    names = {priority: engine.add_request(prompt, GREEDY, priority=priority) for priority in (2, 0, 1)}
    order = []
    while engine.has_unfinished():
        order += [delta.request_id for delta in engine.step() if delta.finish_reason]
    assert order == [names[0], names[1], names[2]]


def test_a_full_queue_refuses_and_serves_on() -> None:
    target, _ = loaded()
    engine = checked(target, max_num_seqs=1, max_num_waiting=2)
    prompt = tiny_prompts([5])[0]
    names = [engine.add_request(prompt, GREEDY) for _ in range(3)]
    with pytest.raises(QueueFullError, match="max_num_waiting is 2"):
        engine.add_request(prompt, GREEDY)
    with pytest.raises(QueueFullError):
        engine.add_samples(prompt, replace(GREEDY, n=2))
    engine.step()
    assert engine.stats().num_queue_refusals == 3
    assert len({result.token_ids for result in run(engine, names)}) == 1


def test_deltas_of_an_interrupted_step_come_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended in admission was lost where the prompt behind it failed in the same step."""
    target, _ = loaded()
    engine = checked(target, max_num_seqs=2)
    admit = SlotState.admit

    def short_of_memory(self, slot, sampling, *rest, **options):
        if sampling.presence_penalty:
            raise RuntimeError("not enough memory")
        admit(self, slot, sampling, *rest, **options)

    monkeypatch.setattr(SlotState, "admit", short_of_memory)
    prompt = tiny_prompts([5])[0]
    failing = engine.add_request(prompt, replace(GREEDY, presence_penalty=1.0))
    sound = engine.add_request(prompt, GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(target.model, "logits", lambda hidden: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    deltas = engine.step()
    assert [delta.request_id for delta in deltas if delta.finish_reason == "error"] == [failing]
    assert len(run(engine, [sound])[0].token_ids) == 24


def test_a_new_request_does_not_get_what_was_left_of_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = loaded()
    engine = checked(target)
    prompt = tiny_prompts([5])[0]
    engine.add_request(prompt, replace(GREEDY, max_tokens=1), "mine")
    engine.add_request(prompt[:3], GREEDY, "other")
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._loop), "_decode", lambda self: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            engine.step()
    assert engine.result("mine").finish_reason == "length"
    engine.add_request(prompt, GREEDY, "mine")
    deltas = engine.step()
    assert [delta.finish_reason for delta in deltas if delta.request_id == "mine"] == [None, None]


def test_failing_a_request_ends_it_with_the_error_and_spares_the_others() -> None:
    target, _ = loaded()
    engine = checked(target)
    prompt = tiny_prompts([5])[0]
    bad, good = engine.add_request(prompt, GREEDY), engine.add_request(prompt, GREEDY)
    engine.step()
    assert engine.running_ids() == (bad, good)
    engine.fail(bad, ValueError("no luck"))
    engine.fail("nobody", ValueError("no luck"))
    result = engine.result(bad)
    assert (result.finish_reason, result.error) == ("error", "ValueError: no luck")
    assert engine.take_result(bad) is result
    with pytest.raises(RequestError, match="not known"):
        engine.result(bad)
    assert len(run(engine, [good])[0].token_ids) == 24
    assert (engine.stats().num_numeric_errors, engine.stats().num_dead_ends) == (0, 0)
    require_empty(engine)


def abort_at_random(num_aborts: int) -> None:
    """Requests come and are aborted wherever they stand; one in five may stay, and comes out as it does alone."""
    target, drafter = loaded()
    chance, sampling = random.Random(8), replace(GREEDY, max_tokens=12)
    prompts = shared_prompts(16, range(1, 9))
    plain = [checked(target).generate([prompt], sampling)[0].token_ids for prompt in prompts]
    engine = checked(target, drafter, max_num_seqs=4, max_model_len=64, num_blocks=24, prefill_chunk_size=8)
    staying: dict[str, int] = {}
    leaving: dict[str, int] = {}
    num_delivered: list[int] = []
    while engine.stats().num_aborted < num_aborts:
        index = chance.randrange(8)
        name = engine.add_request(prompts[index], sampling)
        (staying if chance.random() < 0.2 else leaving)[name] = index
        for _ in range(chance.randint(0, 2)):
            engine.step()
        if leaving and chance.random() < 0.9:
            name = chance.choice(list(leaving))
            engine.abort(name)
            tokens = engine.result(name).token_ids
            assert tokens == plain[leaving.pop(name)][: len(tokens)]
            num_delivered.append(len(tokens))
    for index, result in zip(staying.values(), run(engine, list(staying)), strict=True):
        assert (result.token_ids, result.finish_reason) == (plain[index], "length")
    assert min(num_delivered) == 0 and max(num_delivered) > 2, "some had not begun, some were decoding"
    require_empty(engine)


def test_a_storm_of_aborts_spares_the_others_and_loses_no_block() -> None:
    abort_at_random(200)


def test_an_abort_that_keeps_its_blocks_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    release = RequestBlocks.release

    def keep(self: RequestBlocks, request: RunningRequest, **options: Any) -> None:
        if request.finish_reason != "abort":
            release(self, request, **options)

    monkeypatch.setattr(RequestBlocks, "release", keep)
    with pytest.raises(AssertionError):
        abort_at_random(20)


def test_statistics_say_where_memory_goes_and_what_carries_it_out() -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, max_model_len=100, block_size=16, num_blocks=11))
    engine.generate(tiny_prompts([20]), GREEDY)
    stats = engine.stats()
    assert stats.num_blocks == 10
    assert stats.target_cache_bytes == 11 * 16 * 4 * 2 * 2 * 16 * 4
    assert stats.drafter_cache_bytes == 11 * 16 * 2 * 2 * 2 * 16 * 4
    sizes = {p.data_ptr(): p.numel() * 4 for p in target.model.parameters()}
    assert stats.target_weight_bytes == sum(sizes.values())
    own = {p.data_ptr(): p.numel() * 4 for p in drafter.model.parameters() if p.data_ptr() not in sizes}
    assert stats.drafter_weight_bytes == sum(own.values()) > 0
    assert (stats.attention, stats.linear_mode, stats.method) == ("row_invariant", "row_invariant", "dflash/greedy")
    found = set(stats.implementations.values())
    assert found == ({"reference"} if library() is None else {"reference", "native"}), "no kernel on a CPU"
    assert (stats.num_queried_tokens, stats.num_hit_tokens, stats.num_cached_blocks) == (19, 0, 2)


def test_packed_weights_are_counted_beside_the_parameters_they_were_made_of() -> None:
    target, _ = loaded(linear_mode="packed", dtype=torch.bfloat16)
    parameters = {p.data_ptr(): p.numel() * 2 for p in target.model.parameters()}
    packed = [part.weight.numel() * 2 for part in target.model.modules() if isinstance(part, Linear) and part.is_packed]
    engine = Engine(target)
    assert engine.stats().target_weight_bytes >= sum(parameters.values()) + sum(packed)
    engine.close()


def test_a_name_that_a_caller_took_is_not_made_up_again() -> None:
    target, _ = loaded()
    engine = Engine(target)
    engine.add_request([1, 2], GREEDY, "request-0")
    engine.add_request([1, 2], GREEDY, "request-1-0")
    assert engine.add_request([1, 2], GREEDY) == "request-2"
    engine.close()


def test_a_closed_engine_has_given_its_memory_back() -> None:
    target, drafter = loaded()
    engine = checked(target, drafter)
    name = engine.add_request(tiny_prompts([5])[0], GREEDY)
    engine.step()
    engine.close()
    engine.close()
    assert engine.result(name).finish_reason == "abort" and len(engine.result(name).token_ids) > 0
    assert not engine.has_unfinished()
    engine.abort(name)
    for call in (
        lambda: engine.add_request([1], GREEDY),
        lambda: engine.add_samples([1], GREEDY),
        lambda: engine.generate([[1]], GREEDY),
        lambda: list(engine.stream([1], GREEDY)),
        engine.step,
        engine.stats,
        engine.canary,
    ):
        with pytest.raises(EngineClosedError, match="was closed"):
            call()


def test_engines_one_after_another_leave_memory_flat() -> None:
    """B89: the first is not held by anything when the third runs."""
    target, drafter = loaded()

    def planes() -> int:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.dim() == 6]
        return sum(tensor.numel() for tensor in tensors)

    before, found = planes(), []
    for _ in range(3):
        engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
        found.append(engine.generate(tiny_prompts([9]), GREEDY)[0].token_ids)
        assert planes() > before
        engine.close()
        assert planes() == before, "although the engine itself is still there"
    assert len(set(found)) == 1


def test_long_prompts_come_in_short_chunks_where_others_wait() -> None:
    """max_itl_ms: while somebody decodes, a chunk is what fits beside its step; the text is the same."""
    target, drafter = loaded()
    short, long = tiny_prompts([5, 120])
    settings = {"max_model_len": 200, "max_num_seqs": 2}
    right = checked(target, drafter, **settings).generate([short, long], GREEDY)
    engine = checked(target, drafter, max_itl_ms=0.001, **settings)
    names = [engine.add_request(short, GREEDY), engine.add_request(long, GREEDY)]
    engine.step()
    sizes = []
    while engine.has_unfinished():
        before = engine.stats().num_prefill_tokens
        engine.step()
        sizes.append(engine.stats().num_prefill_tokens - before)
    assert [size for size in sizes if size][:5] == [8] * 5
    assert [engine.result(name).token_ids for name in names] == [result.token_ids for result in right]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_waiting": -1}, "max_num_waiting is -1"),
        ({"max_itl_ms": 0.0}, r"max_itl_ms is 0\.0"),
        ({"canary": "always"}, "canary is 'always', not one of 'start', 'off'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**settings)
