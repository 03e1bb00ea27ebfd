"""Shared runs of words are counted per set and once for all, in the way in which `--exclude` finds them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks import prompt_overlap
from benchmarks.prompt_overlap import data_texts, main, overlap_row, parse
from tests.fakes import ByteTokenizer

from paceline.capture.exclusion import Exclusion
from paceline.errors import DataError

SETS = {
    "one": ["How many eggs does the old duck lay in a week?", "Sort these words by length, please."],
    "two": ["Why do the tides come and go twice a day?"],
}
TEXTS = [
    "user How many eggs does the OLD duck lay, do you think? assistant",
    "how many eggs does the old duck lay and why do the tides come and go twice",
    "Why do the tides come, and go?",
    "Something else entirely, in as many words as it takes to fill a line.",
]


def test_a_conversation_counts_once_however_many_it_touches() -> None:
    row = overlap_row("talk", TEXTS, SETS, 6)
    assert row == {
        "data": "talk", "words": 6, "conversations": 4, "one": 2, "two": 2, "any": 3, "share": 0.75, "prompts": 2,
    }  # fmt: skip
    assert overlap_row("talk", TEXTS, SETS, 8)["any"] == 2
    assert overlap_row("talk", TEXTS, SETS, 13)["any"] == 0


@pytest.mark.parametrize("length", [4, 6, 8])
def test_it_counts_what_exclusion_would_drop(length: int, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in SETS["one"]))
    exclusion = Exclusion([file], length)
    dropped = sum(map(exclusion.covers, TEXTS))
    assert overlap_row("talk", TEXTS, {"one": SETS["one"]}, length)["any"] == dropped > 0


def test_the_command_leaves_out_what_was_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompt_overlap, "open_target_tokenizer", lambda model: ByteTokenizer())
    prompts = [ByteTokenizer().encode(text) for text in TEXTS]
    np.savez(
        tmp_path / "talk.npz",
        tokens=np.concatenate([np.array([*ids, 7], np.uint16) for ids in prompts]),
        prompt_len=np.array([len(ids) for ids in prompts]),
        response_len=np.ones(len(prompts), int),
    )
    assert data_texts(tmp_path / "talk.npz", ByteTokenizer(), 1) == TEXTS[:3]
    for name, texts in SETS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    sets = [word for name in SETS for word in ("--set", f"{name}={tmp_path / name}.jsonl")]
    data = ["--data", str(tmp_path / "talk.npz"), str(tmp_path / "one.jsonl")]
    assert main([*data, *sets, "--hold-out", "3", "--words", "6", "--out", str(tmp_path)]) == 0
    first, second = json.loads((tmp_path / "prompt-overlap.json").read_text())["rows"]
    assert (first["conversations"], first["one"], first["two"]) == (1, 1, 0)
    assert (second["data"], second["conversations"], second["any"]) == ("one.jsonl", 2, 2)
    assert "any" in capsys.readouterr().out
    with pytest.raises(DataError, match="does not exist"):
        main(["--data", str(tmp_path / "none.jsonl"), *sets])


def test_sets_have_names_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(["--data", "a.npz", "--set", "any=a.jsonl"])
    assert "must differ from each other and from data" in capsys.readouterr().err
