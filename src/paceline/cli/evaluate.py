"""`paceline evaluate MODEL --draft-model DRAFTER --prompts FILE`: acceptance as the engine serves it, per set."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cli.running import Models
    from paceline.cli.trace_file import TraceFile
    from paceline.configuration.generation import EvaluateRun
    from paceline.engine.counters import EngineStats
    from paceline.engine.engine import Engine
    from paceline.evaluation.acceptance import Progress, SetAcceptance
    from paceline.evaluation.prompts import Prompt


def evaluate(
    context: typer.Context,
    model: options.Target = None,
    draft_model: options.DraftModel = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", metavar="FILE", help="Prompt set: .jsonl, .npz (held-out end) or text; repeatable."),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts per set; all by default.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the result: .json as one object, .jsonl as one line per answer."),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Write the acceptance found here into the drafter's folder, for the alarm of serving; greedy only.",
        ),
    ] = False,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts decoded at the same time.", rich_help_panel=options.MODELS),
    ] = None,
    system: options.System = None,
    raw: options.Raw = False,
    spec_tokens: options.SpecTokens = None,
    draft_sample_method: options.DraftSampleMethod = None,
    verify_method: options.VerifyMethod = None,
    draft_length: options.DraftLength = None,
    draft_vocab_size: options.DraftVocabSize = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    min_tokens: options.MinTokens = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    ignore_eos: options.IgnoreEos = False,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    linear_mode: options.LinearMode = None,
    threads: options.Threads = None,
    offline: options.Offline = False,
    trace_file: options.TraceFile = None,
    trace_details: options.TraceDetails = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
    set_values: options.SetValues = None,
    dry_run: options.DryRun = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Measure a drafter's served acceptance length, with interval and per position, on prompt files."""
    session, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.configuration.generation import EvaluateRun
    from paceline.configuration.load import load_settings

    run = load_settings(EvaluateRun, config, set_values or (), options.asked(context, EvaluateRun))
    if output is not None:
        _check_output(output)
    if calibrate:
        _check_calibrates(run)
    from paceline.cli.prompt_files import read_unlearnt_prompts

    sets = [(path.stem, read_unlearnt_prompts(path, [run.draft_model], limit=run.num_prompts)) for path in run.prompts]
    if dry_run:
        counts = {name: len(rows) for name, rows in sets}
        options.show_settings(run, as_json=as_json, extra={"num_prompts": counts})
        return
    from paceline.cli.running import load_models, make_engine
    from paceline.cli.trace_file import TraceFile
    from paceline.evaluation.acceptance import check_questions, longest_question

    models = load_models(run, environment)
    tokenizer, everything = models.target.tokenizer, [prompt for _, rows in sets for prompt in rows]
    longest = longest_question(tokenizer, everything, max_tokens=run.max_tokens, system=run.system, raw=run.raw)
    engine = make_engine(run, models, max_num_seqs=run.max_num_seqs, num_prompt_tokens=longest)
    vocab_size = models.target.contract.vocab_size
    check_questions(engine, tokenizer, everything, vocab_size=vocab_size, system=run.system, raw=run.raw)
    writer = None
    if run.trace_file is not None:
        writer = TraceFile(run.trace_file, run, models, run.prompts, requests_at_once=run.max_num_seqs)
    results = _evaluate_sets(run, models, engine, sets, writer, shows_progress=session.verbosity >= 0)
    if calibrate:
        _calibrate(run, models, results)
    report = _report(run, models, results, engine.stats())
    if output is not None:
        _write(output, report, results)
    if as_json:
        options.print_json(report)
    else:
        _print_tables(results)


def _check_output(output: Path) -> None:
    """Refuse a result file that could not be written before minutes are spent on filling it."""
    from paceline.errors import ConfigError

    origin = {"output": output}
    if output.suffix not in (".json", ".jsonl"):
        raise ConfigError(
            f"results are written as .json or .jsonl, not {output.suffix or 'without a suffix'}", origin=origin
        )
    if output.is_dir():
        raise ConfigError("the result file is a folder", origin=origin)
    folder = output.resolve().parent
    if not folder.is_dir():
        raise ConfigError("the folder of the result file does not exist", origin=origin)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("nothing can be written into the folder of the result file", origin=origin)


