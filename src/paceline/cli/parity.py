"""`paceline parity DRAFTER --target TARGET`: does training draft as serving does, and if not, where do they part?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options

if TYPE_CHECKING:
    from paceline.evaluation.prompts import Prompt
    from paceline.models.loading import LoadedTarget
    from paceline.training.parity_stages import KnownText, Parity

_NUM_PROMPTS = 4


def parity(
    context: typer.Context,
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Drafter folder or hub name.")],
    target: Annotated[
        str, typer.Option("--target", metavar="MODEL", help="Target: a folder, a .gguf file, a hub name or an alias.")
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Compare on the answer to this one question.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Compare on the answers to these; built-in ones by default."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of the file, or of the built-in ones.")] = (
        _NUM_PROMPTS
    ),
    num_anchors: Annotated[int, typer.Option(min=1, help="Blocks per answer, spread over it.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=4, help="Tokens of each answer.")] = 32,
    dtype: options.Dtype = None,
    device: options.Device = None,
    linear_mode: options.LinearMode = None,
    threads: options.Threads = None,
    offline: options.Offline = False,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Compare the trainer's features, scores and drafts with the serving engine's (exit code 3 where they differ)."""
    _, environment = options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    from paceline.checkpoint.locate import locate_drafter
    from paceline.configuration.generation import ModelRun
    from paceline.configuration.load import load_settings
    from paceline.errors import CheckFailedError
    from paceline.models.loading import load_drafter, load_target
    from paceline.training.parity import compare

    questions = _questions(prompt, prompts, num_prompts)
    options.set_threads(threads, environment)
    values = {"model": target, "dtype": dtype, "device": device, "linear_mode": linear_mode}
    run = load_settings(ModelRun, None, (), {**values, "offline": offline})
    served_by = load_target(
        run.model,
        dtype=run.dtype,
        device=run.device,
        linear_mode=run.linear_mode,
        takes_codes=False,
        offline=run.offline,
    )
    folder = locate_drafter(drafter, offline=offline)
    served = load_drafter(str(folder), served_by, check_fingerprint=False)
    found = compare(served_by, served, _texts(served_by, questions, max_tokens), num_anchors=num_anchors)
    difference = found.first_difference
    if as_json:
        shown = asdict(found)
        options.print_json({"drafter": drafter, "target": target, **shown, "agrees": difference is None})
    else:
        _print(found)
    if difference is not None:
        raise CheckFailedError(
            f"training and serving part at {difference.name}: {difference.cause} ({difference.note})",
            origin={"drafter": folder, "target": served_by.contract.origin},
            hint="`paceline check` of the drafter, if its config was edited; docs/training.md has a section on parity",
        )


def _questions(prompt: str | None, file: Path | None, limit: int) -> list[Prompt]:
    from paceline.errors import ConfigError
    from paceline.evaluation.own_text import own_questions
    from paceline.evaluation.prompts import read_prompts, single_prompt

    if prompt is not None and file is not None:
        raise ConfigError("--prompt and --prompts are both given", hint="one of them")
    if prompt is not None:
        return [single_prompt(prompt)]
    return own_questions()[:limit] if file is None else read_prompts(file, limit=limit)


def _texts(target: LoadedTarget, questions: list[Prompt], max_tokens: int) -> list[KnownText]:
    """The target's own greedy answers, without those that end at once."""
    from paceline.errors import DataError
    from paceline.evaluation.own_text import answered
    from paceline.training.parity_stages import KnownText

    texts = answered(target, questions, max_tokens=max_tokens)
    kept = [KnownText(text.ids, text.num_prompt_tokens) for text in texts if len(text.ids) > text.num_prompt_tokens + 1]
    if not kept:
        raise DataError(
            f"none of {len(questions)} prompts has an answer of two tokens or more to draft in",
            hint="another --prompt, or fewer tokens in it",
        )
    return kept


def _print(found: Parity) -> None:
    """The stages and the drafts of a block, on stdout."""
    width = max(len(stage.name) for stage in found.stages)
    for stage in found.stages:
        typer.echo(f"{stage.name:<{width}}  {'ok' if stage.ok else 'differs':<7}  {stage.note}")
    typer.echo("\ndraft  largest score difference  same id")
    for number, slot in enumerate(found.slots, start=1):
        typer.echo(f"{number:>5}  {slot.max_error:>24.2e}  {slot.num_equal}/{slot.num_blocks}")
    verdict = "agree" if found.first_difference is None else "do not agree"
    typer.echo(f"training and serving {verdict} on {found.num_texts} texts, in {found.dtype}")
