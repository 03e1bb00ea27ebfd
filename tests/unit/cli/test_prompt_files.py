"""What two drafters have learnt is left out for both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.tiny_run import random_rows, write_token_file

from paceline.cli.prompt_files import read_unlearnt_prompts
from paceline.errors import DataError
from paceline.evaluation.prompts import file_sha256


def trained(folder: Path, file: Path, held_out: int) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    record = {"data.files": {file.name: file_sha256(file)}, "data.hold_out": held_out}
    (folder / "provenance.json").write_text(json.dumps(record))
    return str(folder)


def test_the_shortest_held_out_end_counts(tmp_path: Path) -> None:
    file = write_token_file(tmp_path / "chats.npz", random_rows(9, 6, vocab_size=64), num_prompt_tokens=3)
    five, two, none = (trained(tmp_path / str(number), file, number) for number in (5, 2, 0))
    for drafters, first in (([five], 4), ([five, two], 7), ([two, five], 7)):
        prompts = read_unlearnt_prompts(file, drafters, limit=None)
        assert [prompt.id for prompt in prompts] == [f"chats-{index}" for index in range(first, 9)]
    assert len(read_unlearnt_prompts(file, [five], limit=2)) == 2
    with pytest.raises(DataError, match="has learnt every conversation"):
        read_unlearnt_prompts(file, [five, none], limit=None)