def _check_calibrates(run: EvaluateRun) -> None:
    """Refuse settings whose acceptance is not that of plain greedy requests, or a folder that is not one's own."""
    from paceline.errors import ConfigError

    neutral = {
        "temperature": run.temperature == 0,
        "draft_length": run.draft_length == "fixed",
        "min_tokens": run.min_tokens == 0,
        "repetition_penalty": run.repetition_penalty == 1,
        "frequency_penalty": run.frequency_penalty == 0,
        "presence_penalty": run.presence_penalty == 0,
    }
    changed = [name for name, is_neutral in neutral.items() if not is_neutral]
    if changed:
        raise ConfigError(
            f"--calibrate records what plain greedy requests accept, and {', '.join(changed)} "
            f"{'is' if len(changed) == 1 else 'are'} set to something else",
            hint="temperature 0, draft length fixed, and no penalties",
        )
    if not Path(run.draft_model).expanduser().is_dir():
        raise ConfigError(
            f"--calibrate writes into the drafter's folder, and {run.draft_model} is none on this machine",
            hint="a copy of the drafter in a folder of its own",
        )


def _calibrate(run: EvaluateRun, models: Models, results: Sequence[SetAcceptance]) -> None:
    """Write `calibration.json` from the steps of all sets."""
    import torch

    from paceline import __version__
    from paceline.checkpoint.calibration import Calibration, write_calibration
    from paceline.log import get_logger
    from paceline.trace.acceptance import AcceptanceSummary

    records = [record for result in results for answer in result.answers for record in answer.result.trace.records]
    summary = AcceptanceSummary.from_steps(records)
    weight = models.target.model.norm.weight
    calibration = Calibration(
        method="served",
        num_blocks=summary.num_steps,
        per_position=summary.per_position,
        texts=tuple(path.name for path in run.prompts),
        recorded_with={
            "paceline": __version__,
            "torch": torch.__version__,
            "target": models.target.contract.name,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": weight.device.type,
        },
    )
    folder = Path(run.draft_model).expanduser()
    write_calibration(folder, calibration)
    get_logger(__name__).info(
        "%s: calibrated over %d blocks; %.3f keep their first draft",
        folder,
        calibration.num_blocks,
        calibration.first_position,
    )


def _evaluate_sets(
    run: EvaluateRun,
    models: Models,
    engine: Engine,
    sets: Sequence[tuple[str, list[Prompt]]],
    writer: TraceFile | None,
    *,
    shows_progress: bool,
) -> list[SetAcceptance]:
    from paceline.cli.running import sampling_of
    from paceline.evaluation.acceptance import evaluate_set

    results: list[SetAcceptance] = []
    for name, prompts in sets:
        progress = _ProgressLine(name) if shows_progress else None
        results.append(
            evaluate_set(
                engine,
                models.target.tokenizer,
                name,
                prompts,
                sampling_of(run),
                system=run.system,
                raw=run.raw,
                on_progress=progress,
            )
        )
        if progress is not None:
            progress.close()
        if writer is not None:
            _write_traces(writer, run, results[-1], prompts)
    if writer is not None:
        writer.close()
    return results


def _write_traces(writer: TraceFile, run: EvaluateRun, result: SetAcceptance, prompts: Sequence[Prompt]) -> None:
    """Every answer of a set, in the order of its prompts, each with the seed that `evaluate_set` gave it."""
    by_id = {prompt.id: prompt for prompt in prompts}
    for index, answer in enumerate(result.answers):
        writer.write(
            answer.result,
            by_id[answer.prompt_id],
            set_name=result.name,
            turn=answer.turn,
            seed=None if run.seed is None else (run.seed + index) % 2**63,
        )


