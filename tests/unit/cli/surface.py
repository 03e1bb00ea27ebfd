"""The command-line surface as text: every verb with its flags. `python -m tests.unit.cli.surface` freezes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from paceline.cli.main import app

FROZEN = Path(__file__).with_name("surface.txt")


def current_surface() -> str:
    """One line per parameter: verb, names of the flag, whether it is a switch or may be repeated."""
    group: Any = typer.main.get_command(app)
    lines = [_line("paceline", parameter) for parameter in group.params]
    for name, verb in group.commands.items():
        inner = getattr(verb, "commands", {"": verb})  # a verb with verbs of its own
        lines += [_line(f"{name} {sub}".strip(), parameter) for sub, v in inner.items() for parameter in v.params]
    return "\n".join(lines) + "\n"


def _line(verb: str, parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"{verb} {parameter.metavar or parameter.name}{'' if parameter.required else ' (optional)'}"
    names = "/".join([*parameter.opts, *parameter.secondary_opts])
    marks = [mark for mark in ("is_flag", "multiple", "count") if getattr(parameter, mark, False)]
    return " ".join([verb, names, *marks])


if __name__ == "__main__":
    FROZEN.write_text(current_surface(), encoding="utf-8")
