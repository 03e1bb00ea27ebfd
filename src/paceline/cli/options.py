"""Flags that several verbs share, and what every verb does first: colours, log level, threads.

Only Typer is imported at the top of a file in this package, so that `--help` answers at once; what a verb needs is
imported inside its function.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from paceline.configuration.environment import Environment

MODELS, SAMPLING, STRUCTURE = "Models", "Sampling", "Structured output"
OUTPUT, SETTINGS = "Output", "Settings"

Target = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="Target: a folder, a .gguf file, a hub name or an alias.")
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        "--draft-model", "--spec-model", metavar="DRAFTER", help="Drafter folder or hub name.", rich_help_panel=MODELS
    ),
]
SpecTokens = Annotated[
    int | None,
    typer.Option(
        "--spec-tokens",
        "--num-speculative-tokens",
        help="Proposals per step, anchor not counted.",
        rich_help_panel=MODELS,
    ),
]
DraftSampleMethod = Annotated[
    str | None,
    typer.Option(metavar="greedy|probabilistic", help="How proposals are picked.", rich_help_panel=MODELS),
]
VerifyMethod = Annotated[
    str | None,
    typer.Option(
        metavar="standard|block|match|coupled", help="How drafts are judged; all are lossless.", rich_help_panel=MODELS
    ),
]
DraftLength = Annotated[
    str | None,
    typer.Option(
        metavar="off|fixed|adaptive", help="Drafts per step: none, all, or as many as pay.", rich_help_panel=MODELS
    ),
]


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


DraftVocabSize = Annotated[
    str | None,
    typer.Option(
        parser=_number_or_word,
        metavar="N|auto|full",
        help="Draft from the N most frequent ids; the output is the same.",
        rich_help_panel=MODELS,
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Largest context in tokens.", rich_help_panel=MODELS)]
Dtype = Annotated[
    str | None, typer.Option(metavar="auto|float32|bfloat16|float16", help="Precision.", rich_help_panel=MODELS)
]
Device = Annotated[str | None, typer.Option(metavar="auto|cpu|cuda[:N]", help="Where to run.", rich_help_panel=MODELS)]
LinearMode = Annotated[
    str | None,
    typer.Option(
        metavar="auto|plain|packed|native|quantized|int8|row_invariant|fused",
        help="Arithmetic of matrix products; row_invariant makes ids independent of the batch.",
        rich_help_panel=MODELS,
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.", rich_help_panel=MODELS)]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network.", rich_help_panel=MODELS)]

MaxTokens = Annotated[
    int | None, typer.Option(help="Largest number of new tokens; 128 by default.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[float | None, typer.Option(help="0, the default, is greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=SAMPLING)]
TopP = Annotated[float | None, typer.Option(help="Keep this share of probability.", rich_help_panel=SAMPLING)]
MinP = Annotated[
    float | None, typer.Option(help="Drop tokens below this share of the likeliest.", rich_help_panel=SAMPLING)
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=SAMPLING)]
MinTokens = Annotated[
    int | None, typer.Option(help="The first so many tokens cannot end the text.", rich_help_panel=SAMPLING)
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1: tokens of prompt and text become less likely.", rich_help_panel=SAMPLING),
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Subtracted for each time that a token occurred.", rich_help_panel=SAMPLING)
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Subtracted from tokens that occurred.", rich_help_panel=SAMPLING)
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past end-of-text tokens.", rich_help_panel=SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Add to the logit of a token id; repeatable.", rich_help_panel=SAMPLING),
]
AllowedTokenId = Annotated[
    list[int] | None, typer.Option(help="Choose among these token ids alone; repeatable.", rich_help_panel=SAMPLING)
]
BadWord = Annotated[
    list[str] | None, typer.Option(help="Never complete this text; repeatable.", rich_help_panel=SAMPLING)
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End the text before this string; repeatable.", rich_help_panel=SAMPLING)
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(help="End the text at this token; repeatable.", rich_help_panel=SAMPLING)
]

System = Annotated[str | None, typer.Option(help="System message.", rich_help_panel=SETTINGS)]
Raw = Annotated[
    bool, typer.Option("--raw", help="Take prompts as they are, no chat template.", rich_help_panel=SETTINGS)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="TOML or YAML file of settings.", rich_help_panel=SETTINGS),
]
SetValues = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting; repeatable.", rich_help_panel=SETTINGS),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Show the resolved settings; load and write nothing.", rich_help_panel=SETTINGS),
]

TraceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Append a record of every step to this .jsonl file, one answer a line.",
        rich_help_panel=OUTPUT,
    ),
]
TraceDetails = Annotated[
    bool,
    typer.Option(
        "--trace-details",
        help="Records hold probabilities and times as well; steps take longer.",
        rich_help_panel=OUTPUT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=OUTPUT)]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours (as NO_COLOR).", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.", rich_help_panel=OUTPUT)]
Verbose = Annotated[int, typer.Option("-v", "--verbose", count=True, help="Say more.", rich_help_panel=OUTPUT)]
Quiet = Annotated[int, typer.Option("-q", "--quiet", count=True, help="Say less.", rich_help_panel=OUTPUT)]


@dataclass
class Session:
    """How this invocation talks to its user; made before the verb runs, filled in by `begin`."""

    debug: bool = False
    color: bool = True
    verbosity: int = 0


def begin(
    context: typer.Context, *, debug: bool = False, no_color: bool = False, verbose: int = 0, quiet: int = 0
) -> tuple[Session, Environment]:
    """Set up the log and remember how to report errors. The first line of every verb.

    Returns:
        The session, and what the environment asks for.

    Raises:
        ConfigError: an environment variable has a value that it cannot have.
    """
    from paceline.configuration.environment import read_environment
    from paceline.log import configure_logging

    session = context.find_root().obj
    if not isinstance(session, Session):
        session = context.find_root().obj = Session()
    session.debug = debug
    environment = read_environment()
    session.debug = debug or environment.debug
    session.color = not (no_color or environment.no_color)
    session.verbosity = verbose - quiet
    configure_logging(verbosity=session.verbosity, default_level=environment.log_level, color=session.color)
    return session, environment


def set_threads(asked: int | None, environment: Environment) -> None:
    """Fix torch's CPU threads where a flag or PACELINE_NUM_THREADS asks for a number."""
    number = asked if asked is not None else environment.num_threads
    if number is not None:
        import torch

        torch.set_num_threads(number)


