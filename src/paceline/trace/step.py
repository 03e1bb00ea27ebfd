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
