"""A step's kind is what any of its requests needs."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.engine.sampling import SamplingParameters
from paceline.engine.sampling_flags import SamplingFlags
from paceline.engine.step_kind import GREEDY_STEP, SAMPLED_STEP, StepKind


def kind_of(**changes: Any) -> StepKind:
    return StepKind.of(SamplingFlags.of([SamplingParameters(**changes)]))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, GREEDY_STEP),
        ({"top_k": 5}, GREEDY_STEP),
        ({"temperature": 1.0}, SAMPLED_STEP),
        ({"temperature": 1.0, "top_p": 0.9}, StepKind(is_sampled=True, truncates=True)),
        ({"repetition_penalty": 1.5}, StepKind(has_rules=True)),
        ({"logprobs": 3}, StepKind(gives_logprobs=True)),
    ],
)
def test_kinds(changes: dict[str, Any], kind: StepKind) -> None:
    assert kind_of(**changes) == kind
    assert kind.tried_kind == (SAMPLED_STEP if kind.is_sampled else GREEDY_STEP)


def test_a_batch_does_what_any_of_its_requests_needs() -> None:
    kinds = {kind_of(), kind_of(temperature=1.0, top_p=0.9), kind_of(repetition_penalty=1.5)}
    assert StepKind.joined(kinds) == StepKind(is_sampled=True, truncates=True, has_rules=True)
    flags = [SamplingParameters(), SamplingParameters(temperature=1.0, top_p=0.9)]
    assert StepKind.joined({kind_of(), kind_of(temperature=1.0, top_p=0.9)}) == StepKind.of(SamplingFlags.of(flags))
    assert StepKind.of(SamplingFlags.of([]), has_grammar=True) == StepKind(has_grammar=True)
    assert StepKind.joined([]) == GREEDY_STEP
