"""Token counts in a drafter's folder: read strictly, written beside an index, carried along by a conversion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.test_export import names_in, tensors_for, write

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.conversion import convert_drafter
from paceline.checkpoint.export import TOKEN_COUNTS_FILE, write_drafter_folder
from paceline.checkpoint.token_counts import add_token_counts, read_token_counts
from paceline.checkpoint.weights import INDEX_FILE, save_safetensors
from paceline.errors import CheckpointError

Make = Callable[..., DrafterContract]


def counts_for(contract: DrafterContract) -> torch.Tensor:
    return torch.arange(contract.target_vocab_size)


def test_an_export_holds_them_and_a_conversion_keeps_them(tmp_path: Path, make_drafter: Make) -> None:
    contract = make_drafter()
    counts_W = counts_for(contract)
    write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {}, token_counts=counts_W)
    found = read_token_counts(tmp_path / "d", contract.target_vocab_size)
    assert found is not None and found.dtype == torch.int64 and torch.equal(found, counts_W)
    converted = convert_drafter(tmp_path / "d", tmp_path / "c", "zlab")
    assert TOKEN_COUNTS_FILE not in converted.left_behind
    assert (tmp_path / "c" / TOKEN_COUNTS_FILE).read_bytes() == (tmp_path / "d" / TOKEN_COUNTS_FILE).read_bytes()


def test_another_run_in_the_same_folder_does_not_inherit_them(tmp_path: Path, make_drafter: Make) -> None:
    contract = make_drafter()
    counts_W = counts_for(contract)
    write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {}, token_counts=counts_W)
    write(tmp_path / "d", contract)
    assert TOKEN_COUNTS_FILE not in names_in(tmp_path / "d")
    assert read_token_counts(tmp_path / "d", contract.target_vocab_size) is None


def test_added_afterwards(tmp_path: Path, make_drafter: Make) -> None:
    """An index comes with them: some readers take every .safetensors of a folder without one for weights."""
    contract = make_drafter()
    write(tmp_path / "d", contract)
    (tmp_path / "d" / INDEX_FILE).unlink()
    add_token_counts(tmp_path / "d", counts_for(contract).int(), contract.target_vocab_size, {"files": ["a.npz"]})
    found = read_token_counts(tmp_path / "d", contract.target_vocab_size)
    assert found is not None and found.dtype == torch.int64 and torch.equal(found, counts_for(contract))
    index = json.loads((tmp_path / "d" / INDEX_FILE).read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    provenance = json.loads((tmp_path / "d" / "provenance.json").read_text())
    assert provenance["seed"] == 7 and provenance["token_counts"] == {"files": ["a.npz"]}


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        ({"token_counts": torch.ones(5, dtype=torch.int64)}, r"int64 \[5\]; expected .* each of the target's 4 ids"),
        ({"token_counts": torch.ones(4)}, "float32"),
        ({"token_counts": torch.ones(2, 2, dtype=torch.int64)}, r"\[2, 2\]"),
        ({"token_counts": torch.tensor([1, 0, -1, 3])}, "negative"),
        ({"token_counts": torch.zeros(4, dtype=torch.int32)}, "all 0"),
        ({"counts": torch.ones(4, dtype=torch.int64)}, "the tensors are counts; expected token_counts alone"),
    ],
)
def test_what_cannot_be_counts_is_refused(tmp_path: Path, tensors: dict[str, Any], part: str) -> None:
    save_safetensors(tmp_path / TOKEN_COUNTS_FILE, tensors, {})
    with pytest.raises(CheckpointError, match=part) as refused:
        read_token_counts(tmp_path, 4)
    assert TOKEN_COUNTS_FILE in str(refused.value)


def test_a_vocabulary_of_unknown_size_takes_any_length(tmp_path: Path) -> None:
    save_safetensors(tmp_path / TOKEN_COUNTS_FILE, {"token_counts": torch.tensor([1, 2])}, {})
    found = read_token_counts(tmp_path, None)
    assert found is not None and found.tolist() == [1, 2]
    save_safetensors(tmp_path / TOKEN_COUNTS_FILE, {"token_counts": torch.ones(1, 2, dtype=torch.int64)}, {})
    with pytest.raises(CheckpointError, match="expected whole numbers"):
        read_token_counts(tmp_path, None)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / TOKEN_COUNTS_FILE).write_bytes(b"\x10\x00\x00")
    with pytest.raises(CheckpointError, match="truncated"):
        read_token_counts(tmp_path, 4)


def test_nothing_is_written_of_bad_counts(tmp_path: Path, make_drafter: Make) -> None:
    contract = make_drafter()
    wrong = torch.ones(contract.target_vocab_size + 1, dtype=torch.int64)
    with pytest.raises(CheckpointError, match="token counts"):
        write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {}, token_counts=wrong)
    assert not (tmp_path / "d").exists()
    write(tmp_path / "d", contract)
    before = names_in(tmp_path / "d")
    with pytest.raises(CheckpointError, match="token counts"):
        add_token_counts(tmp_path / "d", wrong, contract.target_vocab_size, {})
    assert names_in(tmp_path / "d") == before
