"""The schema of a trace: what one step proposed, kept and delivered, and the request it belongs to. No torch here.

A step judges one draft block. `proposed_ids` are the d drafts that were verified, in order. Verification keeps a
prefix of them (`num_verified_accepted`); a stop token, a stop string or the token budget may then cut it shorter
(`num_accepted`). Delivered are the kept drafts and, unless it was cut, the target's own token after them:

    emitted_ids = proposed_ids[:num_accepted] + ((bonus_id,) if bonus_id is not None else ())

A step without drafts (plain decoding) has no proposals and its one token is the bonus.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.errors import DataError


@dataclass(frozen=True)
class StepDetails:
    """What a step tells beyond its tokens, where a trace was asked for with details (`EngineSettings.trace_details`).

    Logarithms are natural, of probabilities at temperature 1 unless said otherwise; -100 stands for anything below. Row
    i of a step is where the target judged draft i; rows behind the first refusal mean nothing and are left out.

    Attributes:
        draft_logprobs: of each draft under what it was drawn from: q where drafts are drawn, else the softmax of the
            drafter's row, without what a DSpark or DFlash2 drafter adds for the token before. Empty where not known.
        draft_entropies: of the same distributions in nats, where q has candidates of these alone. Empty likewise.
        confidences: what a confidence head said of each draft, 0 to 1; empty without such a head.
        target_logprobs: of each judged draft under the target: all kept ones, and the refused one behind them.
        target_entropies: of the target's rows in nats, one more than drafts were kept.
        target_top: the target's five likeliest tokens at these rows with their logarithms, best first.
        bonus_logprob: of the target's own token under the target; None where there was none.
        verify_ms: wall time of the target's pass, its head and the drafter's context included.
        sampling_ms: of judging the drafts and committing.
        draft_ms: of drafting the next block.
        host_ms: what is left of `step_ms`.
    """

    draft_logprobs: tuple[float, ...] = ()
    draft_entropies: tuple[float, ...] = ()
    confidences: tuple[float, ...] = ()
    target_logprobs: tuple[float, ...] = ()
    target_entropies: tuple[float, ...] = ()
    target_top: tuple[tuple[tuple[int, float], ...], ...] = ()
    bonus_logprob: float | None = None
    verify_ms: float = 0.0
    sampling_ms: float = 0.0
    draft_ms: float = 0.0
    host_ms: float = 0.0


# Not frozen: every request gets one in every step, and a frozen one takes several times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class StepRecord:
    """One target pass that judged one draft block. Nobody changes it once it is made.

    Attributes:
        request_id: the request it belongs to.
        step_index: counts the request's steps from 0; the prompt pass is not a step.
        anchor_position: absolute position of the anchor, the last committed token.
        anchor_id: its token id.
        proposed_ids: drafts verified in this step, the anchor not among them.
        num_verified_accepted: drafts that verification kept, before any stop or budget.
        num_accepted: drafts delivered, after stops and budget.
        emitted_ids: all tokens delivered, the bonus included if it was.
        bonus_id: the target's own token; None when the step was cut before it or the row was unusable.
        step_ms: wall time of the step in milliseconds; a batched step counts in full for each of its requests.
        details: what else was asked for; None where nothing was.
    """

    request_id: str
    step_index: int
    anchor_position: int
    anchor_id: int
    proposed_ids: tuple[int, ...]
    num_verified_accepted: int
    num_accepted: int
    emitted_ids: tuple[int, ...]
    bonus_id: int | None
    step_ms: float
    details: StepDetails | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.num_accepted <= self.num_verified_accepted <= len(self.proposed_ids):
            raise DataError(
                f"step {self.step_index} of request {self.request_id!r} accepted {self.num_accepted}, verified "
                f"{self.num_verified_accepted} and proposed {len(self.proposed_ids)} drafts; these can only grow in "
                "this order",
                hint="a step record that is written by hand or cut in two cannot be used; remove it from the trace",
            )
        expected = self.proposed_ids[: self.num_accepted] + (() if self.bonus_id is None else (self.bonus_id,))
        if self.emitted_ids != expected:
            raise DataError(
                f"step {self.step_index} of request {self.request_id!r} emitted {list(self.emitted_ids)}, but its "
                f"accepted drafts and bonus token are {list(expected)}",
                hint="emitted_ids are the first num_accepted proposals, then bonus_id unless it is None",
            )

    @property
    def num_draft_tokens(self) -> int:
        """Drafts verified in this step, d."""
        return len(self.proposed_ids)

    @property
    def refused_id(self) -> int | None:
        """The draft that verification refused; None if it kept all of them."""
        if self.num_verified_accepted == len(self.proposed_ids):
            return None
        return self.proposed_ids[self.num_verified_accepted]


@dataclass
class RequestTrace:
    """Everything that happened to one request; grows step by step while the request runs.

    Attributes:
        request_id: unique in a run.
        num_prompt_tokens: tokens in front of the first generated one.
        first_token_id: the token that the prompt pass gave; None if the request ended before it.
        records: its steps in order.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        prefill_ms: wall time of the prompt pass in milliseconds.
        total_ms: wall time from admission to the end in milliseconds.
        lossless: whether the output is the target's own (ids if greedy, distribution if sampled).
        method: how drafts were made and judged, such as "dflash/greedy", or "plain".
    """

    request_id: str
    num_prompt_tokens: int
    first_token_id: int | None = None
    records: list[StepRecord] = field(default_factory=list)
    finish_reason: str | None = None
    prefill_ms: float = 0.0
    total_ms: float = 0.0
    lossless: bool = True
    method: str = "plain"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens delivered, in order."""
        first = () if self.first_token_id is None else (self.first_token_id,)
        return first + tuple(token for record in self.records for token in record.emitted_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens delivered."""
        return len(self.token_ids)
