"""The engine as its callers see it: ids, ends, text, slots and counters, with and without drafts."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from tests.fakes import ByteTokenizer, scripted_target, table_target
from tests.tiny import loaded, tiny_prompts, wrap_drafter
from tests.unit.engine.replays import replaying

import paceline.engine.loop as loop_module
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.step import SentOutput
from paceline.errors import CompatibilityError, ConfigError, RequestError
from paceline.models.loading import LoadedTarget
from paceline.trace.acceptance import AcceptanceSummary

LONG = SamplingParameters(max_tokens=24, ignore_eos=True)


# Ends


@pytest.fixture(scope="module")
def story() -> tuple[LoadedTarget, list[int], RequestResult]:
    """A target, a prompt, and 40 tokens of its plain text; ids below 256 are text, others have none."""
    target, _ = loaded("qwen3", tokenizer=ByteTokenizer({index: b"<%d>" % index for index in range(512)}))
    prompt = tiny_prompts([7])[0]
    (result,) = Engine(target).generate([prompt], replace(LONG, max_tokens=40))
    return target, prompt, result


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 17])
def test_budgets_are_exact(story, max_tokens: int) -> None:
    """B63."""
    target, prompt, right = story
    engine = replaying(target, {right.prompt_ids: right.token_ids}, 7)
    (result,) = engine.generate([prompt], replace(LONG, max_tokens=max_tokens))
    assert result.token_ids == right.token_ids[:max_tokens] == result.trace.token_ids
    assert (result.finish_reason, result.stop_reason) == ("length", None)


@pytest.mark.parametrize("kind", ["token", "string", "string over two tokens", "eos"])
@pytest.mark.parametrize("offset", range(1, 9))
def test_the_first_end_in_token_order_wins_at_every_offset_of_a_block(story, offset: int, kind: str) -> None:
    """B62, and B91: records say what was verified and what was delivered."""
    target, prompt, right = story
    token = right.token_ids[offset]
    text = f"<{token}>"
    if kind == "string over two tokens":
        text = f"{right.token_ids[offset - 1]}><{token}"
    stop = {
        "token": {"stop_token_ids": (token,)},
        "string": {"stop": (text,)},
        "string over two tokens": {"stop": (text,)},
        "eos": {"ignore_eos": False},
    }[kind]
    if kind == "eos":
        target = replace(target, contract=replace(target.contract, stop_token_ids=(token,)))
    for max_tokens in {max(offset, 1), offset + 1, offset + 2, offset + 4}:
        sampling = replace(LONG, max_tokens=max_tokens, **stop)
        (plain,) = Engine(target).generate([prompt], sampling)
        engine = replaying(target, {right.prompt_ids: right.token_ids}, 7)
        (result,) = engine.generate([prompt], sampling)
        for field in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(result, field) == getattr(plain, field), (field, max_tokens)
        assert result.trace.token_ids == result.token_ids
        assert len(result.token_ids) <= max_tokens
        assert not any(word in result.text for word in sampling.stop)
        if kind != "token" and result.finish_reason == "stop":
            assert result.stop_reason in (text, token)
        for record in result.trace.records:
            assert record.num_verified_accepted == record.num_draft_tokens, "the replay is right all along"
            assert record.num_accepted == min(record.num_draft_tokens, len(record.emitted_ids))
        steps = result.trace.records
        if steps:
            delivered = AcceptanceSummary.from_steps(steps).delivered_per_step
            assert delivered == pytest.approx((len(result.token_ids) - 1) / len(steps))


def test_streamed_pieces_add_up_to_the_result(story) -> None:
    target, prompt, right = story
    engine = replaying(target, {right.prompt_ids: right.token_ids}, 5)
    deltas = list(engine.stream(prompt, replace(LONG, stop=(f"<{right.token_ids[17]}>",))))
    result = engine.result(deltas[0].request_id)
    assert "".join(delta.text for delta in deltas) == result.text
    assert sum((delta.token_ids for delta in deltas), ()) == result.token_ids
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == result.finish_reason == "stop"
    assert tuple(delta.step for delta in deltas[1:]) == tuple(result.trace.records)


def test_a_character_cut_by_block_borders_streams_whole() -> None:
    """B68: any cut of emoji, CJK and combining marks by blocks."""
    text = "a👩‍👧é漢ö!"
    ids = [index + 300 for index in range(len(text.encode()))]
    tokenizer = ByteTokenizer({index: bytes([byte]) for index, byte in zip(ids, text.encode(), strict=True)})
    target = scripted_target([7, *ids, 8], vocab_size=400, tokenizer=tokenizer, stop_token_ids=(8,))
    for num_draft_tokens in (1, 2, 7):
        engine = replaying(target, {(7,): [*ids, 8]}, num_draft_tokens)
        deltas = list(engine.stream([7], SamplingParameters()))
        assert "".join(delta.text for delta in deltas) == text
        assert not any("\ufffd" in delta.text for delta in deltas)
        (stopped,) = engine.generate([[7]], SamplingParameters(stop=("漢",)))
        assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("a👩‍👧é", "stop", "漢")


def test_bad_numbers_end_one_request_and_spare_the_others() -> None:
    """B56: after token 5 the stream is NaN, after token 6 it is infinite; no id is ever picked from either."""
    table = torch.full((8, 8), -20.0)
    for before, after in ((0, 1), (1, 2), (2, 5), (3, 4), (4, 3), (7, 6), (5, 0), (6, 0)):
        table[before, after] = 0.0
    target = table_target(table)
    target.model.embed_tokens.weight[5] = torch.nan
    target.model.embed_tokens.weight[6] = torch.inf
    drafts = {(0,): [1, 2, 5, 0, 1, 2], (3,): [4, 3] * 10, (7,): [6, 0, 1, 2, 5], (5,): [0, 1]}
    sampling = SamplingParameters(max_tokens=12)
    for is_sampled in (False, True):
        each = [replace(sampling, temperature=0.5, seed=4)] * 3 if is_sampled else [sampling] * 3
        for engine in (Engine(target), replaying(target, drafts, 2)):
            nan, sound, infinite = engine.generate([[0], [3], [7]], each)
            assert (nan.finish_reason, nan.token_ids) == ("error", (1, 2, 5))
            assert (infinite.finish_reason, infinite.token_ids) == ("error", (6,))
            assert (sound.finish_reason, sound.token_ids) == ("length", (4, 3) * 6)
            assert engine.stats().num_numeric_errors == 2
            assert engine._loop.parts.cache.planes.isfinite().all(), "nothing bad waits for the slot's next owner"
            (first,) = engine.generate([[5]], sampling)
            assert (first.finish_reason, first.token_ids, first.trace.first_token_id) == ("error", (), None)


def test_an_overflowing_draft_does_not_end_a_sound_request() -> None:
    """A wrong draft whose stream is NaN spoils its whole block; the text without it is unaffected."""
    table = torch.full((8, 8), -20.0)
    for before, after in ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0)):
        table[before, after] = 0.0
    target = table_target(table)
    target.model.embed_tokens.weight[5] = torch.nan
    engine = replaying(target, {(0,): [1, 2, 3, 5, 0, 1, 2, 3, 4, 0, 1, 5]}, 3)
    (result,) = engine.generate([[0]], SamplingParameters(max_tokens=12))
    assert (result.finish_reason, result.token_ids) == ("length", (1, 2, 3, 4, 0) * 2 + (1, 2))
    assert result.trace.token_ids == result.token_ids
    assert engine.stats().num_spoiled_blocks >= 1
    assert engine._loop.parts.cache.planes.isfinite().all()


def test_missing_drafts_cannot_spoil_a_neighbour_of_drafted_requests() -> None:
    """Rows that a request only fills up hold its own anchor: here id 0, which nobody's text has, would be NaN."""
    table = torch.full((8, 8), -20.0)
    for before, after in ((1, 2), (2, 3), (3, 1), (5, 6), (6, 5)):
        table[before, after] = 0.0
    target = table_target(table)
    target.model.embed_tokens.weight[0] = torch.nan
    engine = replaying(target, {(1,): [2, 3, 1] * 4, (5,): [6, 5] * 6}, 3)
    sampling = SamplingParameters(max_tokens=12)
    drafted, plain = engine.generate([[1], [5]], [sampling, replace(sampling, draft_length="off")])
    assert (drafted.finish_reason, drafted.token_ids) == ("length", (2, 3, 1) * 4)
    assert (plain.finish_reason, plain.token_ids) == ("length", (6, 5) * 6)
    assert engine.stats().num_numeric_errors == 0 and engine.stats().num_spoiled_blocks == 0


