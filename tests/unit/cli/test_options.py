"""Flags become settings by their names: none may be forgotten, and what was not given leaves a file's value alone."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from pydantic import BaseModel

from paceline.cli import options
from paceline.cli.main import app
from paceline.configuration.bench import BenchRun
from paceline.configuration.capture import CapturePromptsRun
from paceline.configuration.chat import ChatRun
from paceline.configuration.generation import EvaluateRun, GenerateRun
from paceline.configuration.load import load_settings
from paceline.configuration.serving import ServeRun
from paceline.errors import ConfigError

TALK = {"as_json", "config", "set_values", "dry_run", "no_color", "debug", "verbose", "quiet"}
VERBS: list[tuple[str, type[BaseModel], set[str]]] = [
    ("generate", GenerateRun, {"prompt", "prompt_file"}),
    ("chat", ChatRun, set()),
    ("serve", ServeRun, set()),
    ("evaluate", EvaluateRun, {"output", "calibrate"}),
    ("bench", BenchRun, {"model_name"}),
    ("capture prompts", CapturePromptsRun, {"workers"}),
]


def verb(name: str) -> Any:
    command: Any = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]
    return command


def asked(name: str, settings: type[BaseModel], *arguments: str) -> dict[str, object]:
    return options.asked(verb(name).make_context(name, list(arguments)), settings)


@pytest.mark.parametrize(("name", "settings", "others"), VERBS)
def test_every_flag_fills_a_setting_or_is_known_not_to(name: str, settings: type[BaseModel], others: set[str]) -> None:
    flags = {parameter.name for parameter in verb(name).params}
    filled = {flag for flag in flags if flag in settings.model_fields or f"{flag}s" in settings.model_fields}
    assert flags - filled == others | TALK


@pytest.mark.parametrize(("name", "settings", "others"), VERBS)
def test_what_was_not_given_is_not_there(name: str, settings: type[BaseModel], others: set[str]) -> None:
    needed = ("target", "folder") if name == "capture prompts" else ()
    expected = {"model": "target", "output": "folder"} if needed else {}
    assert asked(name, settings, *needed) == expected


def test_what_was_given_is_there_as_a_file_would_have_it() -> None:
    given = [
        "m",
        "--raw",
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-id",
        "3",
        "--bad-word",
        "x",
        "--temperature",
        "0",
    ]
    given += ["--logit-bias", "4=-2", "--draft-vocab-size", "500", "--trace-file", "t.jsonl", "--n", "2", "--no-trace"]
    assert asked("generate", GenerateRun, *given) == {
        "model": "m",
        "raw": True,
        "stop": ("a", "b"),
        "stop_token_ids": (3,),
        "bad_words": ("x",),
        "temperature": 0.0,
        "logit_bias": {"4": -2.0},
        "draft_vocab_size": 500,
        "trace_file": "t.jsonl",
        "n": 2,
        "trace": False,
    }
    assert asked("generate", GenerateRun, "--draft-vocab-size", "full") == {"draft_vocab_size": "full"}
    assert asked("serve", ServeRun, "--no-prefix-cache", "--api-key", "k") == {
        "prefix_cache": False,
        "api_keys": ("k",),
    }
    assert asked("evaluate", EvaluateRun, "--prompts", "a.txt") == {"prompts": ("a.txt",)}


def test_a_bias_of_another_form() -> None:
    with pytest.raises(ConfigError, match="not of the form ID=BIAS"):
        asked("generate", GenerateRun, "--logit-bias", "4:2")


def test_no_more_threads_than_torch_can_start() -> None:
    with pytest.raises(ConfigError, match="threads: input should be less than or equal to 4096"):
        load_settings(GenerateRun, None, (), {"model": "m", "threads": 100_000})
