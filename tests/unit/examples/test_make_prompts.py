"""Prompts made from templates: different ones, repeatable, and none that evaluation uses."""

from __future__ import annotations

import json
from pathlib import Path

from examples.make_prompts import make_prompts, read_excluded, runs_of_words

FIRST = Path(__file__).parents[3] / "prompts" / "first.jsonl"


def test_prompts_differ_and_repeat_with_their_seed() -> None:
    made = list(make_prompts(2000, 5, set()))
    assert len(set(made)) == 2000
    assert made == list(make_prompts(2000, 5, set()))
    assert made != list(make_prompts(2000, 6, set()))


def test_an_excluded_prompt_is_not_made() -> None:
    made = list(make_prompts(300, 0, set()))
    excluded = runs_of_words(made[7]) | runs_of_words(made[100])
    again = set(make_prompts(300, 0, excluded))
    assert made[7] not in again and made[100] not in again
    assert len(again) == 300


def test_no_prompt_of_the_shipped_set_comes_close() -> None:
    shipped = [json.loads(line)["prompt"] for line in FIRST.read_text(encoding="utf-8").splitlines()]
    excluded = read_excluded([FIRST])
    assert all(runs_of_words(text) & excluded for text in shipped if len(text.split()) > 3)
    for text in make_prompts(5000, 1, excluded):
        assert not runs_of_words(text) & excluded
        assert text not in shipped