# Slots, limits, interruptions


def test_a_request_that_no_slot_can_hold_ends_and_lets_the_others_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=1))
    admit = engine._loop.parts.state.admit

    def short_of_memory(slot: int, sampling: SamplingParameters, *rest, **options) -> None:
        if sampling.presence_penalty:
            raise RuntimeError("not enough memory: you tried to allocate 9 bytes")
        admit(slot, sampling, *rest, **options)

    monkeypatch.setattr(engine._loop.parts.state, "admit", short_of_memory)
    prompts = tiny_prompts([5, 6, 7])
    with caplog.at_level(logging.ERROR):
        first, failed, last = engine.generate(prompts, [LONG, replace(LONG, presence_penalty=1.0), LONG])
    assert (failed.finish_reason, failed.token_ids, failed.text) == ("error", (), "")
    assert failed.error is not None and "RuntimeError: not enough memory" in failed.error
    assert "not enough memory" in caplog.text
    right = Engine(target, drafter, EngineSettings(max_num_seqs=1)).generate([prompts[0], prompts[2]], LONG)
    assert [first.token_ids, last.token_ids] == [result.token_ids for result in right]
    stats = engine.stats()
    assert (stats.num_finished, stats.num_dead_ends, stats.num_numeric_errors) == (3, 0, 0)
    assert (stats.num_free_slots, stats.num_running, stats.num_waiting) == (1, 0, 0)


