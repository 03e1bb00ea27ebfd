"""`paceline bench MODEL --draft-model DRAFTER`, `paceline bench --base-url URL --base-url URL`: set-ups side by side.

Set-ups answer the same prompts, in an order that reverses from round to round. What was measured is told and saved even
where the measurement was cut short.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.errors import EXIT_INTERRUPTED, CheckFailedError, ConfigError, MissingExtraError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.benching.measuring import Plan, Watcher
    from paceline.benching.records import Pass
    from paceline.cli.bench_setups import OpenSetUps
    from paceline.configuration.bench import BenchRun
    from paceline.evaluation.prompts import Prompt

LOAD, SERVERS = "Load", "Servers"


def bench(
    context: typer.Context,
    model: options.Target = None,
    model_name: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="MODEL as a flag.", rich_help_panel=options.MODELS)
    ] = None,
    draft_model: Annotated[
        list[str] | None,
        typer.Option(
            "--draft-model",
            "--spec-model",
            metavar="DRAFTER",
            help="Drafter folder or hub name; twice compares two.",
            rich_help_panel=options.MODELS,
        ),
    ] = None,
    spec_tokens: options.SpecTokens = None,
    draft_sample_method: options.DraftSampleMethod = None,
    verify_method: options.VerifyMethod = None,
    draft_length: options.DraftLength = None,
    draft_vocab_size: options.DraftVocabSize = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Slots of each engine.", rich_help_panel=options.MODELS)
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache", help="Keep the keys of texts.", rich_help_panel=options.MODELS
        ),
    ] = None,
    canary: Annotated[
        str | None,
        typer.Option(metavar="start|off", help="Check the drafters first.", rich_help_panel=options.MODELS),
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    linear_mode: options.LinearMode = None,
    threads: options.Threads = None,
    offline: options.Offline = False,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL", help="A server of the OpenAI API to measure; repeatable.", rich_help_panel=SERVERS
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="auto|chat|completions", help="How servers are asked.", rich_help_panel=SERVERS),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="Key for the servers.", rich_help_panel=SERVERS)
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Further fields of every request.", rich_help_panel=SERVERS),
    ] = None,
    request_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds after which an answer has failed.", rich_help_panel=SERVERS)
    ] = None,
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            "--dataset-path",
            "--prompts",
            metavar="FILE",
            help="Prompts: .jsonl, .npz (held-out end) or text; a shipped set by default.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests per pass; each prompt once by default.", rich_help_panel=LOAD)
    ] = None,
    concurrency: Annotated[
        list[str] | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            metavar="N[,N...]",
            help="Requests in flight, 1 by default; repeatable.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Requests that arrive per second: an open loop.", rich_help_panel=LOAD)
    ] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Of arrivals: 1 is Poisson, less is burstier.", rich_help_panel=LOAD)
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Passes of each set-up, there and back; 2 by default.", rich_help_panel=LOAD)
    ] = None,
    num_warmups: Annotated[
        int | None, typer.Option(help="Requests before that do not count; a pass by default.", rich_help_panel=LOAD)
    ] = None,
    system: options.System = None,
    raw: options.Raw = False,
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
    percentile_metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="ttft,tpot,itl,e2el", help="Latencies to show.", rich_help_panel=options.OUTPUT),
    ] = None,
    metric_percentiles: Annotated[
        list[str] | None,
        typer.Option(metavar="P[,P...]", help="Percentiles to show; 99 by default.", rich_help_panel=options.OUTPUT),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS[,...]",
            help="Count requests within these limits, as ttft:200,tpot:50; repeatable.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Say this in the result; repeatable.", rich_help_panel=options.OUTPUT),
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write the result as a JSON file.", rich_help_panel=options.OUTPUT)
    ] = False,
    result_dir: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write it there.", rich_help_panel=options.OUTPUT)
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
    """Compare set-ups on the same prompts: plain decoding and drafters, or servers, with latencies and intervals."""
    session, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.cli import bench_flags
    from paceline.configuration.bench import BenchRun
    from paceline.configuration.load import load_settings

    drafters = bench_flags.at_most_two(draft_model)
    flags = {
        **options.asked(context, BenchRun),
        "model": bench_flags.one_model(model, model_name),
        "draft_model": drafters[0],
        "other_draft_model": drafters[1],
        "extra_body": bench_flags.json_object("--extra-body", extra_body),
        "concurrency": bench_flags.whole_numbers("--concurrency", concurrency),
        "percentile_metrics": bench_flags.parts(percentile_metrics),
        "metric_percentiles": bench_flags.numbers("--metric-percentiles", metric_percentiles),
        "goodput": bench_flags.limits(goodput),
        "metadata": bench_flags.pairs("--metadata", metadata),
    }
    run = load_settings(BenchRun, config, set_values or (), flags)
    path, prompts = read_questions(run)
    plan = plan_of(run, prompts)
    if dry_run:
        hidden = run.model_copy(update={"api_key": "(set)"}) if run.api_key is not None else run
        num_requests = plan.num_requests(len(run.setup_names))
        extra = {"prompts": str(path), "setups": list(run.setup_names), "num_requests": num_requests}
        options.show_settings(hidden, as_json=as_json, extra=extra)
        return
    from paceline.cli.bench_report import Report

    report = Report(run, path, prompts, session, as_json=as_json)
    report.check_folder()
    way: OpenSetUps
    if run.base_urls:
        _require_client()
        from paceline.cli.bench_setups import open_servers

        way = open_servers(run, environment, prompts)
    else:
        from paceline.cli.bench_setups import load_engines

        engines = load_engines(run, environment, prompts)
        way, plan = engines, plan_of(run, engines.prompts)
    passes: list[Pass] = []
    ended = run_plan(way, plan, passes, report.watcher(plan, len(run.setup_names)))
    report.finish(passes, way, ended)
    if isinstance(ended, KeyboardInterrupt):
        raise typer.Exit(EXIT_INTERRUPTED)
    if ended is not None:
        raise ended
    if report.has_broken_promise:
        raise CheckFailedError(
            "greedy answers differ from plain decoding's in an arithmetic that promises they are the same",
            hint="`paceline check DRAFTER --target MODEL`; the figures above are those of a faulty engine",
        )


def run_plan(way: OpenSetUps, plan: Plan, passes: list[Pass], watcher: Watcher) -> BaseException | None:
    """Measure.

    Args:
        way: opens the set-ups.
        plan: what is run.
        passes: grows as it goes.
        watcher: who is told.

    Returns:
        What cut it short after something was measured; None where nothing did.

    Raises:
        PacelineError: before anything was measured; and so does an interruption.
    """

    async def measure_all() -> None:
        from paceline.benching.measuring import measure

        async with way.opened() as setups:
            await measure(setups, plan, passes, watcher)

    try:
        asyncio.run(measure_all())
    except (KeyboardInterrupt, PacelineError) as error:
        if not any(each.records for each in passes):
            raise
        return error
    return None


def read_questions(run: BenchRun) -> tuple[Path, list[Prompt]]:
    """The prompt file and its prompts, as many as there are or are wanted.

    Raises:
        DataError: the file cannot be read or used.
    """
    from paceline.benching.shipped import shipped_prompts
    from paceline.cli.prompt_files import read_unlearnt_prompts

    path = run.dataset_path or shipped_prompts()
    drafters = [drafter for drafter in (run.draft_model, run.other_draft_model) if drafter is not None]
    prompts = read_unlearnt_prompts(path, drafters, limit=run.num_prompts)
    if run.raw and any(prompt.messages for prompt in prompts):
        raise ConfigError(f"raw is set, but {path} holds chats", hint="prompts of one turn, or no --raw")
    return path, prompts


def plan_of(run: BenchRun, prompts: Sequence[Prompt]) -> Plan:
    """What is run: the prompts, again from the first where more are wanted than there are, at every load."""
    import itertools

    from paceline.benching.measuring import Plan
    from paceline.benching.records import Load, Question

    num_questions = run.num_prompts or len(prompts)
    asked = itertools.islice(itertools.cycle(prompts), num_questions)
    limits: tuple[int | None, ...] = run.concurrency or ((None,) if run.request_rate is not None else (1,))
    return Plan(
        questions=[
            Question(index, prompt, None if run.seed is None else (run.seed + index) % 2**63)
            for index, prompt in enumerate(asked)
        ],
        loads=[Load(limit, run.request_rate, run.burstiness) for limit in limits],
        num_rounds=run.rounds,
        num_warm_ups=run.num_warmups,
        seed=run.seed or 0,
    )


def _require_client() -> None:
    try:
        import httpx2  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"servers are asked with the package {error.name}, which is not installed",
            hint='`pip install "paceline[bench]"`',
        ) from error
