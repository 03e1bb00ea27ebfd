"""`paceline generate MODEL --draft-model DRAFTER`: text, with proof on request that it is the target's own.

The text streams to stdout; the trace, figures and verdict go to stderr. With `--compare`, plain decoding of the same
target answers the same prompts, and greedy ids that differ end in exit code 3.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.errors import (
    EXIT_CHECK_SAYS_NO,
    EXIT_INTERRUPTED,
    ConfigError,
    DataError,
    NumericError,
    PacelineError,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cli.generate_report import Outcome, View
    from paceline.cli.running import Models
    from paceline.configuration.generation import GenerateRun
    from paceline.engine.engine import Engine
    from paceline.engine.request import RequestResult, SamplingParameters
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
    verify_method: options.VerifyMethod = None,
    draft_length: options.DraftLength = None,
    draft_vocab_size: options.DraftVocabSize = None,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    logit_bias: options.LogitBias = None,
    allowed_token_id: options.AllowedTokenId = None,
    bad_word: options.BadWord = None,
    n: Annotated[
        int | None, typer.Option("--n", "-n", help="Samples of each prompt.", rich_help_panel=options.SAMPLING)
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="JSON|@FILE", help="The text is JSON of this schema.", rich_help_panel=options.STRUCTURE),
    ] = None,
    json_object: Annotated[
        bool, typer.Option("--json-object", help="The text is a JSON object.", rich_help_panel=options.STRUCTURE)
    ] = False,
    regex: Annotated[
        str | None,
        typer.Option(help="The text matches this regular expression.", rich_help_panel=options.STRUCTURE),
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="The text is one of these; repeatable.", rich_help_panel=options.STRUCTURE),
    ] = None,
    grammar: Annotated[
        str | None,
        typer.Option(
            metavar="LARK|@FILE", help="The text follows this Lark grammar.", rich_help_panel=options.STRUCTURE
        ),
    ] = None,
    structure_begins_after: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The structure begins after this text.", rich_help_panel=options.STRUCTURE),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --json: log-probabilities, and those of the N likeliest beside it.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    logprobs_mode: Annotated[
        str | None,
        typer.Option(
            metavar="raw|processed", help="Of the model, or of what was sampled from.", rich_help_panel=options.OUTPUT
        ),
    ] = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    include_stop_str_in_output: Annotated[
        bool,
        typer.Option(
            "--include-stop-str-in-output", help="Keep the stop string in the text.", rich_help_panel=options.SAMPLING
        ),
    ] = False,
    ignore_eos: options.IgnoreEos = False,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    linear_mode: options.LinearMode = None,
    threads: options.Threads = None,
    offline: options.Offline = False,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size",
            "--tp",
            help="Processes that share each layer; under torchrun.",
            rich_help_panel=options.MODELS,
        ),
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--pipeline-parallel-size",
            "--pp",
            help="Stages of the layers; under torchrun.",
            rich_help_panel=options.MODELS,
        ),
    ] = None,
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
    """Generate text, faster with a drafter, and show what it accepted."""
    session, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.configuration.generation import GenerateRun
    from paceline.configuration.load import load_settings

    run = load_settings(GenerateRun, config, set_values or (), options.asked(context, GenerateRun))
    is_spread = run.tensor_parallel_size * run.pipeline_parallel_size > 1
    if is_spread and (STDIN in (prompt or []) or not (prompt or prompt_file)):
        raise ConfigError("several processes cannot share stdin", hint="--prompt TEXT or --prompt-file FILE")
    prompts = gather_prompts(prompt or [], prompt_file)
    if dry_run:
        options.show_settings(run, as_json=as_json, extra={"num_prompts": len(prompts)})
        return
    if is_spread:
        from paceline.cli.generate_ranks import generate_over_ranks

        generate_over_ranks(run, prompts, environment, session, as_json=as_json)
        return
    _refuse_copies()
    from paceline.cli.generate_report import View
    from paceline.cli.running import load_models

    models = load_models(run, environment)
    shows_trace = run.trace if run.trace is not None else sys.stderr.isatty() and session.verbosity >= 0
    view = View(as_json=as_json, trace=shows_trace and not as_json, color=session.color)
    raise typer.Exit(_run_all(run, models, prompts, view, [prompt_file] if prompt_file is not None else []))


def _refuse_copies() -> None:
    """Processes that torchrun started, and that share nothing, would all answer the same.

    Raises:
        ConfigError: this is not the first of them.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_torchelastic_launched() and dist.get_node_local_rank() > 0:
        raise ConfigError(
            "torchrun started several processes, and nothing says how they share the target",
            hint="--tensor-parallel-size or --pipeline-parallel-size, or `paceline generate` without torchrun",
        )


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
        return sys.stdin.read().removeprefix("\ufeff").rstrip("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt on stdin is not {error.encoding}: {error.reason}", hint="text in UTF-8") from error


