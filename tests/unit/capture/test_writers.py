"""Both writers write what serving would say, token for token, and cut what repeats itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fakes import table_target
from tests.tiny import loaded, tiny_prompts, tiny_target, wrap_target
from tests.tiny_kimi import kimi_target, small_kimi_config

from paceline.capture import lockstep
from paceline.capture.engine_writer import EngineWriter
from paceline.capture.lockstep import LockstepWriter
from paceline.capture.writer import LoopWatch, PassageRequest, Writer, key_number, key_share
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.errors import RequestError
from paceline.models.loading import LoadedTarget
from paceline.models.sequence_attend import sequence_attend

VOCAB_SIZE, END, MAX_TOKENS = 32, 2, 40
LENGTHS = [5, 1, 9, 3, 17, 4, 4, 2, 30, 6, 11, 8, 7, 5, 5]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    """So few ids that an answer ends by chance now and then; exact per row."""
    stops = (END, 17)
    return wrap_target(
        tiny_target(vocab_size=VOCAB_SIZE, hidden_size=32, head_size=8, num_layers=2, stop_token_ids=stops)
    )


def requests(temperature: float = 0.0, top_p: float = 1.0, max_tokens: int = MAX_TOKENS) -> list[PassageRequest]:
    prompts = tiny_prompts(LENGTHS, seed=3, vocab_size=VOCAB_SIZE)
    return [
        PassageRequest(prompt, max_tokens, temperature, top_p, seed=key_number("test", index))
        for index, prompt in enumerate(prompts)
    ]


def writers(target: LoadedTarget, batch_size: int = 7) -> dict[str, Writer]:
    return {
        "engine": EngineWriter(target, batch_size=batch_size, max_model_len=128),
        "lockstep": LockstepWriter(target, batch_size=batch_size),
    }


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.9, 0.7)])
def test_both_writers_write_the_same(target: LoadedTarget, temperature: float, top_p: float) -> None:
    wanted = requests(temperature, top_p)
    found = {name: writer.write(wanted) for name, writer in writers(target).items()}
    assert found["engine"] == found["lockstep"]
    ends = {passage.end for passage in found["engine"]}
    assert ends >= ({"stop"} if temperature == 0 else {"stop", "length"})


@pytest.mark.parametrize("name", ["engine", "lockstep"])
def test_a_mix_of_rows_and_another_batch_change_nothing(target: LoadedTarget, name: str) -> None:
    pairs = zip(requests(), requests(1.0), strict=True)
    mixed = [pair[index % 2] for index, pair in enumerate(pairs)]
    whole = writers(target)[name].write(mixed)
    assert whole == writers(target, batch_size=3)[name].write(mixed)
    assert whole[3:] == writers(target)[name].write(mixed[3:])
    assert writers(target)[name].write([]) == []


def test_greedy_text_is_what_serving_says(target: LoadedTarget) -> None:
    engine = Engine(target, settings=EngineSettings(max_model_len=128))
    wanted = requests()
    served = engine.generate([request.prompt_ids for request in wanted], SamplingParameters(max_tokens=MAX_TOKENS))
    for passage, result in zip(LockstepWriter(target, batch_size=4).write(wanted), served, strict=True):
        assert passage.token_ids == result.token_ids[: len(passage.token_ids)]
        assert passage.end == "loop" or len(passage.token_ids) == len(result.token_ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_changes_nothing(temperature: float) -> None:
    target, drafter = loaded(target_changes={"num_layers": 2, "stop_token_ids": tuple(range(2, 512, 40))})
    wanted = [
        PassageRequest(prompt, 24, temperature, 1.0, index)
        for index, prompt in enumerate(tiny_prompts([4, 9, 6, 12, 5], seed=1))
    ]
    plain = EngineWriter(target, batch_size=3, max_model_len=64).write(wanted)
    drafted = EngineWriter(target, drafter, batch_size=3, max_model_len=64, num_draft_tokens=3).write(wanted)
    assert plain == drafted


def test_a_loop_is_cut_where_it_closes() -> None:
    watch = LoopWatch()
    text = [*range(100, 150), *([1, 2, 3] * 20)]
    assert watch.push(text[:60]) is None
    # the fourth time that 1 2 3 1 2 3 1 2 ends: 8 tokens, then three periods of 3
    assert watch.push(text[60:]) == 50 + 8 + 9 - 60
    ordinary = LoopWatch()
    assert ordinary.push(list(range(1000)) * 3) is None
    assert ordinary.push(range(7)) is None
    assert ordinary.push([7]) == 1


@pytest.mark.parametrize("name", ["engine", "lockstep"])
def test_a_looping_target_is_cut(name: str) -> None:
    table = torch.zeros(16, 16)
    table[[4, 5, 6, 7], [5, 6, 7, 5]] = 10.0
    target = table_target(table)
    request = PassageRequest([4], 150, 0.0, 1.0, 0)
    made: dict[str, Any] = {
        "engine": lambda: EngineWriter(target, batch_size=1, max_model_len=200),
        "lockstep": lambda: LockstepWriter(target, batch_size=1),
    }
    (passage,) = made[name]().write([request])
    assert passage.end == "loop" and len(passage.token_ids) == 8 + 3 * 3


def test_rows_that_ended_leave_the_batch(target: LoadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    real = lockstep.Lockstep.keep
    monkeypatch.setattr(lockstep.Lockstep, "keep", lambda self, rows: (kept.append(len(rows)), real(self, rows))[1])
    monkeypatch.setattr(lockstep, "_LOOK_EVERY", 4)
    often = LockstepWriter(target, batch_size=15).write(requests(1.0))
    assert kept and kept == sorted(kept, reverse=True)
    assert often == EngineWriter(target, batch_size=15, max_model_len=128).write(requests(1.0))


@pytest.mark.parametrize("length", [0, 512])
def test_lockstep_refuses_prompts_without_room(target: LoadedTarget, length: int) -> None:
    bad = [*requests()[:2], PassageRequest([3] * length, 8, 0.0, 1.0, 0)]
    with pytest.raises(RequestError, match=rf"prompt 2 has {length} tokens; beside 8 of an answer .* 1 to 504"):
        LockstepWriter(target, batch_size=3).write(bad)


def test_an_interrupted_engine_writer_can_write_again(target: LoadedTarget) -> None:
    writer = EngineWriter(target, batch_size=4, max_model_len=128)

    def stop(num_ended: int, num_tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(requests(), stop)
    assert writer.write(requests()) == EngineWriter(target, batch_size=4, max_model_len=128).write(requests())


@pytest.mark.parametrize("name", ["engine", "lockstep"])
def test_progress_adds_up(target: LoadedTarget, name: str) -> None:
    told: list[tuple[int, int]] = []
    passages = writers(target)[name].write(requests(1.0), lambda ended, tokens: told.append((ended, tokens)))
    assert sum(ended for ended, _ in told) == len(passages)
    assert sum(tokens for _, tokens in told) == sum(len(passage.token_ids) for passage in passages)


def test_keys_give_numbers_that_last() -> None:
    """These are in shards that exist: another formula would answer old prompts anew."""
    assert key_number(0, "answer", "self-0", 0) == -4930058766370506064
    shares = [key_share(1, index) for index in range(2000)]
    assert 0.45 < sum(shares) / 2000 < 0.55 and min(shares) >= 0 and max(shares) < 1


def test_a_hybrid_target_writes_what_its_whole_sequences_say() -> None:
    """Rows of a batch shrink and end, and none carries another's state."""
    config = small_kimi_config(4, 2, vocab_size=VOCAB_SIZE, eos_token_id=[END, 17])
    target = wrap_target(kimi_target(config))  # type: ignore[arg-type]
    wanted = requests(max_tokens=12)
    passages = LockstepWriter(target, batch_size=4).write(wanted)
    assert {passage.end for passage in passages} >= {"stop", "length"}
    for request, passage in zip(wanted, passages, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *passage.token_ids]])
        logits = target.model.logits(target.model(ids, ids, sequence_attend(target.model)))
        chosen = logits[0, len(request.prompt_ids) - 1 : -1].argmax(-1).tolist()
        assert chosen == list(passage.token_ids)
