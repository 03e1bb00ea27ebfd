"""`paceline generate MODEL --draft-model DRAFTER`: text, with proof on request that it is the target's own.

The text streams to stdout; the trace, figures and verdict go to stderr. With `--compare`, plain decoding of the same
target answers the same prompts, and greedy ids that differ end in exit code 3.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_INTERRUPTED, ConfigError, DataError, NumericError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cli.running import Models
    from paceline.configuration.run import GenerateRun
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult, SamplingParameters
    from paceline.evaluation.lossless import Comparison
    from paceline.evaluation.prompts import Prompt

STDIN = "-"
_NUM_WARM_UP_TOKENS = 8


def generate(
    context: typer.Context,
    model: options.Target = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Prompt text; repeatable; - reads stdin.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts: .jsonl, or plain text with one per line.")
    ] = None,
    system: options.System = None,
    raw: options.Raw = False,
    draft_model: options.DraftModel = None,
    spec_tokens: options.SpecTokens = None,
    draft_sample_method: options.DraftSampleMethod = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End the text before this string; repeatable.", rich_help_panel=options.SAMPLING),
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(help="End the text at this token; repeatable.", rich_help_panel=options.SAMPLING),
    ] = None,
    ignore_eos: options.IgnoreEos = False,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    linear_mode: options.LinearMode = None,
    threads: options.Threads = None,
    offline: options.Offline = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Run plain decoding too; say whether the ids are identical (exit code 3 if not)."
        ),
    ] = False,
    trace: Annotated[
        bool | None,
        typer.Option(
            "--trace/--no-trace",
            help="Show accepted, refused and bonus tokens on stderr; by default on a terminal.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Append a record of every step to this .jsonl file, one answer a line.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
    set_values: options.SetValues = None,
    dry_run: options.DryRun = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Generate text, faster with a drafter, and show what it accepted."""
    session, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.configuration.load import load_settings
    from paceline.configuration.run import GenerateRun

    run = load_settings(
        GenerateRun,
        config,
        set_values or (),
        {
            "model": model,
            "system": system,
            "raw": options.given(raw),
            "draft_model": draft_model,
            "spec_tokens": spec_tokens,
            "draft_sample_method": draft_sample_method,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "stop": tuple(stop) if stop else None,
            "stop_token_ids": tuple(stop_token_id) if stop_token_id else None,
            "ignore_eos": options.given(ignore_eos),
            "max_model_len": max_model_len,
            "dtype": dtype,
            "device": device,
            "linear_mode": linear_mode,
            "threads": threads,
            "offline": options.given(offline),
            "compare": options.given(compare),
            "trace": trace,
            "trace_file": trace_file,
        },
    )
    prompts = gather_prompts(prompt or [], prompt_file)
    if dry_run:
        options.show_settings(run, as_json=as_json, extra={"num_prompts": len(prompts)})
        return
    from paceline.cli.running import load_models

    models = load_models(run, environment)
    shows_trace = run.trace if run.trace is not None else sys.stderr.isatty() and session.verbosity >= 0
    view = _View(as_json=as_json, trace=shows_trace and not as_json, color=session.color)
    raise typer.Exit(_run_all(run, models, prompts, view))


@dataclass(frozen=True)
class _View:
    """What is shown where."""

    as_json: bool
    trace: bool
    color: bool


@dataclass
class _Outcome:
    """One prompt with its answer and, with `--compare`, the plain one."""

    prompt: Prompt
    result: RequestResult
    seed: int | None
    plain: RequestResult | None = None
    comparison: Comparison | None = None


