"""The target distribution written a second time, slowly: plain Python, float64, one row and one token after another.

It shares no line with `paceline.ops`. `as_rules` turns the same wishes into the tensors that the library takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from paceline.ops.bad_words import BadWordRows
from paceline.ops.penalties import PenaltyRows
from paceline.ops.token_masks import pack_token_mask
from paceline.ops.token_rules import TokenRules


@dataclass(frozen=True)
class Wishes:
    """What one request asks for; the defaults ask for nothing. The last token of `output` is the anchor."""

    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = (0,)
    grammar: tuple[frozenset[int] | None, ...] = ()  # allowed tokens per row; rows beyond its end have no grammar
    allowed: frozenset[int] | None = None
    bias: dict[int, float] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def anchor_position(self) -> int:
        return len(self.prompt) + len(self.output) - 1

    def grammar_of_row(self, row: int) -> frozenset[int] | None:
        return self.grammar[row] if row < len(self.grammar) else None


def slow_rules(
    logits: Sequence[float], row: int, drafts: Sequence[int], wishes: Wishes
) -> tuple[list[float], list[float]]:
    """One row before and after the rules; what is forbidden gets -inf added, so NaN stays NaN."""
    in_block = [draft for draft in drafts[:row] if draft >= 0]
    output = [*wishes.output, *in_block]
    history = [*wishes.prompt, *output]
    vocabulary = range(len(logits))
    z = list(logits)

    grammar = wishes.grammar_of_row(row)
    if grammar is not None:
        z = [z[v] if v in grammar else z[v] - math.inf for v in vocabulary]
    raw = list(z)
    if wishes.allowed is not None:
        z = [z[v] if v in wishes.allowed else z[v] - math.inf for v in vocabulary]
    for v, bias in wishes.bias.items():
        z[v] += bias
    position = wishes.anchor_position + row + 1
    if position < len(wishes.prompt) + wishes.min_tokens:
        for v in set(wishes.stop_ids):
            z[v] -= math.inf
    for v in vocabulary:
        if v in history:
            z[v] = z[v] / wishes.repetition if z[v] > 0 else z[v] * wishes.repetition
        z[v] -= wishes.frequency * output.count(v)
        z[v] -= wishes.presence if v in output else 0.0
    for word in wishes.bad_words:
        beginning = list(word[:-1])
        if not beginning or history[-len(beginning) :] == beginning:
            z[word[-1]] -= math.inf
    return raw, z


def slow_processed(ruled: Sequence[float], wishes: Wishes, *, margin: float = 1e-5) -> tuple[list[float], bool]:
    """One sound row after temperature and truncation; the flag says that some mass is too close to 1 - p to call."""
    if wishes.temperature < 1e-5:
        return list(ruled), False
    z = [value / max(wishes.temperature, 0.01) for value in ruled]
    highest = max(z)
    if highest == -math.inf:
        return z, False
    alive = set(range(len(z)))
    if wishes.min_p > 0:
        alive = {v for v in alive if z[v] >= highest + math.log(wishes.min_p)}
    if 0 < wishes.top_k < len(z):
        ranked = sorted((z[v] if v in alive else -math.inf for v in range(len(z))), reverse=True)
        alive = {v for v in alive if z[v] >= ranked[wishes.top_k - 1]}
    too_close = False
    if wishes.top_p < 1:
        total = sum(math.exp(z[v] - highest) for v in alive)
        dropped_mass = 0.0
        for v in sorted(alive, key=lambda v: (z[v], -v))[:-1]:
            dropped_mass += math.exp(z[v] - highest) / total
            too_close = too_close or abs(dropped_mass - (1 - wishes.top_p)) < margin
            if dropped_mass > 1 - wishes.top_p:
                break
            alive.discard(v)
    return [z[v] if v in alive else -math.inf for v in range(len(z))], too_close


def as_rules(requests: Sequence[Wishes], vocab_size: int, num_rows: int, *, fills_all: bool = False) -> TokenRules:
    """The library's tensors; stages that nobody asks for are None, or, with `fills_all`, full of neutral values."""

    def wants(is_wanted: bool) -> bool:
        return is_wanted or fills_all

    def mask(allowed: frozenset[int] | None) -> list[bool]:
        return [allowed is None or v in allowed for v in range(vocab_size)]

    rules = TokenRules()
    if wants(any(wishes.grammar for wishes in requests)):
        rows = [[mask(wishes.grammar_of_row(row)) for row in range(num_rows)] for wishes in requests]
        rules = rules._replace(grammar_mask_BLW=pack_token_mask(torch.tensor(rows)))
    if wants(any(wishes.allowed is not None for wishes in requests)):
        rules = rules._replace(allowed_mask_BW=pack_token_mask(torch.tensor([mask(w.allowed) for w in requests])))
    if wants(any(wishes.bias for wishes in requests)):
        rules = rules._replace(
            bias_ids_BM=padded([list(wishes.bias) for wishes in requests], -1),
            bias_values_BM=padded([list(wishes.bias.values()) for wishes in requests], 7.0).float(),
        )
    if wants(any(wishes.min_tokens > 0 for wishes in requests)):
        rules = rules._replace(
            held_ids_BM=padded([list(wishes.stop_ids) for wishes in requests], -1),
            held_before_B=torch.tensor([len(wishes.prompt) + wishes.min_tokens for wishes in requests]),
        )
    if wants(any((w.repetition, w.frequency, w.presence) != (1.0, 0.0, 0.0) for w in requests)):
        rules = rules._replace(penalties=as_penalties(requests, vocab_size))
    if wants(any(wishes.bad_words for wishes in requests)):
        rules = rules._replace(bad_words=as_bad_words(requests))
    return rules