class _ProgressLine:
    """One line on stderr: redrawn on a terminal, a new line every tenth of the way elsewhere."""

    def __init__(self, name: str) -> None:
        import time

        self._name = name
        self._clock = time.perf_counter
        self._start = time.perf_counter()
        self._last_tenth = 0
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, progress: Progress) -> None:
        """Show where the evaluation stands."""
        seconds = max(self._clock() - self._start, 1e-9)
        share = progress.num_answers / progress.num_answers_in_all
        remaining = seconds / share - seconds
        line = (
            f"{self._name}: {progress.num_answers} of {progress.num_answers_in_all}, "
            f"{progress.num_output_tokens / seconds:.0f} tokens/s, "
            f"acceptance length {progress.acceptance_length:.2f}, {remaining:.0f} s left"
        )
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        elif int(share * 10) > self._last_tenth:
            self._last_tenth = int(share * 10)
            typer.echo(line, err=True)

    def close(self) -> None:
        """Leave the last state standing."""
        if self._is_terminal:
            sys.stderr.write("\n")


def _report(
    run: EvaluateRun, models: Models, results: Sequence[SetAcceptance], stats: EngineStats
) -> dict[str, object]:
    from paceline import __version__
    from paceline.evaluation.prompts import file_sha256
    from paceline.ops.acceptance import is_lossless

    assert models.drafter is not None  # EvaluateRun requires one
    return {
        "target": models.target.contract.name,
        "drafter": models.drafter.contract.origin,
        "settings": run.model_dump(mode="json"),
        "version": __version__,
        "verify_method": run.verify_method,
        "lossless": is_lossless(run.verify_method),
        "num_listed_ids": stats.num_listed_ids,
        "listed_share": stats.listed_share,
        "sets": [
            {**result.to_dict(), "temperature": run.temperature, "file": str(path), "sha256": file_sha256(path)}
            for result, path in zip(results, run.prompts, strict=True)
        ],
    }


def _write(output: Path, report: dict[str, object], results: Sequence[SetAcceptance]) -> None:
    """Write the result in full or not at all."""
    import json

    from paceline.checkpoint.weights import write_text_atomic

    if output.suffix == ".json":
        text = json.dumps(report, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    else:
        rows = [
            {
                "set": result.name,
                "id": answer.prompt_id,
                "turn": answer.turn,
                "num_prompt_tokens": len(answer.result.prompt_ids),
                "token_ids": list(answer.result.token_ids),
                "text": answer.result.text,
                "finish_reason": answer.result.finish_reason,
                "verify_method": answer.result.verify_method,
                "lossless": answer.result.is_lossless,
                "accepted": [record.num_accepted for record in answer.result.trace.records],
                "proposed": [record.num_draft_tokens for record in answer.result.trace.records],
            }
            for result in results
            for answer in result.answers
        ]
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_text_atomic(output, text)


def _print_tables(results: Sequence[SetAcceptance]) -> None:
    """The figures of each set on stdout, in columns."""
    width = max(len("set"), *(len(result.name) for result in results))
    typer.echo(f"{'set':<{width}}  prompts  tokens  steps  acceptance length  95 % interval  draft acceptance")
    for result in results:
        summary = result.summary
        interval = "-" if result.low is None or result.high is None else f"{result.low:.3f}-{result.high:.3f}"
        typer.echo(
            f"{result.name:<{width}}  {result.num_prompts:>7}  {result.num_output_tokens:>6}  {summary.num_steps:>5}  "
            f"{summary.acceptance_length:>17.3f}  {interval:>13}  "
            f"{summary.draft_acceptance_rate:>16.3f}"
        )
    typer.echo("\nshare of steps that kept the draft at each position (0 follows the anchor)")
    for result in results:
        shares = "  ".join(f"{share:.3f}" for share in result.summary.per_position)
        typer.echo(f"{result.name:<{width}}  {shares}")