def gather_prompts(texts: Sequence[str], file: Path | None) -> list[Prompt]:
    """Prompts from flags, a file, or stdin when nothing else is given and something is piped in.

    Raises:
        ConfigError: no prompt at all, or an empty one.
        DataError: the file cannot be read.
    """
    from paceline.evaluation.prompts import read_prompts, single_prompt

    if not texts and file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("there is no prompt", hint="--prompt TEXT, --prompt-file FILE, or a pipe into stdin")
        texts = [STDIN]
    if list(texts).count(STDIN) > 1:
        raise ConfigError("stdin can be read once, but --prompt - was given twice")
    prompts: list[Prompt] = []
    for index, text in enumerate(texts):
        content = _read_stdin() if text == STDIN else text
        if not content.strip():
            where = "stdin" if text == STDIN else "--prompt"
            raise ConfigError(f"the prompt from {where} is empty", origin={"prompt": where})
        prompts.append(single_prompt(content, identity=f"prompt-{index}"))
    if file is not None:
        prompts += read_prompts(file)
    for prompt in prompts:
        if prompt.num_turns > 1:
            raise ConfigError(
                f"prompt {prompt.id!r} has {prompt.num_turns} turns; generate answers single prompts",
                origin={"prompts": file},
                hint="`paceline evaluate`, which answers turn after turn",
            )
    return prompts


def _read_stdin() -> str:
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt on stdin is not {error.encoding}: {error.reason}", hint="text in UTF-8") from error


def _run_all(run: GenerateRun, models: Models, prompts: Sequence[Prompt], view: _View) -> int:
    from paceline.cli.running import make_engine, sampling_of
    from paceline.engine.request import check_prompt
    from paceline.evaluation.lossless import compare_ids
    from paceline.evaluation.prompts import encode_prompt
    from paceline.trace.writer import TraceWriter

    sampling = sampling_of(run, stop=run.stop, stop_token_ids=run.stop_token_ids)
    first_seed = sampling.seed if sampling.seed is not None else secrets.randbits(31)
    encoded = [encode_prompt(prompt, models.target.tokenizer, system=run.system, raw=run.raw) for prompt in prompts]
    longest = max(map(len, encoded))
    engine = make_engine(run, models, num_prompt_tokens=longest)
    plain_engine = make_engine(run, models, with_drafter=False, num_prompt_tokens=longest) if run.compare else None
    for ids in encoded:  # before the first answer: one bad prompt must not cost the answers to the others
        check_prompt(ids, vocab_size=models.target.contract.vocab_size, max_model_len=engine.max_model_len)
    outcomes: list[_Outcome] = []
    interrupted = False
    writer = TraceWriter(run.trace_file) if run.trace_file is not None else None
    try:
        if plain_engine is not None:
            _warm_up([engine, plain_engine], encoded[0], run)
        for index, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            if not sampling.is_greedy:  # prompt i draws with seed + i: repeatable, and no two share their noise
                sampling = replace(sampling, seed=(first_seed + index) % 2**63)
            if len(prompts) > 1 and not view.as_json:
                typer.echo(f"{'' if prompt is prompts[0] else chr(10)}--- {prompt.id}", err=True)
            result = _stream(engine, ids, sampling, write=not view.as_json)
            outcome = _Outcome(prompt, result, sampling.seed)
            outcomes.append(outcome)
            if writer is not None:
                writer.write(result.trace)
            if result.finish_reason == "error":
                raise NumericError(
                    f"prompt {prompt.id!r}: the target's logits held a NaN or an infinity after "
                    f"{len(result.token_ids)} tokens",
                    origin={"target": models.target.contract.origin},
                    hint="--dtype float32",
                )
            if result.finish_reason == "abort":
                interrupted = True
                break
            _show_result(outcome, models, view)
            if plain_engine is not None:
                outcome.plain = _stream(plain_engine, ids, sampling, write=False)
                if outcome.plain.finish_reason == "abort":
                    interrupted = True
                    break
                outcome.comparison = compare_ids(result.token_ids, outcome.plain.token_ids)
                _show_comparison(outcome, sampling, view)
    except KeyboardInterrupt:  # while warming up or between two prompts
        interrupted = True
    finally:
        if writer is not None:
            writer.close()
    if view.as_json:
        options.print_json(_as_json(run, models, outcomes))
    else:
        _show_summary(outcomes, view)
    if interrupted:
        typer.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    differs = any(outcome.comparison is not None and not outcome.comparison.is_identical for outcome in outcomes)
    return EXIT_CHECK_SAYS_NO if differs and sampling.is_greedy else 0


def _warm_up(engines: Sequence[Engine], ids: Sequence[int], run: GenerateRun) -> None:
    """A few tokens on each engine, so that neither of the two timings pays for first-use work."""
    from paceline.engine.request import SamplingParameters

    sampling = SamplingParameters(max_tokens=min(_NUM_WARM_UP_TOKENS, run.max_tokens), ignore_eos=True)
    for engine in engines:
        engine.generate([list(ids)], sampling)