def as_penalties(requests: Sequence[Wishes], vocab_size: int) -> PenaltyRows:
    return PenaltyRows(
        prompt_mask_BV=torch.tensor([[v in wishes.prompt for v in range(vocab_size)] for wishes in requests]),
        output_counts_BV=torch.tensor(
            [[wishes.output.count(v) for v in range(vocab_size)] for wishes in requests], dtype=torch.int32
        ),
        repetition_B=torch.tensor([wishes.repetition for wishes in requests]),
        frequency_B=torch.tensor([wishes.frequency for wishes in requests]),
        presence_B=torch.tensor([wishes.presence for wishes in requests]),
    )


def as_bad_words(requests: Sequence[Wishes]) -> BadWordRows:
    longest = max((len(word) for wishes in requests for word in wishes.bad_words), default=1)
    num_words = max(len(wishes.bad_words) for wishes in requests) + 1  # at least one row of padding
    words = [
        [[-1] * (longest - len(word)) + list(word) for word in wishes.bad_words]
        + [[-1] * longest] * (num_words - len(wishes.bad_words))
        for wishes in requests
    ]
    num_recent = longest - 1
    recent = [
        [-1] * num_recent + [*wishes.prompt, *wishes.output][-num_recent:] if num_recent else [] for wishes in requests
    ]
    recent_ids_BH = torch.tensor([ids[len(ids) - num_recent :] for ids in recent], dtype=torch.int64)
    return BadWordRows(recent_ids_BH, torch.tensor(words))


def padded(lists: Sequence[Sequence[Any]], filler: Any) -> Tensor:
    width = max(len(entries) for entries in lists) + 1
    return torch.tensor([[*entries, *[filler] * (width - len(entries))] for entries in lists])


def settings_of(requests: Sequence[Wishes]) -> dict[str, Tensor]:
    return {
        "temperature_B": torch.tensor([wishes.temperature for wishes in requests]),
        "top_k_B": torch.tensor([wishes.top_k for wishes in requests]),
        "top_p_B": torch.tensor([wishes.top_p for wishes in requests]),
        "min_p_B": torch.tensor([wishes.min_p for wishes in requests]),
    }