def _run_all(
    run: GenerateRun, models: Models, prompts: Sequence[Prompt], view: View, prompt_files: Sequence[Path] = ()
) -> int:
    from paceline.cli import generate_report as report
    from paceline.cli.running import answer_sampling_of, make_engine
    from paceline.cli.trace_file import TraceFile
    from paceline.engine.request import check_prompt
    from paceline.evaluation.lossless import compare_ids
    from paceline.evaluation.prompts import encode_prompt
    from paceline.log import get_logger

    sampling = answer_sampling_of(run)
    if run.logprobs is not None and not view.as_json:
        get_logger(__name__).warning("logprobs are shown with --json alone: logprobs changes nothing")
    if run.trace and view.as_json:
        get_logger(__name__).warning("the trace is not shown beside --json: trace changes nothing")
    first_seed = sampling.seed if sampling.seed is not None else secrets.randbits(31)
    encoded = [encode_prompt(prompt, models.target.tokenizer, system=run.system, raw=run.raw) for prompt in prompts]
    longest = max(map(len, encoded))
    engine = make_engine(run, models, num_prompt_tokens=longest)
    plain_engine = make_engine(run, models, with_drafter=False, num_prompt_tokens=longest) if run.compare else None
    for ids in encoded:  # before the first answer: one bad prompt must not cost the answers to the others
        check_prompt(ids, vocab_size=models.target.contract.vocab_size, max_model_len=engine.max_model_len)
    jobs = [(prompt, ids, sample) for prompt, ids in zip(prompts, encoded, strict=True) for sample in range(run.n)]
    sampling = replace(sampling, n=1)
    outcomes: list[report.Outcome] = []
    interrupted, failure = False, None
    writer = None if run.trace_file is None else TraceFile(run.trace_file, run, models, prompt_files)
    try:
        if plain_engine is not None:
            _warm_up([engine, plain_engine], encoded[0], run)
        for index, (prompt, ids, sample_index) in enumerate(jobs):
            if not sampling.is_greedy:  # answer i draws with seed + i: repeatable, and no two share their noise
                sampling = replace(sampling, seed=(first_seed + index) % 2**63)
            if len(jobs) > 1 and not view.as_json:
                sample = f", sample {sample_index}" if run.n > 1 else ""
                typer.echo(f"{chr(10) if index else ''}--- {prompt.id}{sample}", err=True)
            result = _stream(engine, ids, sampling, write=not view.as_json)
            outcome = report.Outcome(prompt, result, sampling.seed, sample_index)
            outcomes.append(outcome)
            if writer is not None:
                writer.write(result, prompt, sample_index=sample_index, seed=sampling.seed)
            if result.finish_reason == "error":
                failure = _failure(outcome, models)
                break
            if result.finish_reason == "abort":
                interrupted = True
                break
            report.show_result(outcome, models, view)
            if plain_engine is not None:
                outcome.plain = _stream(plain_engine, ids, sampling, write=False)
                if writer is not None:  # what the others' times are held against
                    writer.write(outcome.plain, prompt, sample_index=sample_index, seed=sampling.seed)
                if outcome.plain.finish_reason == "abort":
                    interrupted = True
                    break
                outcome.comparison = compare_ids(result.token_ids, outcome.plain.token_ids)
                report.show_comparison(outcome, sampling, view)
    except KeyboardInterrupt:  # while warming up or between two prompts
        interrupted = True
    finally:
        if writer is not None:
            writer.close()
    if view.as_json:
        options.print_json(report.as_json_object(run, models, outcomes))
    else:
        report.show_summary(outcomes, view)
    if failure is not None:  # raised behind the answers that came before, which it must not cost
        raise failure
    if interrupted:
        typer.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    differs = any(
        report.is_repeatable(sampling, outcome.result) and not outcome.comparison.is_identical
        for outcome in outcomes
        if outcome.comparison is not None
    )
    return EXIT_CHECK_SAYS_NO if differs else 0


def _failure(outcome: Outcome, models: Models) -> PacelineError:
    """What to raise for an answer that ended with an error: numbers are the models' fault, rules the caller's."""
    result = outcome.result
    message = f"prompt {outcome.prompt.id!r}, after {len(result.token_ids)} tokens: {result.error}"
    if result.has_dead_end:
        return RequestError(message)
    return NumericError(message, origin={"target": models.target.contract.origin}, hint="--dtype float32")


def _warm_up(engines: Sequence[Engine], ids: Sequence[int], run: GenerateRun) -> None:
    """A few tokens on each engine, so that neither of the two timings pays for first-use work."""
    from paceline.engine.request import SamplingParameters

    sampling = SamplingParameters(max_tokens=min(_NUM_WARM_UP_TOKENS, run.max_tokens), ignore_eos=True)
    for engine in engines:
        engine.generate([list(ids)], sampling)


def _stream(engine: Engine, ids: Sequence[int], sampling: SamplingParameters, *, write: bool) -> RequestResult:
    """Run one request to its end, or to Ctrl-C, which ends it with what came so far and finish reason `abort`."""
    request_id = engine.add_request(list(ids), sampling)
    num_written = 0
    try:
        while engine.has_unfinished():
            for delta in engine.step():
                if write and delta.text:
                    num_written += len(delta.text)
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        engine.abort(request_id)
    except BaseException:
        engine.abort(request_id)
        raise
    result = engine.result(request_id)
    if write:  # the end of an answer that was interrupted may not have come in a delta
        sys.stdout.write(result.text[num_written:] + ("" if result.text.endswith("\n") else "\n"))
        sys.stdout.flush()
    return result
