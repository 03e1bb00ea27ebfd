"""Prompts made from templates: different ones, repeatable, and none that evaluation uses."""

from __future__ import annotations

import json
from pathlib import Path

from examples.make_prompts import SHARED_WORDS, make_prompts

from paceline.capture.exclusion import Exclusion

FIRST = Path(__file__).parents[3] / "prompts" / "first.jsonl"


def excluding(*texts: str) -> Exclusion:
    exclusion = Exclusion(run_length=SHARED_WORDS)
    exclusion.add(texts)
    return exclusion


def test_prompts_differ_and_repeat_with_their_seed() -> None:
    made = list(make_prompts(2000, 5, excluding()))
    assert len(set(made)) == 2000
    assert made == list(make_prompts(2000, 5, excluding()))
    assert made != list(make_prompts(2000, 6, excluding()))


def test_an_excluded_prompt_is_not_made() -> None:
    made = list(make_prompts(300, 0, excluding()))
    again = set(make_prompts(300, 0, excluding(made[7], made[100])))
    assert made[7] not in again and made[100] not in again
    assert len(again) == 300


def test_no_prompt_of_the_shipped_set_comes_close() -> None:
    shipped = [json.loads(line)["prompt"] for line in FIRST.read_text(encoding="utf-8").splitlines()]
    excluded = Exclusion([FIRST], SHARED_WORDS)
    assert all(excluded.covers(text) for text in shipped if len(text.split()) > 3)
    for text in make_prompts(5000, 1, excluded):
        assert not excluded.covers(text)
        assert text not in shipped