@dataclass(frozen=True)
class Case:
    """A batch: logits [B, L, V], drafts [B, K] and what each request asks for."""

    logits: Tensor
    drafts: Tensor
    requests: tuple[Wishes, ...]

    @property
    def anchor_position(self) -> Tensor:
        return torch.tensor([wishes.anchor_position for wishes in self.requests])

    def rules(self, *, fills_all: bool = False) -> TokenRules:
        return as_rules(self.requests, self.logits.shape[2], self.logits.shape[1], fills_all=fills_all)

    def part(self, requests: Sequence[int]) -> Case:
        index = list(requests)
        return Case(self.logits[index], self.drafts[index], tuple(self.requests[i] for i in index))


@st.composite
def cases(draw: st.DrawFn, *, is_exact: bool = True, has_faults: bool = False) -> Case:
    """Batches whose few tokens repeat a lot. Exact ones hold numbers that no rule and no temperature has to round.

    Args:
        draw: of hypothesis.
        is_exact: quarters, and factors that are powers of two, so that float32 and float64 agree to the bit.
        has_faults: some logits are NaN, +inf, -inf or -0.0.
    """
    vocab_size = draw(st.sampled_from([4, 31, 32, 33, 70]))
    num_drafts = draw(st.integers(0, 4))
    num_requests = draw(st.integers(1, 3))
    token = st.sampled_from([0, 1, 2, vocab_size - 2, vocab_size - 1])
    seed = draw(st.integers(0, 2**20))
    logits = torch.randn((num_requests, num_drafts + 1, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3
    logits = (logits * 4).round() / 4 if is_exact else logits
    if has_faults:
        for value in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, -0.0]), max_size=3)):
            row = draw(st.integers(0, num_drafts))
            logits[draw(st.integers(0, num_requests - 1)), row, draw(token)] = value

    def tokens(**bounds: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.lists(token, **bounds).map(tuple)

    def number(exact: list[float], low: float, high: float, neutral: float) -> st.SearchStrategy[float]:
        rounded = st.floats(low, high, width=32).filter(lambda value: value == 0 or abs(value) > 1e-3)
        return st.just(neutral) | (st.sampled_from(exact) if is_exact else rounded)

    # Mostly everything is allowed but one or two tokens; now and then nothing is.
    few = st.frozensets(token, max_size=2)
    allowed = few.map(lambda gone: frozenset(range(vocab_size)) - gone) | few
    quarter = st.integers(-12, 12).map(lambda step: step / 4)
    wishes = st.builds(
        Wishes,
        prompt=tokens(min_size=1, max_size=4),
        output=tokens(min_size=1, max_size=4),
        grammar=st.just(()) | st.lists(st.none() | allowed, max_size=num_drafts + 1).map(tuple),
        allowed=st.none() | allowed,
        bias=st.dictionaries(token, quarter if is_exact else st.floats(-100, 100, width=32), max_size=3),
        stop_ids=tokens(max_size=2),
        min_tokens=st.integers(0, 7),
        repetition=number([0.5, 2.0, 4.0], 0.25, 5.0, 1.0),
        frequency=number([-0.5, 0.25, 1.5], -2.0, 2.0, 0.0),
        presence=number([-1.5, 0.25, 2.0], -2.0, 2.0, 0.0),
        bad_words=st.lists(tokens(min_size=1, max_size=3), max_size=3).map(tuple),
        temperature=st.sampled_from([0.0, 0.25, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 3, 40, 100]),
        top_p=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.03, 0.4]),
    )
    drafts = [draw(tokens(min_size=num_drafts, max_size=num_drafts)) for _ in range(num_requests)]
    holes = [draw(st.frozensets(st.integers(0, 3), max_size=2)) for _ in range(num_requests)]
    rows = [
        [-1 if i in gone else draft for i, draft in enumerate(ids)] for ids, gone in zip(drafts, holes, strict=True)
    ]
    drafts_BK = torch.tensor(rows, dtype=torch.int64).view(num_requests, num_drafts)
    return Case(logits, drafts_BK, tuple(draw(wishes) for _ in range(num_requests)))


def bits(values: Tensor) -> Tensor:
    """The bits of float32 values; all NaNs are one."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32)
