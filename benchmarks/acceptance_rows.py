"""Rows of the acceptance table: what serving accepted of a set, and what a simulated walk makes of the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.command_line import say
from benchmarks.prompt_sets import PromptSet

from paceline.evaluation.acceptance import Answer, summarise
from paceline.evaluation.statistics import Interval, bootstrap_ratio
from paceline.trace.acceptance import AcceptanceSummary

if TYPE_CHECKING:
    from paceline.engine.request import RequestResult
    from paceline.models.loading import LoadedDrafter, LoadedTarget
    from paceline.training.data import Conversations


@dataclass(frozen=True)
class Walk:
    """The simulated walk of each conversation: tokens committed and steps taken, as served steps are counted."""

    committed: tuple[float, ...]
    num_steps: tuple[int, ...]

    def interval(self) -> Interval:
        """Acceptance length with its interval over conversations."""
        return bootstrap_ratio(self.committed, self.num_steps)


def served_conversations(results: Sequence[RequestResult]) -> Conversations:
    """Prompts and what serving wrote, as training reads conversations."""
    import numpy as np

    from paceline.training.data import Conversations

    texts = [(*result.prompt_ids, *result.token_ids) for result in results]
    marks = [[False] * len(result.prompt_ids) + [True] * len(result.token_ids) for result in results]
    return Conversations(
        tokens=np.concatenate([np.array(text, np.int32) for text in texts]),
        supervised=np.concatenate([np.array(mark, bool) for mark in marks]),
        starts=np.cumsum([0, *map(len, texts)]).astype(np.int64),
    )


def simulate_walk(conversations: Conversations, target: LoadedTarget, drafter: LoadedDrafter, label: str) -> Walk:
    """Walk every response with the very modules that serve."""
    from paceline.training.features import TargetFeatures
    from paceline.training.simulate import simulate

    features = TargetFeatures(target.model, drafter.contract.target_layer_ids)
    committed, num_steps = [], []
    for index in range(len(conversations)):
        one = conversations.select([index])
        found = simulate(drafter.model, features, one, batch_size=1, max_length=len(one.tokens), mixed_precision=False)
        steps = sum(steps for _, steps in found.per_conversation)
        committed.append(found.acceptance_length * steps)
        num_steps.append(steps)
        if (index + 1) % 8 == 0 or index + 1 == len(conversations):
            say(f"{label}, simulated: {index + 1} of {len(conversations)} conversations")
    return Walk(tuple(committed), tuple(num_steps))


def served_row(prompt_set: PromptSet, results: Sequence[RequestResult], temperature: float) -> dict[str, object]:
    """The row of one served set."""
    found = summarise(prompt_set.name, [[Answer(result.request_id, 0, result)] for result in results])
    return {
        "set": prompt_set.name,
        "temperature": temperature,
        "acceptance_length": found.summary.acceptance_length,
        "low": found.low,
        "high": found.high,
        "num_prompts": found.num_prompts,
        "simulated": False,
    }


def comparison(
    prompt_set: PromptSet, results: Sequence[RequestResult], *, stored: Walk, served: Walk
) -> dict[str, object]:
    """How greedy serving compares with the walks over the stored text and over its own."""
    length = AcceptanceSummary.from_steps(record for result in results for record in result.trace.records)
    assert prompt_set.responses is not None, "only token files are compared"
    same = [result.token_ids == response for result, response in zip(results, prompt_set.responses, strict=True)]
    return {
        "over_simulated": relative_difference(length.acceptance_length, stored.interval().estimate),
        "over_simulated_served_text": relative_difference(length.acceptance_length, served.interval().estimate),
        "same_text": sum(same) / len(same),
    }


def relative_difference(served: float, simulated: float) -> float:
    """Served over simulated, less 1."""
    return served / simulated - 1


def simulated_row(prompt_set: PromptSet, walk: Walk) -> dict[str, object]:
    """The row of a simulated set."""
    interval = walk.interval()
    return {
        "set": prompt_set.name,
        "temperature": 0.0,
        "acceptance_length": interval.estimate,
        "low": interval.low,
        "high": interval.high,
        "num_prompts": interval.num_units,
        "simulated": True,
    }
