"""`paceline serve MODEL --draft-model DRAFTER`: the pair behind HTTP, with the routes of the OpenAI API.

The port is taken first, so that a mistake there costs no loading. The server answers from then on; until the model is
loaded and its canary has passed, `/health` says 503. Nothing is written to stdout.
"""

from __future__ import annotations

import math
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from paceline.cli.running import Models
    from paceline.configuration.environment import Environment
    from paceline.configuration.serving import ServeRun
    from paceline.engine.engine import Engine
    from paceline.serving.model import OpenModel, ServedModel

SERVER = "Server"


def serve(
    context: typer.Context,
    model: options.Target = None,
    draft_model: options.DraftModel = None,
    spec_tokens: options.SpecTokens = None,
    draft_sample_method: options.DraftSampleMethod = None,
    verify_method: options.VerifyMethod = None,
    draft_length: options.DraftLength = None,
    draft_vocab_size: options.DraftVocabSize = None,
    max_model_len: options.MaxModelLen = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    linear_mode: options.LinearMode = None,
    threads: options.Threads = None,
    offline: options.Offline = False,
    engine: Annotated[
        str | None, typer.Option(metavar="paceline|vllm", help="Who serves.", rich_help_panel=SERVER)
    ] = None,
    engine_command: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="vLLM's program; vllm.", rich_help_panel=SERVER)
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", rich_help_panel=SERVER)] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, 8000 by default; 0 takes any that is free.", rich_help_panel=SERVER)
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name that clients ask for.", rich_help_panel=SERVER)
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Clients need one of these; repeatable.", rich_help_panel=SERVER),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Web page that may ask; repeatable, * for all.", rich_help_panel=SERVER),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests that are decoded at the same time.", rich_help_panel=SERVER)
    ] = None,
    max_num_waiting: Annotated[
        int | None, typer.Option(help="Requests that may wait beyond those.", rich_help_panel=SERVER)
    ] = None,
    max_itl_ms: Annotated[
        float | None, typer.Option(help="Longest wait for a token because of prompts.", rich_help_panel=SERVER)
    ] = None,
    prefill_chunk_size: Annotated[
        int | None, typer.Option(help="Prompt tokens per pass of the target.", rich_help_panel=SERVER)
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the caches.", rich_help_panel=SERVER)] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option("--prefix-cache/--no-prefix-cache", help="Keep the keys of texts.", rich_help_panel=SERVER),
    ] = None,
    canary: Annotated[
        str | None, typer.Option(metavar="start|off", help="Check the drafter first.", rich_help_panel=SERVER)
    ] = None,
    stream_interval_s: Annotated[
        float | None,
        typer.Option(help="Least time between two chunks of a stream.", rich_help_panel=SERVER),
    ] = None,
    request_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds after which an answer ends.", rich_help_panel=SERVER)
    ] = None,
    shutdown_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds that answers get at the end.", rich_help_panel=SERVER)
    ] = None,
    max_body_mb: Annotated[
        int | None, typer.Option(help="Largest body of a request in MiB.", rich_help_panel=SERVER)
    ] = None,
    per_request_spec_decode_metrics: Annotated[
        str | None,
        typer.Option(metavar="none|summary|detailed", help="What answers tell of drafting.", rich_help_panel=SERVER),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(metavar="auto|none", help="Tell thoughts from what is said, or not.", rich_help_panel=SERVER),
    ] = None,
    generation_config: Annotated[
        str | None,
        typer.Option(metavar="auto|none", help="Sampling that the target's makers advise.", rich_help_panel=SERVER),
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
    """Serve a target, faster with a drafter, to clients of the OpenAI API.

    With --engine vllm the drafter is checked and vLLM is started; what follows -- is its own.
    """
    session, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.configuration.load import load_settings
    from paceline.configuration.serving import ServeRun

    flags = options.asked(context, ServeRun)
    if environment.api_key:
        flags.setdefault("api_keys", (environment.api_key,))
    run = load_settings(ServeRun, config, set_values or (), flags)
    if run.engine == "vllm":
        from paceline.cli.serve_vllm import serve_by_vllm

        serve_by_vllm(run, context.args, dry_run=dry_run, as_json=as_json)
        return
    if context.args:
        raise ConfigError(f"what is {' '.join(context.args)!r}?", hint="--engine vllm, which takes further arguments")
    if dry_run:
        hidden = run.model_copy(update={"api_keys": ("(set)",) * len(run.api_keys)})
        options.show_settings(hidden, as_json=as_json)
        return
    _require_extra()
    listening = listen(run.host, run.port)
    try:
        run_server(run, environment, listening, shows_requests=session.verbosity > 0)
    finally:
        listening.close()


def _require_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"a server needs the package {error.name}, which is not installed",
            hint='`pip install "paceline[serve]"`',
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """Take a port.

    Raises:
        ConfigError: it is taken, or the address is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(2048)
        except OSError:
            listening.close()
            raise
    except UnicodeError as error:  # a name that no name server can be asked for
        raise ConfigError(f"cannot listen on {host}: {error}", hint="another --host") from error
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}", hint="another --port, 0 for any"
        ) from error
    return listening


def run_server(
    run: ServeRun, environment: Environment, listening: socket.socket, *, shows_requests: bool = False
) -> None:
    """Serve until a signal ends it.

    Args:
        run: the settings.
        environment: what the process environment asks for.
        listening: the socket.
        shows_requests: log a line per request.
    Raises:
        PacelineError: the model cannot be loaded or served.
    """
    import uvicorn

    from paceline.log import get_logger
    from paceline.serving.app import create_app
    from paceline.serving.server import ServerOptions

    log = get_logger(__name__)
    host, port = listening.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    failures: list[BaseException] = []

    def say_ready() -> None:
        log.info("serving %s at http://%s:%d/v1", run.served_model_name or run.model, address, port)

    def give_up(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    app: FastAPI = create_app(
        opener(run, environment),
        ServerOptions(
            checks_at_start=run.canary == "start",
            api_keys=run.api_keys,
            max_body_bytes=run.max_body_mb * 2**20,
            metrics_level=run.per_request_spec_decode_metrics,
            stream_interval_s=run.stream_interval_s,
            request_timeout_s=run.request_timeout_s,
            allowed_origins=run.allowed_origins,
        ),
        on_ready=say_ready,
        on_failure=give_up,
    )
    _share_log(shows_requests=shows_requests)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=shows_requests,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(run.shutdown_timeout_s),
        )
    )
    server.run(sockets=[listening])
    if failures:
        raise failures[0]


def _share_log(*, shows_requests: bool) -> None:
    """Let uvicorn's messages go where ours do: its warnings, and with `-v` a line per request."""
    import logging

    from paceline.log import get_logger

    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = list(get_logger().handlers), False
        logger.setLevel(level)
    logging.getLogger("uvicorn.access").disabled = not shows_requests


def opener(run: ServeRun, environment: Environment) -> OpenModel:
    """What loads the models and makes the engine, on the engine's own thread."""

    def open_model() -> tuple[ServedModel, Engine]:
        from dataclasses import replace

        from paceline.cli.running import draft_settings_of, load_models
        from paceline.engine.engine import Engine

        models = load_models(run, environment)
        settings = replace(
            draft_settings_of(run, models.drafter),
            max_num_seqs=run.max_num_seqs,
            max_model_len=run.max_model_len,
            prefill_chunk_size=run.prefill_chunk_size,
            num_blocks=run.num_blocks,
            prefix_cache=run.prefix_cache,
            max_num_waiting=run.max_num_waiting,
            max_itl_ms=run.max_itl_ms,
        )
        engine = Engine(models.target, models.drafter, settings)
        return _served_model(run, models, engine), engine

    return open_model


def _served_model(run: ServeRun, models: Models, engine: Engine) -> ServedModel:
    from paceline.checkpoint.generation_defaults import SamplingDefaults, read_sampling_defaults
    from paceline.checkpoint.locate import locate_target
    from paceline.serving.model import ServedModel

    defaults = SamplingDefaults()
    if run.generation_config == "auto":
        defaults = read_sampling_defaults(locate_target(run.model, offline=run.offline))
    target, drafter = models.target, models.drafter
    return ServedModel(
        name=run.served_model_name or run.model,
        root=run.model,
        draft_name=run.draft_model,
        tokenizer=target.tokenizer,
        stop_token_ids=target.contract.stop_token_ids,
        vocab_size=target.contract.vocab_size,
        max_model_len=engine.max_model_len,
        num_draft_tokens=0 if drafter is None else drafter.num_draft_tokens,
        defaults=defaults,
        facts=_facts(run, models),
        tells_reasoning=run.reasoning_parser == "auto",
    )


def _facts(run: ServeRun, models: Models) -> dict[str, object]:
    """What `/server_info` tells: settings without secrets, the pair, and versions."""
    import platform

    import torch

    from paceline import __version__

    target = models.target
    facts: dict[str, object] = {
        "settings": run.model_dump(mode="json", exclude={"api_keys"}),
        "target": {
            "name": target.contract.name,
            "architecture": target.contract.architecture,
            "num_layers": target.contract.num_layers,
            "vocab_size": target.contract.vocab_size,
            "linear_mode": target.linear_mode,
            "dtype": str(target.model.norm.weight.dtype).removeprefix("torch."),
            "device": str(target.model.norm.weight.device),
        },
        "drafter": None,
        "versions": {"paceline": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    if models.drafter is not None:
        contract = models.drafter.contract
        facts["drafter"] = {
            "family": contract.family,
            "layout": contract.layout,
            "block_size": contract.block_size,
            "num_draft_tokens": models.drafter.num_draft_tokens,
            "target_layer_ids": list(contract.target_layer_ids),
            "aux_hidden_stream": contract.aux_hidden_stream,
            "mask_token_id": contract.mask_token_id,
        }
    return facts
