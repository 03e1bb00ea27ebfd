"""Engines whose drafts are a known text, right everywhere or wrong at chosen positions, and what to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.fakes import ByteTokenizer
from tests.tiny import loaded, tiny_prompts

from paceline.engine.canary import ReplayProposer
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.proposal import Proposer
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.models.drafters.proposal import Proposal
from paceline.models.loading import LoadedTarget

BASE = SamplingParameters(max_tokens=18, ignore_eos=True)
PROMPTS = tiny_prompts([9, 4, 17])
FIELDS = ("token_ids", "text", "finish_reason", "stop_reason", "error", "logprobs")


def replaying(
    target: LoadedTarget,
    text_after: Mapping[tuple[int, ...], Sequence[int]],
    num_draft_tokens: int,
    max_num_seqs: int = 8,
    **settings: Any,
) -> Engine:
    """An engine whose drafts are a known continuation of each prompt."""

    def script(slot: int) -> Sequence[int] | None:
        request = engine._loop.requests[engine.request_in_slot(slot)]
        return request.prompt_ids + tuple(text_after[request.prompt_ids])

    proposer = ReplayProposer(script, num_draft_tokens)
    engine = Engine(target, None, EngineSettings(max_num_seqs=max_num_seqs, **settings), proposer=proposer)
    return engine


class FlawedReplay:
    """A replay in which chosen positions of the text are drafted wrong."""

    def __init__(self, inner: Proposer, wrong: frozenset[int], vocab_size: int) -> None:
        self._inner, self._wrong, self._vocab_size = inner, wrong, vocab_size
        for name in (*Proposer.__annotations__, "cache"):
            setattr(self, name, getattr(inner, name))
        self.write_context, self.settle = inner.write_context, inner.settle

    def propose(self, rows, state, *, all_greedy, num_drafts=None):
        ids = self._inner.propose(rows, state, all_greedy=all_greedy, num_drafts=num_drafts).ids_BK
        for index, length in enumerate(state.lengths[rows.slots_B].tolist()):
            for k in range(ids.shape[1]):
                if length + 1 + k in self._wrong and ids[index, k] >= 0:
                    ids[index, k] = (ids[index, k] + 1) % self._vocab_size
        return Proposal(ids)


def make_target() -> LoadedTarget:
    """A tiny target whose every token is text."""
    return loaded("qwen3", tokenizer=ByteTokenizer({index: b"<%d>" % index for index in range(512)}))[0]


class WordTokenizer(ByteTokenizer):
    """Spells `<17>` as token 17."""

    def encode(self, text: str) -> list[int]:
        return [int(part) for part in text.strip().strip("<>").split("><")]


def with_mistakes(
    target: LoadedTarget,
    right: list[RequestResult],
    wrong: frozenset[int] = frozenset((11, 12, 20, 27)),
    **options: Any,
) -> Engine:
    """An engine that drafts the text of given results, wrong at chosen positions."""
    engine = replaying(target, {result.prompt_ids: result.token_ids for result in right}, 5, **options)
    engine.wrap_proposer(lambda inner: FlawedReplay(inner, wrong, 512))
    return engine


def same(one: RequestResult, other: RequestResult) -> bool:
    """Whether two results say the same to the caller, whatever way they came about."""
    return all(getattr(one, field) == getattr(other, field) for field in FIELDS)


def check_agreement(engine: Engine, results: list[RequestResult]) -> None:
    """Tokens, log-probabilities, traces and counters speak of the same tokens."""
    for result in results:
        assert result.trace.token_ids == result.token_ids
        if result.logprobs is not None:
            assert tuple(entry.token_id for entry in result.logprobs) == result.token_ids
    stats, records = engine.stats(), [record for result in results for record in result.trace.records]
    assert stats.num_output_tokens == sum(len(result.token_ids) for result in results)
    assert stats.num_accepted == sum(record.num_accepted for record in records)
    assert stats.num_draft_tokens == sum(record.num_draft_tokens for record in records)
