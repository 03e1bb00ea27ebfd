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
