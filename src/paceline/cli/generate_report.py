"""What `paceline generate` shows of its answers: the trace, figures and verdicts on stderr, or one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from paceline.cli import options

if TYPE_CHECKING:
    from paceline.cli.running import Models
    from paceline.configuration.generation import GenerateRun
    from paceline.engine.request import RequestResult, SamplingParameters, TokenLogprobs
    from paceline.evaluation.lossless import Comparison
    from paceline.evaluation.prompts import Prompt


@dataclass(frozen=True)
class View:
    """What is shown where."""

    as_json: bool
    trace: bool
    color: bool


@dataclass
class Outcome:
    """One prompt with its answer and, with `--compare`, the plain one."""

    prompt: Prompt
    result: RequestResult
    seed: int | None
    sample_index: int = 0
    plain: RequestResult | None = None
    comparison: Comparison | None = None


def is_repeatable(sampling: SamplingParameters, result: RequestResult) -> bool:
    """Whether plain decoding has to give the same ids: greedily, and where drafts are judged by equality."""
    return sampling.is_greedy or result.verify_method in ("match", "coupled")


def show_result(outcome: Outcome, models: Models, view: View) -> None:
    if view.trace and outcome.result.trace.records:
        from paceline.reporting.terminal import print_chips

        tokenizer = models.target.tokenizer
        print_chips(
            options.stderr_console(color=view.color),
            outcome.result.trace,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        )


def show_comparison(outcome: Outcome, sampling: SamplingParameters, view: View) -> None:
    if view.as_json or outcome.comparison is None or outcome.plain is None:
        return
    if not is_repeatable(sampling, outcome.result) and not outcome.comparison.is_identical:
        typer.echo(
            f"identical: not expected at temperature {sampling.temperature:g}: equal distribution, not equal draws",
            err=True,
        )
        return
    typer.echo(f"identical: {outcome.comparison.describe()} ({outcome.comparison.num_compared} tokens)", err=True)


def show_summary(outcomes: Sequence[Outcome], view: View) -> None:
    """Figures over all prompts: acceptance, speed and, with `--compare`, the ratio and the verdict."""
    from paceline.trace.acceptance import AcceptanceSummary

    results = [outcome.result for outcome in outcomes]
    if not results:
        return
    summary = AcceptanceSummary.from_steps(record for result in results for record in result.trace.records)
    num_tokens = sum(len(result.token_ids) for result in results)
    speed = pooled_speed(results)
    if view.trace and summary.num_steps:
        from paceline.reporting.terminal import print_summary

        console = options.stderr_console(color=view.color)
        is_compared = any(outcome.comparison is not None for outcome in outcomes)  # then the last line has the speeds
        print_summary(console, summary, tokens_per_second=None if is_compared else speed, num_output_tokens=num_tokens)
    else:
        parts = [f"{num_tokens} tokens"]
        if summary.num_steps:
            parts.append(f"acceptance length {summary.acceptance_length:.2f} over {summary.num_steps} steps")
        if speed is not None:
            parts.append(f"{speed:.1f} tokens/s")
        typer.echo(", ".join(parts), err=True)
    compared = [outcome for outcome in outcomes if outcome.comparison is not None]
    speculative = pooled_speed([outcome.result for outcome in compared])
    plain = pooled_speed([outcome.plain for outcome in compared if outcome.plain is not None])
    if speculative is not None and plain is not None:
        typer.echo(
            f"speculative {speculative:.1f} tokens/s, plain {plain:.1f} tokens/s, ratio {speculative / plain:.2f}",
            err=True,
        )
    if len(compared) > 1:
        from paceline.evaluation.lossless import num_identical

        same = num_identical(outcome.comparison for outcome in compared if outcome.comparison is not None)
        typer.echo(f"identical: {same} of {len(compared)} prompts", err=True)


def pooled_speed(results: Sequence[RequestResult]) -> float | None:
    """Tokens after the first per second of decoding, over several answers."""
    seconds = sum(result.trace.total_ms - result.trace.prefill_ms for result in results) / 1000.0
    num_tokens = sum(max(0, len(result.token_ids) - 1) for result in results)
    return num_tokens / seconds if num_tokens and seconds > 0 else None


def as_json_object(run: GenerateRun, models: Models, outcomes: Sequence[Outcome]) -> dict[str, object]:
    from paceline.trace.acceptance import AcceptanceSummary

    rows: list[dict[str, object]] = []
    for outcome in outcomes:
        result = outcome.result
        row: dict[str, object] = {
            "id": outcome.prompt.id,
            "sample_index": outcome.sample_index,
            "num_prompt_tokens": len(result.prompt_ids),
            "seed": outcome.seed,
            "text": result.text,
            "token_ids": list(result.token_ids),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            "error": result.error,
            "lossless": result.is_lossless,
            "method": result.trace.method,
            "verify_method": result.verify_method,
            "prefill_ms": result.trace.prefill_ms,
            "total_ms": result.trace.total_ms,
            "tokens_per_second": pooled_speed([result]),
        }
        if result.logprobs is not None:
            row["logprobs"] = [_logprobs_row(entry, models) for entry in result.logprobs]
        if models.drafter is not None:
            row["speculative_decoding"] = AcceptanceSummary.from_steps(result.trace.records).to_dict()
        if outcome.plain is not None and outcome.comparison is not None:
            ours, plain = pooled_speed([result]), pooled_speed([outcome.plain])
            row["plain"] = {
                "identical": outcome.comparison.is_identical,
                "first_divergence": outcome.comparison.first_divergence,
                "token_ids": list(outcome.plain.token_ids),
                "tokens_per_second": plain,
                "ratio": ours / plain if ours is not None and plain is not None else None,
            }
        rows.append(row)
    compared = [outcome.comparison for outcome in outcomes if outcome.comparison is not None]
    return {
        "settings": run.model_dump(mode="json"),
        "results": rows,
        "identical": all(comparison.is_identical for comparison in compared) if compared else None,
    }


def _logprobs_row(entry: TokenLogprobs, models: Models) -> dict[str, object]:
    """One token's log-probabilities, with the text of every id."""

    def text(token_id: int) -> str:
        return models.target.tokenizer.decode([token_id], skip_special_tokens=False)

    return {
        "token_id": entry.token_id,
        "token": text(entry.token_id),
        "logprob": entry.logprob,
        "mode": entry.mode,
        "top": [{"token_id": token, "token": text(token), "logprob": value} for token, value in entry.top],
    }
