"""What the host knows of the requests of one step, so that a stage nobody asked for costs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.sampling import LogprobsMode, SamplingParameters


@dataclass(frozen=True)
class SamplingFlags:
    """A batch's sampling settings, summarised. They may claim too much work, never too little.

    Attributes:
        all_greedy: every request takes the best token.
        max_top_k: the largest top_k of sampled requests; 0 if none has one.
        any_top_p: a sampled request truncates by mass.
        any_min_p: a sampled request truncates by min-p.
        any_allowed_ids: a request has an allow-list.
        any_bias: a request has logit biases.
        any_min_tokens: a request holds back stop ids.
        any_penalties: a request has penalties.
        any_bad_words: a request has bad words.
        num_raw_logprobs: the most best tokens asked for in raw log-probabilities; None if nobody wants any.
        num_processed_logprobs: the same for processed ones.
    """

    all_greedy: bool
    max_top_k: int
    any_top_p: bool
    any_min_p: bool
    any_allowed_ids: bool = False
    any_bias: bool = False
    any_min_tokens: bool = False
    any_penalties: bool = False
    any_bad_words: bool = False
    num_raw_logprobs: int | None = None
    num_processed_logprobs: int | None = None

    @property
    def truncates(self) -> bool:
        """A sampled request leaves tokens out."""
        return self.max_top_k > 0 or self.any_top_p or self.any_min_p

    @property
    def any_rules(self) -> bool:
        """A request has rules on tokens."""
        return self.any_allowed_ids or self.any_bias or self.any_min_tokens or self.any_penalties or self.any_bad_words

    @classmethod
    def of(cls, requests: list[SamplingParameters]) -> SamplingFlags:
        """Summarise the requests of a batch; greedy ones ignore temperature and truncation, but no rules."""
        sampled = [sampling for sampling in requests if not sampling.is_greedy]
        return cls(
            all_greedy=not sampled,
            max_top_k=max((sampling.top_k for sampling in sampled), default=0),
            any_top_p=any(sampling.top_p < 1 for sampling in sampled),
            any_min_p=any(sampling.min_p > 0 for sampling in sampled),
            any_allowed_ids=any(sampling.allowed_token_ids is not None for sampling in requests),
            any_bias=any(bool(sampling.logit_bias) for sampling in requests),
            any_min_tokens=any(sampling.min_tokens > 0 for sampling in requests),
            any_penalties=any(sampling.has_penalties for sampling in requests),
            any_bad_words=any(bool(sampling.bad_words) for sampling in requests),
            num_raw_logprobs=_most_logprobs(requests, "raw"),
            num_processed_logprobs=_most_logprobs(requests, "processed"),
        )


def _most_logprobs(requests: list[SamplingParameters], mode: LogprobsMode) -> int | None:
    """The largest number of best tokens that is asked for in a mode; None if nobody asks."""
    wanted = [sampling.logprobs for sampling in requests if sampling.logprobs_mode == mode]
    return max((number for number in wanted if number is not None), default=None)