def _stream(engine: Engine, ids: Sequence[int], sampling: SamplingParameters, *, write: bool) -> RequestResult:
    """Run one request to its end, or to Ctrl-C, which ends it with what came so far and finish reason `abort`."""
    request_id = engine.add_request(list(ids), sampling)
    wrote = ""
    try:
        while engine.has_unfinished():
            for delta in engine.step():
                if write and delta.text:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                    wrote = delta.text
    except KeyboardInterrupt:
        engine.abort(request_id)
    except BaseException:
        engine.abort(request_id)
        raise
    if write and not wrote.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return engine.result(request_id)


def _show_result(outcome: _Outcome, models: Models, view: _View) -> None:
    if view.trace and outcome.result.trace.records:
        from paceline.reporting.terminal import print_chips

        tokenizer = models.target.tokenizer
        print_chips(
            options.stderr_console(color=view.color),
            outcome.result.trace,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        )


def _show_comparison(outcome: _Outcome, sampling: SamplingParameters, view: _View) -> None:
    if view.as_json or outcome.comparison is None or outcome.plain is None:
        return
    if not sampling.is_greedy and not outcome.comparison.is_identical:
        typer.echo(
            f"identical: not expected at temperature {sampling.temperature:g}: equal distribution, not equal draws",
            err=True,
        )
        return
    typer.echo(f"identical: {outcome.comparison.describe()} ({outcome.comparison.num_compared} tokens)", err=True)


def _show_summary(outcomes: Sequence[_Outcome], view: _View) -> None:
    """Figures over all prompts: acceptance, speed and, with `--compare`, the ratio and the verdict."""
    from paceline.trace.acceptance import AcceptanceSummary

    results = [outcome.result for outcome in outcomes]
    if not results:
        return
    summary = AcceptanceSummary.from_steps(record for result in results for record in result.trace.records)
    num_tokens = sum(len(result.token_ids) for result in results)
    speed = _pooled_speed(results)
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
    speculative = _pooled_speed([outcome.result for outcome in compared])
    plain = _pooled_speed([outcome.plain for outcome in compared if outcome.plain is not None])
    if speculative is not None and plain is not None:
        typer.echo(
            f"speculative {speculative:.1f} tokens/s, plain {plain:.1f} tokens/s, ratio {speculative / plain:.2f}",
            err=True,
        )
    if len(compared) > 1:
        from paceline.evaluation.lossless import num_identical

        same = num_identical(outcome.comparison for outcome in compared if outcome.comparison is not None)
        typer.echo(f"identical: {same} of {len(compared)} prompts", err=True)


def _pooled_speed(results: Sequence[RequestResult]) -> float | None:
    """Tokens after the first per second of decoding, over several answers."""
    seconds = sum(result.trace.total_ms - result.trace.prefill_ms for result in results) / 1000.0
    num_tokens = sum(max(0, len(result.token_ids) - 1) for result in results)
    return num_tokens / seconds if num_tokens and seconds > 0 else None


def _as_json(run: GenerateRun, models: Models, outcomes: Sequence[_Outcome]) -> dict[str, object]:
    from paceline.trace.acceptance import AcceptanceSummary

    rows: list[dict[str, object]] = []
    for outcome in outcomes:
        result = outcome.result
        row: dict[str, object] = {
            "id": outcome.prompt.id,
            "num_prompt_tokens": len(result.prompt_ids),
            "seed": outcome.seed,
            "text": result.text,
            "token_ids": list(result.token_ids),
            "finish_reason": result.finish_reason,
            "stop_reason": result.stop_reason,
            "lossless": result.trace.lossless,
            "method": result.trace.method,
            "prefill_ms": result.trace.prefill_ms,
            "total_ms": result.trace.total_ms,
            "tokens_per_second": _pooled_speed([result]),
        }
        if models.drafter is not None:
            row["speculative_decoding"] = AcceptanceSummary.from_steps(result.trace.records).to_dict()
        if outcome.plain is not None and outcome.comparison is not None:
            ours, plain = _pooled_speed([result]), _pooled_speed([outcome.plain])
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
