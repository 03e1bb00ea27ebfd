"""Recorded steps give what the same steps give unrecorded, whatever bucket they are padded to; on a CPU a recording
runs its step again."""

from __future__ import annotations

import pytest
from tests.tiny import loaded, tiny_prompts

from paceline.engine import graphs as graphs_module
from paceline.engine import loop as loop_module
from paceline.engine.attends import AttentionChoice
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.graphs import buckets_up_to
from paceline.engine.recordings import Recorded, Repeated
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.step import StepBatch, StepOutput
from paceline.engine.step_inputs import StepInputs
from paceline.errors import EngineFaultError

FAMILIES = ["plain", "dflash", "dflash2", "dspark", "eagle3"]
GREEDY = SamplingParameters(max_tokens=21, ignore_eos=True)
SAMPLED = SamplingParameters(max_tokens=17, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, seed=3)
PROMPTS = tiny_prompts([9, 30, 4, 17, 12])


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines go by tables and record their steps, as on a GPU."""
    paged = AttentionChoice(is_batched=True, is_row_invariant=False, is_paged=True)
    monkeypatch.setattr(AttentionChoice, "for_device", classmethod(lambda *_args, **_options: paged))
    monkeypatch.setattr(loop_module, "make_recorder", lambda *_args, **_options: Repeated)


def serve(family: str, sampling: list[SamplingParameters], **settings: object) -> tuple[list[RequestResult], Engine]:
    target, drafter = loaded(drafter_family="dflash" if family == "plain" else family)
    options = {"max_num_seqs": 3, "block_size": 16, "run_ahead": True, **settings}
    engine = Engine(target, None if family == "plain" else drafter, EngineSettings(**options))
    return engine.generate(PROMPTS[: len(sampling)], sampling), engine


def texts(results: list[RequestResult]) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_recorded_steps_give_the_same_text(
    family: str, sampling: SamplingParameters, request: pytest.FixtureRequest
) -> None:
    expected, _ = serve(family, [sampling] * 5)
    request.getfixturevalue("recorded")
    found, engine = serve(family, [sampling] * 5)
    assert texts(found) == texts(expected)
    stats = engine.stats()
    assert stats.num_recordings > 0
    assert stats.num_replayed_steps > stats.num_unrecorded_steps
    assert stats.num_replayed_steps + stats.num_unrecorded_steps == stats.num_steps


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("draft_length", ["fixed", "adaptive"])
def test_greedy_text_does_not_depend_on_who_is_in_the_bucket(draft_length: str) -> None:
    together, _ = serve("dflash2", [GREEDY, SAMPLED, GREEDY, GREEDY, SAMPLED], draft_length=draft_length)
    for index in (0, 2, 3):
        target, drafter = loaded(drafter_family="dflash2")
        alone = Engine(target, drafter, EngineSettings(max_num_seqs=1, block_size=16)).generate(
            [PROMPTS[index]], GREEDY
        )
        assert together[index].token_ids == alone[0].token_ids


@pytest.mark.usefixtures("recorded")
def test_a_step_that_needs_the_host_runs_unrecorded() -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, block_size=16))
    engine.wrap_proposer(Wrapped)
    engine.generate(PROMPTS[:2], GREEDY)
    stats = engine.stats()
    assert stats.num_recordings == 0 and stats.num_unrecorded_steps == stats.num_steps > 0


class Wrapped:
    is_capturable = False

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.usefixtures("recorded")
def test_a_step_that_cannot_be_recorded_is_run_and_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_body: object) -> Repeated:
        raise RuntimeError("this operation is not permitted while a stream is capturing")

    monkeypatch.setattr(loop_module, "make_recorder", lambda *_args, **_options: refuse)
    found, engine = serve("dflash", [GREEDY])
    assert found[0].token_ids == serve("plain", [GREEDY])[0][0].token_ids
    assert engine.stats().num_replayed_steps == 0
    named = [record.message for record in caplog.records if "cannot be recorded" in record.message]
    assert len(named) == len(set(named)) > 0


@pytest.mark.usefixtures("recorded")
def test_what_recorded_steps_read_may_not_move() -> None:
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=2, block_size=16))
    engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(4):
        engine.step()
    state = engine._loop.parts.state
    state._columns = state._columns._replace(whole_SX=state._columns.whole_SX.clone())
    with pytest.raises(EngineFaultError, match="was replaced"):
        engine.step()


@pytest.mark.usefixtures("recorded")
def test_padding_of_an_earlier_batch_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: numbers of a larger batch that stay in the inputs are requests that run once more."""
    expected, _ = serve("plain", [GREEDY] * 5, max_num_seqs=5)
    right = StepInputs.fill

    def stale(inputs: StepInputs, batch: StepBatch) -> None:
        before = inputs.slots_B.clone()
        right(inputs, batch)
        count = len(batch.rows.slots)
        inputs.slots_B[count:] = before[count:]

    uneven = [SamplingParameters(max_tokens=6 + 3 * index, ignore_eos=True) for index in range(5)]
    expected, _ = serve("plain", uneven, max_num_seqs=5)
    monkeypatch.setattr(StepInputs, "fill", stale)
    # A slot that ended is dead on the device, so even then nothing is written twice.
    found, _ = serve("plain", uneven, max_num_seqs=5)
    assert texts(found) == texts(expected)


