"""Served acceptance: runs the engine over prompt sets and counts what was accepted. Never simulated.

Report per set, never one pooled number: acceptance depends on the text. The interval is a bootstrap over prompts, since
the steps of one prompt are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.engine.request import check_prompt
from paceline.errors import CapacityError, NumericError, PacelineError, RequestError
from paceline.evaluation.prompts import Prompt, encode_prompt
from paceline.evaluation.statistics import bootstrap_ratio
from paceline.trace.acceptance import AcceptanceSummary

if TYPE_CHECKING:
    from paceline.checkpoint.tokenizer import TextTokenizer
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult, SamplingParameters


@dataclass(frozen=True)
class Progress:
    """Where an evaluation stands, after each answer."""

    num_answers: int
    num_answers_in_all: int
    num_output_tokens: int
    acceptance_length: float


@dataclass(frozen=True)
class Answer:
    """One answered turn of a prompt."""

    prompt_id: str
    turn: int
    result: RequestResult


@dataclass(frozen=True)
class SetAcceptance:
    """Acceptance on one prompt set.

    Args:
        name: of the set.
        num_prompts: prompts; each may have several answers.
        num_output_tokens: tokens delivered, the first of each answer included.
        summary: all counts and rates.
        low: lower end of the 95 % bootstrap interval of the acceptance length, over prompts; None without any step.
        high: its upper end.
        answers: every answer, in the order of the prompts.
    """

    name: str
    num_prompts: int
    num_output_tokens: int
    summary: AcceptanceSummary
    low: float | None
    high: float | None
    answers: tuple[Answer, ...]

    def to_dict(self) -> dict[str, object]:
        """The figures of the set, without its answers, as plain JSON values."""
        return {
            "set": self.name,
            "num_prompts": self.num_prompts,
            "num_answers": len(self.answers),
            "num_output_tokens": self.num_output_tokens,
            "low": self.low,
            "high": self.high,
            "simulated": False,
            **self.summary.to_dict(),
        }


def evaluate_set(
    engine: Engine,
    tokenizer: TextTokenizer,
    name: str,
    prompts: Sequence[Prompt],
    sampling: SamplingParameters,
    *,
    system: str | None = None,
    raw: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> SetAcceptance:
    """Answer every turn of every prompt and count acceptance.

    Args:
        engine: with a drafter; nothing else may run on it meanwhile.
        tokenizer: the target's.
        name: of the set.
        prompts: what to answer; later turns see the answers to earlier ones.
        sampling: for each answer. With a seed, answer i of the set uses seed + i, so that their draws differ.
        system: system message for prompts that bring none.
        raw: leave the chat template out.
        on_progress: called after each answer.

    Returns:
        The set's figures.

    Raises:
        RequestError: a prompt cannot be asked as it stands.
        CapacityError: a prompt does not fit the context.
        NumericError: an answer ended in an error.
    """
    first_answer = [sum(prompt.num_turns for prompt in prompts[:index]) for index in range(len(prompts))]
    running: dict[str, int] = {}
    texts: list[list[str]] = [[] for _ in prompts]
    answers: list[list[Answer]] = [[] for _ in prompts]
    num_answers = num_tokens = num_steps = num_accepted = 0
    num_answers_in_all = sum(prompt.num_turns for prompt in prompts)

    def ask(index: int) -> None:
        turn = len(texts[index])
        own = (
            sampling
            if sampling.seed is None
            else replace(sampling, seed=(sampling.seed + first_answer[index] + turn) % 2**63)
        )
        running[_add(engine, tokenizer, prompts[index], texts[index], own, system=system, raw=raw)] = index

    for index in range(len(prompts)):
        ask(index)
    while engine.has_unfinished():
        for delta in engine.step():
            if delta.finish_reason is None:
                continue
            index = running.pop(delta.request_id)
            result = engine.result(delta.request_id)
            prompt = prompts[index]
            if result.finish_reason == "error":
                raise NumericError(f"the answer to prompt {prompt.id!r} ended in an error", origin={"set": name})
            answers[index].append(Answer(prompt.id, len(texts[index]), result))
            texts[index].append(result.text)
            if len(texts[index]) < prompt.num_turns:
                ask(index)
            if on_progress is not None:
                of_answer = AcceptanceSummary.from_steps(result.trace.records)
                num_answers, num_tokens = num_answers + 1, num_tokens + len(result.token_ids)
                num_steps, num_accepted = num_steps + of_answer.num_steps, num_accepted + of_answer.num_accepted
                on_progress(
                    Progress(
                        num_answers=num_answers,
                        num_answers_in_all=num_answers_in_all,
                        num_output_tokens=num_tokens,
                        acceptance_length=1 + num_accepted / num_steps if num_steps else math.nan,
                    )
                )
    return summarise(name, answers)


def longest_question(
    tokenizer: TextTokenizer,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    system: str | None = None,
    raw: bool = False,
) -> int:
    """Tokens of the longest question, with every answer before it as long as it may be.

    Args:
        tokenizer: the target's.
        prompts: of all sets.
        max_tokens: of an answer.
        system: as for `evaluate_set`.
        raw: likewise.

    Raises:
        RequestError: a prompt cannot be asked as it stands.
    """

    def size(prompt: Prompt) -> int:
        num_answers = prompt.num_turns - 1
        empty = [""] * num_answers
        return len(encode_prompt(prompt, tokenizer, answers=empty, system=system, raw=raw)) + num_answers * max_tokens

    return max(map(size, prompts))


def check_questions(
    engine: Engine,
    tokenizer: TextTokenizer,
    prompts: Sequence[Prompt],
    *,
    vocab_size: int,
    system: str | None = None,
    raw: bool = False,
) -> None:
    """Refuse prompts whose first question does not fit, before any of them costs its time.

    Args:
        engine: that will answer.
        tokenizer: the target's.
        prompts: of all sets.
        vocab_size: of the target.
        system: as for `evaluate_set`.
        raw: likewise.

    Raises:
        RequestError: names the prompt.
    """
    for prompt in prompts:
        ids = encode_prompt(prompt, tokenizer, system=system, raw=raw)
        try:
            check_prompt(ids, vocab_size=vocab_size, max_model_len=engine.max_model_len)
        except RequestError as error:
            raise _of_prompt(prompt, error) from error


def summarise(name: str, answers: Sequence[Sequence[Answer]]) -> SetAcceptance:
    """Figures of a set from the answers of each of its prompts."""
    flat = tuple(answer for group in answers for answer in group)
    per_prompt = [
        AcceptanceSummary.from_steps(record for answer in group for record in answer.result.trace.records)
        for group in answers
    ]
    num_steps = [summary.num_steps for summary in per_prompt]
    committed = [summary.num_steps + summary.num_accepted for summary in per_prompt]
    interval = bootstrap_ratio(committed, num_steps) if sum(num_steps) else None  # answers of one token have no step
    return SetAcceptance(
        name=name,
        num_prompts=len(answers),
        num_output_tokens=sum(len(answer.result.token_ids) for answer in flat),
        summary=AcceptanceSummary.from_steps(record for answer in flat for record in answer.result.trace.records),
        low=interval.low if interval is not None else None,
        high=interval.high if interval is not None else None,
        answers=flat,
    )


def _add(
    engine: Engine,
    tokenizer: TextTokenizer,
    prompt: Prompt,
    texts: Sequence[str],
    sampling: SamplingParameters,
    *,
    system: str | None,
    raw: bool,
) -> str:
    ids = encode_prompt(prompt, tokenizer, answers=texts, system=system, raw=raw)
    try:
        return engine.add_request(ids, sampling)
    except (RequestError, CapacityError) as error:
        raise _of_prompt(prompt, error) from error


def _of_prompt(prompt: Prompt, error: PacelineError) -> PacelineError:
    """The same error, which names its prompt."""
    return type(error)(f"prompt {prompt.id!r}: {error.message}", origin=error.origin, hint=error.hint)