def test_abort_frees_the_slot_and_keeps_what_was_delivered(story) -> None:
    target, prompt, right = story
    engine = Engine(target, None, EngineSettings(max_num_seqs=1))
    running, waiting = (engine.add_request(prompt, LONG) for _ in range(2))
    for _ in range(4):
        engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 1)
    engine.abort(waiting)
    engine.abort(running)
    assert not engine.has_unfinished()
    assert engine.result(running).token_ids == right.token_ids[:5]
    assert engine.result(running).text == "".join(f"<{token}>" for token in right.token_ids[:5])
    assert engine.result(waiting).token_ids == ()
    assert {engine.result(name).finish_reason for name in (running, waiting)} == {"abort"}
    stats = engine.stats()
    assert (stats.num_free_slots, stats.num_aborted, stats.num_finished) == (1, 2, 2)
    engine.abort(running)
    engine.abort("nobody")
    assert engine.generate([prompt], LONG)[0].token_ids == right.token_ids[:24]


def test_closing_a_stream_aborts_its_request(story) -> None:
    target, prompt, _ = story
    engine = Engine(target)
    stream = engine.stream(prompt, LONG)
    next(stream)
    stream.close()
    assert not engine.has_unfinished()
    assert engine.stats().num_aborted == 1


@pytest.mark.parametrize("where", ["forward", "before the host", "after the host"])
def test_an_interrupted_step_is_done_again(story, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    target, prompt, right = story
    _, drafter = loaded("qwen3")
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    names = [engine.add_request(prompt, LONG), engine.add_request(prompt[:3], LONG)]
    (other,) = Engine(target).generate([prompt[:3]], LONG)
    for _ in range(3):
        engine.step()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "forward":
            patch.setattr(target.model, "logits", interrupt, raising=True)
        elif where == "before the host":
            patch.setattr(SentOutput, "read", interrupt)
        else:
            patch.setattr(loop_module.EngineLoop, "_deliver", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    assert [engine.result(name).token_ids for name in names] == [right.token_ids[:24], other.token_ids]
    assert all(engine.result(name).trace.token_ids == engine.result(name).token_ids for name in names)


def test_an_interrupted_generate_leaves_an_empty_engine(story, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt, right = story
    engine = Engine(target, None, EngineSettings(max_num_seqs=1))
    with monkeypatch.context() as patch:
        patch.setattr(SentOutput, "read", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.generate([prompt, prompt], LONG)
    assert not engine.has_unfinished()
    assert engine.stats().num_free_slots == 1
    assert engine.generate([prompt], LONG)[0].token_ids == right.token_ids[:24]


def test_a_request_longer_than_the_drafters_positions_goes_on_without_drafts(caplog: pytest.LogCaptureFixture) -> None:
    """B17: one request crosses the limit while running, one starts beyond it, one never comes near."""
    target, drafter = loaded(max_position_embeddings=64)
    prompts, sampling = tiny_prompts([40, 70, 5]), replace(LONG, max_tokens=30)
    plain = Engine(target).generate(prompts, sampling)
    engine = Engine(target, drafter)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        found = engine.generate(prompts, sampling)
    assert [result.token_ids for result in found] == [result.token_ids for result in plain]
    assert engine.stats().num_undrafted == 2
    assert len(caplog.records) == 1
    assert "the drafter ends at 64" in caplog.text
    crossing, beyond, short = ([r.num_draft_tokens for r in result.trace.records] for result in found)
    assert set(beyond) == {0}
    assert set(short) == {7}
    assert crossing == [7] * crossing.count(7) + [0] * crossing.count(0)
    assert crossing.count(7) == 64 - 7 - 40  # anchors at 40..56 draft up to position 63


def test_a_request_that_ends_near_the_drafters_last_position_went_without_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, drafter = loaded(max_position_embeddings=64)
    engine = Engine(target, drafter)
    with caplog.at_level(logging.WARNING, logger="paceline"):
        engine.generate(tiny_prompts([40]), replace(LONG, max_tokens=64 - drafter.num_draft_tokens - 40 + 1))
    assert engine.stats().num_undrafted == 0
    assert "goes on without drafts" not in caplog.text


def test_the_context_limit_refuses_prompts_and_cuts_budgets(story) -> None:
    target, prompt, right = story
    engine = Engine(target, None, EngineSettings(max_model_len=10))
    with pytest.raises(RequestError, match=r"10 tokens; a context of 10"):
        engine.add_request([5] * 10, LONG)
    (result,) = engine.generate([prompt], LONG)
    assert (result.token_ids, result.finish_reason) == (right.token_ids[:3], "length")
    (last,) = engine.generate([[5] * 9], LONG)
    assert (len(last.token_ids), last.finish_reason) == (1, "length")
    assert Engine(target).max_model_len == 512


def test_the_targets_own_last_position_can_be_reached_with_drafts() -> None:
    target, drafter = loaded(target_changes={"max_position_embeddings": 40}, max_position_embeddings=40)
    prompt = tiny_prompts([20])[0]
    (plain,) = Engine(target).generate([prompt], replace(LONG, max_tokens=100))
    (result,) = Engine(target, drafter).generate([prompt], replace(LONG, max_tokens=100))
    assert len(plain.token_ids) == 20
    assert result.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size"),
        ({"draft_sample_method": "best"}, "draft_sample_method is 'best'"),
        ({"max_model_len": 513}, "513; the target has positions for 512"),
        ({"num_draft_tokens": 8}, "8; the drafter was trained to propose 7"),
    ],
)
def test_settings_beyond_the_models_are_refused(changes: dict[str, object], message: str) -> None:
    target, drafter = loaded()
    with pytest.raises(ConfigError, match=message):
        Engine(target, drafter, EngineSettings(**changes))


def test_requests_that_cannot_be_served_are_refused(story) -> None:
    target, prompt, _ = story
    engine = Engine(target)
    engine.add_request(prompt, LONG, "mine")
    with pytest.raises(RequestError, match="'mine' is still running"):
        engine.add_request(prompt, LONG, "mine")
    with pytest.raises(RequestError, match="has not ended yet"):
        engine.result("mine")
    with pytest.raises(RequestError, match="not known"):
        engine.result("yours")
    with pytest.raises(RequestError, match="stop_token_ids holds 512"):
        engine.add_request(prompt, replace(LONG, stop_token_ids=(512,)))
    with pytest.raises(RequestError, match="2 prompts came with 1"):
        engine.generate([prompt, prompt], [LONG])
    with pytest.raises(RequestError, match="empty"):
        engine.generate([prompt, []], LONG)
    engine.abort("mine")
    assert not engine.has_unfinished(), "generate took back the prompts it had queued"


def test_requests_are_admitted_in_order_and_slots_are_shared() -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2))
    names = [engine.add_request(prompt, LONG) for prompt in tiny_prompts([5] * 5)]
    order = []
    while engine.has_unfinished():
        order += [delta.request_id for delta in engine.step() if delta.finish_reason]
        assert engine.stats().num_running <= 2
    assert sorted(order) == sorted(names)
    assert order[0] in names[:2]
    assert order[-1] == names[-1]