def stderr_console(*, color: bool) -> Console:
    """Where traces and tables go. Without colour there are no escapes at all, not even for bold."""
    from rich.console import Console

    return Console(stderr=True, color_system="auto" if color else None, highlight=False)


def asked(context: typer.Context, settings: type[BaseModel]) -> dict[str, object]:
    """What the command line gave, by the names of settings; what it left out is not there.

    A flag fills the setting of its own name. One that may be repeated is named for one value, and its setting for all:
    `--stop-token-id` fills `stop_token_ids`.

    Raises:
        ConfigError: a flag is not of the form that it must have.
    """
    found: dict[str, object] = {}
    for name in settings.model_fields:
        for flag in dict.fromkeys((name, name.removesuffix("s"))):
            source = context.get_parameter_source(flag)
            if source is not None and source.name != "DEFAULT":
                found[name] = _as_in_a_file(context.params[flag])
    biases = context.params.get("logit_bias")
    if biases:
        found["logit_bias"] = parse_biases(biases)
    return found


def _as_in_a_file(value: object) -> object:
    """A flag's value as a file of settings has it, which knows neither lists of flags nor paths."""
    if isinstance(value, (list, tuple)):
        return tuple(_as_in_a_file(one) for one in value)
    if isinstance(value, Path):
        return str(value)
    return value


def parse_biases(texts: Sequence[str]) -> dict[str, float]:
    """`ID=BIAS` flags as a table.

    Raises:
        ConfigError: a flag of another form, or an id given twice.
    """
    biases: dict[str, float] = {}
    for text in texts:
        token, separator, bias = text.partition("=")
        try:
            value = float(bias)
        except ValueError:
            separator = ""
            value = 0.0
        if not separator or not token.strip().isdigit():
            raise ConfigError(f"--logit-bias {text!r} is not of the form ID=BIAS", hint="--logit-bias 42=-5")
        if token.strip() in biases:
            raise ConfigError(f"--logit-bias names token {token.strip()} twice")
        biases[token.strip()] = value
    return biases


def show_settings(settings: BaseModel, *, as_json: bool, extra: Mapping[str, object] | None = None) -> None:
    """Print resolved settings to stdout, as TOML or as one JSON object, with what a dry run found out beside them."""
    if as_json:
        print_json({"settings": settings.model_dump(mode="json"), **(extra or {})})
        return
    from paceline.configuration.load import to_toml

    typer.echo(to_toml(settings), nl=False)
    for key, value in (extra or {}).items():
        typer.echo(f"{key}: {value}", err=True)


def print_json(value: object) -> None:
    """One JSON object on stdout, as the only thing there, and in full or not at all.

    Where stdout cannot carry a character, such as on a console of another code page, all are escaped as JSON does.
    """
    text = json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=2, allow_nan=False)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