def test_buckets_are_powers_of_two_and_the_largest() -> None:
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(8) == (1, 2, 4, 8)
    assert buckets_up_to(12) == (1, 2, 4, 8, 12)


@pytest.mark.usefixtures("recorded")
def test_waiting_prompts_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = loaded()
    engine = Engine(target, None, EngineSettings(max_num_seqs=5, block_size=16, record_prompts=False))
    shapes: list[tuple[int, ...]] = []
    target.model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY)
    engine.step()
    assert shapes[0] == (2, 30)  # the third has 4 tokens: most of its row would be padding
    assert sum(requests for requests, _ in shapes[:-1]) == len(PROMPTS)


@pytest.mark.usefixtures("recorded")
def test_outputs_of_padding_do_not_reach_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int | None, int]] = []
    run = graphs_module.StepRunner.run

    def watched(runner: graphs_module.StepRunner, batch: StepBatch) -> StepOutput:
        output = run(runner, batch)
        sizes.append((output.num_requests, output.accepted_B.shape[0]))
        return output

    monkeypatch.setattr(graphs_module.StepRunner, "run", watched)
    serve("plain", [GREEDY] * 3, max_num_seqs=8)
    assert (3, 4) in sizes


@pytest.mark.usefixtures("recorded")
def test_rules_that_grow_are_recorded_anew() -> None:
    """Planted by the requests themselves: the second has more biases than the arrays of the first had room for."""
    few = SamplingParameters(max_tokens=12, ignore_eos=True, logit_bias={7: 3.0}, repetition_penalty=1.2)
    many = SamplingParameters(max_tokens=12, ignore_eos=True, logit_bias={token: 4.0 for token in range(9, 20)})
    target, drafter = loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=1, block_size=16))
    found = [engine.generate([PROMPTS[0]], sampling)[0] for sampling in (few, many, few)]
    for sampling, result in zip((few, many, few), found, strict=True):
        fresh = Engine(target, drafter, EngineSettings(max_num_seqs=1, block_size=16))
        assert fresh.generate([PROMPTS[0]], sampling)[0].token_ids == result.token_ids
    assert engine.stats().num_replayed_steps > 0


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("family", ["dflash", "eagle3"])
def test_first_blocks_of_parallel_drafters_are_recorded_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[bool] = []
    do = Recorded.do

    def watched(work: Recorded, *arguments: object) -> object:
        kinds.append("x 0 rows" in work._name)
        return do(work, *arguments)

    monkeypatch.setattr(Recorded, "do", watched)
    serve(family, [GREEDY] * 5, max_num_seqs=1)
    assert sum(kinds) == (5 if family == "dflash" else 0)