def test_stats_agree_with_the_traces() -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, num_draft_tokens=3))
    results = engine.generate(tiny_prompts([5, 9, 4]), LONG)
    records = [record for result in results for record in result.trace.records]
    summary, stats = AcceptanceSummary.from_steps(records), engine.stats()
    assert stats.num_request_steps == summary.num_steps
    assert stats.num_draft_tokens == summary.num_draft_tokens
    assert stats.num_accepted == summary.num_accepted
    assert stats.num_output_tokens == sum(len(result.token_ids) for result in results)
    assert stats.num_prefill_tokens == 18
    assert (stats.method, stats.linear_mode) == ("dflash/greedy", "row_invariant")
    assert stats.num_impossible_drafts == 0
    num_rows = (1 + 2 * 17) * 32  # 512 + 3 + 1 positions in blocks of 32, and block 0
    assert stats.target_cache_bytes == 4 * 2 * 2 * num_rows * 16 * 4
    assert stats.drafter_cache_bytes == 2 * 2 * 2 * num_rows * 16 * 4
    assert all(record.step_ms > 0 for record in records)
    for result in results:
        assert result.trace.total_ms >= result.trace.prefill_ms > 0
        assert [record.step_index for record in result.trace.records] == list(range(len(result.trace.records)))


def test_sharing_a_drafter_with_fewer_drafts_leaves_the_ids_alone() -> None:
    target, drafter = loaded()
    prompts = tiny_prompts([6, 12])
    plain = Engine(target).generate(prompts, LONG)
    for num_draft_tokens in (1, 4):
        narrow = wrap_drafter(drafter.model, "row_invariant", num_draft_tokens)
        found = Engine(target, narrow).generate(prompts, LONG)
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        assert {record.num_draft_tokens for result in found for record in result.trace.records} == {num_draft_tokens}


def test_a_drafter_checked_on_another_target_is_refused() -> None:
    """Equal sizes say nothing: its fingerprint was compared with the other one, whose tables it may share."""
    target, drafter = loaded()
    other, _ = loaded(seed=7)
    checked = replace(drafter, checked_on=target.model)
    Engine(target, checked)
    with pytest.raises(CompatibilityError, match="loaded for another target"):
        Engine(other, checked)
