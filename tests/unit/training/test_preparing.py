"""What a run reads: every file's held-out conversations have a name of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_run import random_rows, tiny_settings, write_token_file

from paceline.training.preparing import read_data


@pytest.mark.parametrize("order", [("other/data.npz", "data.npz"), ("data.npz", "other/data.npz")])
def test_no_held_out_set_replaces_another_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    """One of them lies where all paths start from, so that its path is its name; whichever comes first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    texts = {name: random_rows(12, 20, vocab_size=64, seed=seed) for seed, name in enumerate((*order, "lone.npz"))}
    for name, rows in texts.items():
        write_token_file(Path(name), rows, num_prompt_tokens=4)
    run = tiny_settings(Path("out"), Path(order[0]), data_files=[*texts])
    found = read_data(run, 64, None)
    assert {name: held_out.tokens.tolist() for name, held_out in found.held_out.items()} == {
        name: [token for row in rows[-4:] for token in row] for name, rows in texts.items()
    }
    assert len(found.train) == 3 * 8


def test_held_out_conversations_that_are_learnt_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the same file and from another one; a prompt with another answer is no repetition."""
    texts = random_rows(12, 20, vocab_size=64)
    other = [[*texts[0][:-1], 63], texts[9], *random_rows(6, 20, vocab_size=64, seed=1)]
    texts[11] = texts[2]
    files = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for file, rows in zip(files, (texts, other), strict=True):
        write_token_file(file, rows, num_prompt_tokens=4)
    read_data(tiny_settings(tmp_path / "out", files[0], data_files=list(map(str, files))), 64, None)
    said = [record.getMessage() for record in caplog.records if "word for word" in record.getMessage()]
    assert [message.split(" are ")[0] for message in said] == ["2 of 4 held-out conversations of a.npz"]


def test_a_mask_that_answers_hold_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [[5, 6, 7, 8, 9, 8], [8, 8, 5, 6, 7, 5], *([8, 8, 8, 8, 8, 8] for _ in range(4))]  # the last are held out
    data = write_token_file(tmp_path / "data.npz", rows, num_prompt_tokens=2)
    run = tiny_settings(tmp_path / "run", data, drafter_mask_token_id=8)
    read_data(run, 16, None)
    (said,) = [record.message for record in caplog.records if "mask_token_id" in record.message]
    assert said.startswith("drafter.mask_token_id 8 stands 2 times in the answers")  # those of prompts are no anchors
    caplog.clear()
    read_data(tiny_settings(tmp_path / "run", data, drafter_mask_token_id=10), 16, None)
    assert not any("mask_token_id" in record.message for record in caplog.records)
