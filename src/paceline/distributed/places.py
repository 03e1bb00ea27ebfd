"""Which rows the next pass runs, and what becomes of them: the decider's bookkeeping, all of it on the host.

A place is a row of the batch that serves one request after another. What a request has to run is the part of its known
text that has not been run: of a prompt a chunk at a time, and last the anchor, the newest token, followed by drafts for
the places behind it. Rows of the prompt count as they are; of drafts, those count that are what the target says itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.checkpoint.contract import TargetContract
from paceline.engine.sampling import SamplingParameters
from paceline.errors import RequestError
from paceline.ops.sample_tokens import NO_TOKEN
from paceline.trace.acceptance import AcceptanceSummary

Step = tuple[int, int, int, int]


@dataclass(frozen=True)
class DecodeRequest:
    """What is to be continued, and how.

    Attributes:
        prompt_ids: at least one.
        max_tokens: most tokens to generate.
        temperature: 0 takes the most likely token.
        top_k: sample among the k most likely tokens; 0 keeps all.
        top_p: sample among the most likely tokens that hold this mass.
        min_p: drop tokens below this share of the most likely one's probability.
        seed: of the noise; the same seed gives the same tokens with and without drafts.
        stop_token_ids: end the request, besides the target's own.
        is_drafted: whether a drafter, where there is one, works for it.
        ignore_eos: go past the target's own stop tokens.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    is_drafted: bool = True
    ignore_eos: bool = False

    def sampling(self) -> SamplingParameters:
        """All of it but the prompt, as the engine has it.

        Raises:
            RequestError: a value is impossible.
        """
        return SamplingParameters(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop_token_ids=tuple(sorted(self.stop_token_ids)),
            ignore_eos=self.ignore_eos,
            draft_length=None if self.is_drafted else "off",
        )


@dataclass(frozen=True)
class DecodeResult:
    """A finished request.

    Attributes:
        token_ids: generated; a stop token is the last of them.
        finish_reason: "error" where the target's numbers gave no token.
        steps: of each pass that judged a block or a lone anchor: drafts, those delivered, those kept before a stop or
            the budget cut them, tokens delivered.
    """

    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "error"]
    steps: tuple[Step, ...]

    @property
    def acceptance(self) -> AcceptanceSummary:
        """Of its own steps."""
        return AcceptanceSummary.from_counts(self.steps)


@dataclass
class Place:
    """A request that runs.

    Attributes:
        index: in the caller's list.
        request: what was asked.
        text: prompt and what was generated.
        num_run: tokens of it that were run and count.
        drafts: for the positions behind the anchor.
        rows: of the pass at hand.
        steps: so far.
    """

    index: int
    request: DecodeRequest
    text: list[int]
    num_run: int = 0
    drafts: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated."""
        return len(self.request.prompt_ids) + self.request.max_tokens - len(self.text)

    @property
    def is_at_anchor(self) -> bool:
        """Whether all of the text was run but its last token."""
        return self.num_run == len(self.text) - 1


class Places:
    """All places of a run.

    Args:
        contract: of the target.
        requests: to be served in this order.
        num_places: at the same time.
        max_rows: of a request and pass.
        max_model_len: tokens that prompt and answer may hold together.
    Raises:
        RequestError: a prompt is empty, too long or no text of this target.
    """

    def __init__(
        self,
        contract: TargetContract,
        requests: Sequence[DecodeRequest],
        *,
        num_places: int,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        check_requests(requests, vocab_size=contract.vocab_size, max_model_len=max_model_len)
        self._stops = frozenset(contract.stop_token_ids)
        self._max_rows = max_rows
        self._waiting = deque(Place(index, one, list(one.prompt_ids)) for index, one in enumerate(requests))
        self._results: list[DecodeResult | None] = [None] * len(requests)
        self.running: list[Place | None] = [None] * num_places

    def admit(self) -> list[int]:
        """Give free places to waiting requests; returns which."""
        new = [number for number, place in enumerate(self.running) if place is None][: len(self._waiting)]
        for number in new:
            self.running[number] = self._waiting.popleft()
        return new

    def next_rows(self) -> list[list[int]]:
        """What each place runs; nothing at all when every request is done."""
        for place in self.running:
            if place is None:
                continue
            if place.is_at_anchor:
                place.rows = [place.text[-1], *place.drafts[: place.num_left - 1]]
            else:
                end = min(place.num_run + self._max_rows, len(place.text) - 1)
                place.rows = place.text[place.num_run : end]
        return [[] if place is None else place.rows for place in self.running]

    def num_judged(self) -> list[int]:
        """How many rows of each place a token is chosen behind: the anchor and its drafts, none of a prompt's."""
        return [len(place.rows) if place is not None and place.is_at_anchor else 0 for place in self.running]

    def take(self, own_ids: Sequence[Sequence[int]]) -> list[int]:
        """Judge the rows that `next_rows` gave.

        Args:
            own_ids: the target's choice behind every row that is judged, by place.
        Returns:
            How many rows of each place count, from the first. Places whose request ended are free afterwards.
        """
        counts = []
        for number, place in enumerate(self.running):
            counts.append(0 if place is None else self._judge(number, place, own_ids[number]))
        return counts

    def results(self) -> list[DecodeResult]:
        """Of all requests, in the caller's order."""
        assert all(result is not None for result in self._results), "every request was served"
        return [result for result in self._results if result is not None]

    def _judge(self, number: int, place: Place, own_ids: Sequence[int]) -> int:
        if not place.is_at_anchor:
            place.num_run += len(place.rows)
            return len(place.rows)
        drafts = place.rows[1:]
        accepted = next((at for at, draft in enumerate(drafts) if draft != own_ids[at]), len(drafts))
        new = [*drafts[:accepted], own_ids[accepted]]
        place.num_run += accepted + 1
        place.drafts = []
        reason: Literal["stop", "length", "error"] | None = None
        if new[-1] == NO_TOKEN:
            new, reason = new[:-1], "error"
        stops = place.request.stop_token_ids if place.request.ignore_eos else self._stops | place.request.stop_token_ids
        stop = next((at for at, token in enumerate(new) if token in stops), None)
        if stop is not None:
            new, reason = new[: stop + 1], "stop"
        place.text += new
        place.steps.append((len(drafts), min(accepted, len(new)), accepted, len(new)))
        if reason is None and place.num_left == 0:
            reason = "length"
        if reason is not None:
            answer = tuple(place.text[len(place.request.prompt_ids) :])
            self._results[place.index] = DecodeResult(answer, reason, tuple(place.steps))
            self.running[number] = None
        return accepted + 1


def check_requests(requests: Sequence[DecodeRequest], *, vocab_size: int, max_model_len: int) -> None:
    """Refuse what cannot be served.

    Raises:
        RequestError: a prompt is empty, too long or no text of this target, or a setting is impossible.
    """
    for index, request in enumerate(requests):
        _check(index, request, vocab_size, max_model_len)


def _check(index: int, request: DecodeRequest, vocab_size: int, max_model_len: int) -> None:
    num_prompt = len(request.prompt_ids)
    if not num_prompt or request.max_tokens < 1 or num_prompt + request.max_tokens > max_model_len:
        raise RequestError(
            f"request {index} has a prompt of {num_prompt} tokens and asks for {request.max_tokens}; there have to be "
            f"one of each at least, and together {max_model_len} at most",
            hint="a larger max_model_len, or fewer tokens",
        )
    outside = [token for token in request.prompt_ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(f"request {index} holds the token {outside[0]}; the target has ids 0 to {vocab_size - 1}")
    request.sampling()  # refuses what is impossible
