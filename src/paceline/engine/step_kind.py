"""What kind of work a step is, beside its size, and what kind of text a request is.

Sampled steps cost more than greedy ones: they read the logits again, make noise, and draw their drafts. So do rules on
tokens. Costs are kept apart by `StepKind`, which is that of a whole batch. How well drafts are kept is a matter of each
request instead, and kept apart by `TextKind`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.engine.sampling_flags import SamplingFlags


class StepKind(NamedTuple):
    """What a step does beside running the target and judging drafts greedily.

    Attributes:
        is_sampled: somebody samples, so all rows are judged that way.
        truncates: a sampled request leaves tokens out.
        has_rules: somebody has rules on tokens.
        gives_logprobs: somebody wants log-probabilities.
        has_grammar: somebody has a grammar, which is asked on the host.
    """

    is_sampled: bool = False
    truncates: bool = False
    has_rules: bool = False
    gives_logprobs: bool = False
    has_grammar: bool = False

    @classmethod
    def of(cls, flags: SamplingFlags, *, has_grammar: bool = False) -> StepKind:
        """The kind of steps that such requests are in.

        Args:
            flags: of one request, or of all.
            has_grammar: whether one of them has a grammar.
        """
        gives_logprobs = flags.num_raw_logprobs is not None or flags.num_processed_logprobs is not None
        return cls(not flags.all_greedy, flags.truncates, flags.any_rules, gives_logprobs, has_grammar)

    @classmethod
    def joined(cls, kinds: Iterable[StepKind]) -> StepKind:
        """The kind of a step whose requests alone would be of these kinds: it does what any of them needs."""
        return cls(*map(any, zip(*kinds, strict=True)))

    @property
    def tried_kind(self) -> StepKind:
        """The kind that trial steps are made for, and whose costs this one is taken to have until it was run."""
        return SAMPLED_STEP if self.is_sampled else GREEDY_STEP


GREEDY_STEP = StepKind()
SAMPLED_STEP = StepKind(is_sampled=True)
TRIED_KINDS = (GREEDY_STEP, SAMPLED_STEP)


class TextKind(NamedTuple):
    """What drafts are judged against: they are kept less often where the target's choice is drawn.

    Attributes:
        is_sampled: the request samples.
        has_rules: rules on tokens or a grammar refuse drafts for reasons of their own.
    """

    is_sampled: bool = False
    has_rules: bool = False


GREEDY_TEXT = TextKind()


class StepAhead(NamedTuple):
    """The step that will judge the blocks which are planned now.

    Attributes:
        kind: of its batch.
        num_requests: in it.
        num_adaptive: of them, by kind of text, those that get what pays.
        num_fixed: drafts of its longest block that is settled otherwise; it has rows for these in any case.
    """

    kind: StepKind
    num_requests: int
    num_adaptive: tuple[tuple[TextKind, int], ...]
    num_fixed: int = 0


class StepSize(NamedTuple):
    """A step that was launched, as far as its cost goes.

    Attributes:
        kind: of its batch.
        num_requests: in it.
        num_drafts: that it judges, and draws, per request.
        writes_context: whether it keeps the drafter's context current.
    """

    kind: StepKind
    num_requests: int
    num_drafts: int
    writes_context: bool
