"""The recipes say how their data are made, and keep evaluation prompts out of it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paceline.configuration.load import load_settings
from paceline.configuration.run import TrainRun

EXAMPLES = Path(__file__).parents[3] / "examples"
FAMILIES = ("dflash", "dflash2", "dspark", "eagle3")
RECIPES = [*(f"train_smollm2_{family}.toml" for family in FAMILIES), "train_8b_24gb.toml"]


def commands(recipe: str) -> list[list[str]]:
    """What the head of a recipe tells its reader to type."""
    lines = (EXAMPLES / recipe).read_text(encoding="utf-8").splitlines()
    typed = [line.removeprefix("#").strip() for line in lines if line.startswith("#   ")]
    return [shlex.split(line) for line in typed]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_command_that_makes_data_excludes_evaluation_prompts(recipe: str) -> None:
    makes_data = [words for words in commands(recipe) if words[1] == "capture" or "examples.make_prompts" in words]
    assert makes_data, "a recipe says where its data come from"
    for words in makes_data:
        assert "--exclude" in words and words[words.index("--exclude") + 1].endswith(".jsonl"), words


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_commands_make_the_files_that_the_recipe_reads_and_train_it(recipe: str) -> None:
    run = load_settings(TrainRun, EXAMPLES / recipe, [])
    made = [words[4] for words in commands(recipe) if words[1:3] == ["capture", "prompts"]]
    assert made == list(map(str, run.data.files))
    assert all(words[3] == run.target.name for words in commands(recipe) if words[1:3] == ["capture", "prompts"])
    assert ["paceline", "train", f"examples/{recipe}"] in commands(recipe)


def test_there_is_a_recipe_for_each_family() -> None:
    assert [load_settings(TrainRun, EXAMPLES / name, []).drafter.family for name in RECIPES[:4]] == list(FAMILIES)
