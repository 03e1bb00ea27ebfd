"""Drafter folders: complete or absent, and never over somebody else's files."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoint import export
from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import Dialect, read_drafter_contract, write_drafter_config
from paceline.checkpoint.export import split_fused, write_drafter_folder
from paceline.checkpoint.names import drafter_destinations, drafter_slots
from paceline.checkpoint.weights import Destination, load_strict, open_safetensors, open_safetensors_file
from paceline.errors import CapacityError, CheckpointError

Make = Callable[..., DrafterContract]
PROVENANCE = {"seed": 7, "command": "paceline train run.toml", "curve": [1.0, 2.0]}


def tensors_for(contract: DrafterContract, *, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(slot.shape, generator=generator).bfloat16() for slot in drafter_slots(contract)}


def write(folder: Path, contract: DrafterContract, *, seed: int = 0) -> None:
    fingerprint = {"token_ids": torch.arange(4), "features": torch.ones(2, 3)}
    write_drafter_folder(folder, contract, tensors_for(contract, seed=seed), fingerprint, PROVENANCE)


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_folder_reads_back(tmp_path: Path, make_drafter: Make) -> None:
    contract, folder = make_drafter(), tmp_path / "deep" / "drafter"
    write(folder, contract)
    assert names_in(folder) == [
        "config.json",
        "fingerprint.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
        "provenance.json",
    ]
    assert names_in(folder.parent) == ["drafter"]
    assert dataclasses.replace(read_drafter_contract(folder), origin=contract.origin) == contract
    source, expected = open_safetensors(folder), tensors_for(contract)
    assert set(source.names()) == set(expected)
    assert all(torch.equal(source.load(name), tensor) for name, tensor in expected.items())
    assert torch.equal(open_safetensors_file(folder / "fingerprint.safetensors").load("token_ids"), torch.arange(4))
    assert json.loads((folder / "provenance.json").read_text()) == PROVENANCE


def test_without_fingerprint_there_is_no_file(tmp_path: Path, make_drafter: Make) -> None:
    contract = make_drafter()
    write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {})
    assert "fingerprint.safetensors" not in names_in(tmp_path / "d")


def test_fused_parameters_survive_the_round_trip(make_drafter: Make, tmp_path: Path) -> None:
    contract = make_drafter(attention_bias=True)
    destinations = drafter_destinations(contract)
    heights: dict[str, tuple[int, ...]] = {}
    for slot in drafter_slots(contract):
        rows = heights.get(slot.parameter, (0,))[0] + slot.shape[0]
        heights[slot.parameter] = (rows, *slot.shape[1:])
    parameters = {name: torch.randn(shape, requires_grad=True) for name, shape in heights.items()}
    cut = split_fused(parameters, destinations)
    assert not any(tensor.requires_grad for tensor in cut.values())
    write_drafter_folder(tmp_path / "d", contract, cut, None, {})
    again = {name: torch.zeros(shape) for name, shape in heights.items()}
    load_strict(again, open_safetensors(tmp_path / "d"), destinations)
    assert all(torch.equal(again[name], parameters[name].detach()) for name in parameters)


def test_splitting_what_is_not_there_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has no parameters b"):
        split_fused({"a": torch.zeros(1)}, {"x": Destination("b")})


def test_a_drafter_is_replaced_and_its_card_kept(tmp_path: Path, make_drafter: Make) -> None:
    contract, folder = make_drafter(), tmp_path / "d"
    write(folder, contract, seed=1)
    (folder / "README.md").write_text("card")
    (folder / "plots").mkdir()
    (folder / "plots" / "curve.svg").write_text("svg")
    newer = make_drafter(has_tap_norm=False)
    write_drafter_folder(folder, newer, tensors_for(newer, seed=2), None, {})
    assert names_in(folder) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "plots",
        "provenance.json",
    ]
    assert (folder / "plots" / "curve.svg").read_text() == "svg"
    assert not read_drafter_contract(folder).has_tap_norm
    assert names_in(tmp_path) == ["d"]


@pytest.mark.parametrize("content", [{"notes.txt": "x"}, {"config.json": '{"architectures": ["LlamaForCausalLM"]}'}])
def test_other_folders_are_not_overwritten(tmp_path: Path, make_drafter: Make, content: dict[str, str]) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match="it stays as it is"):
        write(folder, make_drafter())
    assert names_in(folder) == list(content) and names_in(tmp_path) == ["d"]


def test_empty_folder_is_used_and_a_file_is_not(tmp_path: Path, make_drafter: Make) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", make_drafter())
    assert read_drafter_contract(tmp_path / "empty").block_size == 8
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        write(tmp_path / "file", make_drafter())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "fc.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra has no place"),
        (lambda t: t.update({"norm.weight": torch.zeros(3)}), r"norm.weight is \[3\], expected \[32\]"),
        (lambda t: t["norm.weight"].fill_(float("nan")), "norm.weight holds NaN"),
    ],
)
def test_tensors_must_match_the_contract(
    tmp_path: Path, make_drafter: Make, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    contract = make_drafter()
    tensors = tensors_for(contract)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        write_drafter_folder(tmp_path / "d", contract, tensors, None, {})
    assert not list(tmp_path.iterdir())


class FailingSync:
    """Counts `os.fsync` calls and raises at the chosen one."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.calls = at, error, 0
        self.real = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        self.real(descriptor)


# two syncs for each of four files, one for the finished folder
@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", ["full", "interrupt"])
def test_failure_at_any_point_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_drafter: Make, at: int, old: bool, kind: str
) -> None:
    contract, folder = make_drafter(), tmp_path / "d"
    if old:
        write(folder, contract, seed=1)
    error = OSError(errno.ENOSPC, "No space left on device") if kind == "full" else KeyboardInterrupt()
    monkeypatch.setattr(os, "fsync", FailingSync(at, error))
    with pytest.raises(CapacityError if kind == "full" else KeyboardInterrupt):
        write(folder, contract, seed=2)
    assert names_in(tmp_path) == (["d"] if old else [])
    if old:
        assert torch.equal(open_safetensors(folder).load("fc.weight"), tensors_for(contract, seed=1)["fc.weight"])


@pytest.mark.parametrize("at", [1, 2])
def test_interrupt_between_the_two_renames_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_drafter: Make, at: int
) -> None:
    contract, folder = make_drafter(), tmp_path / "d"
    write(folder, contract, seed=1)
    real, calls = Path.rename, 0

    def rename(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        write(folder, contract, seed=2)
    assert names_in(tmp_path) == ["d"]
    assert torch.equal(open_safetensors(folder).load("fc.weight"), tensors_for(contract, seed=1)["fc.weight"])


def test_full_disk_while_making_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_drafter: Make) -> None:
    def fail(self: Path, *args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(CapacityError, match="the disk is full"):
        write(tmp_path / "d", make_drafter())
    assert not list(tmp_path.iterdir())


def test_provenance_that_is_not_json_is_noticed_before_writing(tmp_path: Path, make_drafter: Make) -> None:
    contract = make_drafter()
    with pytest.raises((TypeError, ValueError)):
        write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def reduced(make_drafter: Make, **changes: object) -> tuple[DrafterContract, Tensor]:
    contract = make_drafter(draft_vocab_size=4, has_own_head=True, **changes)
    return contract, torch.tensor([3, 10, 11, 50])


def test_vocabulary_tables_hold_offsets(tmp_path: Path, make_drafter: Make) -> None:
    """Targets 3, 10, 11, 50 are offsets 3, 9, 9, 47; every target id says whether it can be drafted."""
    contract, targets = reduced(make_drafter)
    write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {}, draft_to_target=targets)
    source = open_safetensors(tmp_path / "d")
    assert source.load("d2t").tolist() == [3, 9, 9, 47]
    assert source.load("d2t").dtype == torch.int64
    assert source.load("t2d").dtype == torch.bool
    assert source.load("t2d").shape == (64,)
    assert source.load("t2d").nonzero().flatten().tolist() == targets.tolist()
    assert source.shape("lm_head.weight") == (4, 32)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, "proposes 4 ids of a target with 64, and no table of target ids"),
        (torch.tensor([3, 10, 11]), r"is torch.int64 \[3\]; expected int64 \[4\]"),
        (torch.tensor([3, 10, 11, 64]), "each id below 64"),
        (torch.tensor([-1, 10, 11, 12]), "each id below 64"),
        (torch.tensor([3, 11, 10, 12]), "larger than the one before"),
        (torch.tensor([3, 3, 10, 12]), "larger than the one before"),
        (torch.tensor([3.0, 10.0, 11.0, 12.0]), "is torch.float32"),
    ],
)
def test_vocabulary_tables_that_are_wrong(
    tmp_path: Path, make_drafter: Make, table: Tensor | None, message: str
) -> None:
    contract, _ = reduced(make_drafter)
    with pytest.raises(CheckpointError, match=message):
        write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {}, draft_to_target=table)
    full = make_drafter()
    with pytest.raises(CheckpointError, match="proposes 64 ids of a target with 64, and a table"):
        write_drafter_folder(
            tmp_path / "d", full, tensors_for(full), None, {}, draft_to_target=torch.arange(full.draft_vocab_size)
        )
    assert not list(tmp_path.iterdir())


def test_mask_embedding_has_its_own_file(tmp_path: Path, make_drafter: Make) -> None:
    contract, mask = make_drafter(has_mask_embedding=True), torch.randn(32)
    for _ in range(2):  # the second time over the first
        write_drafter_folder(tmp_path / "d", contract, tensors_for(contract), None, {}, mask_embedding=mask)
    content = torch.load(tmp_path / "d" / "mask_embedding.pt", weights_only=True)
    assert torch.equal(content["embedding"], mask)
    assert content["mask_token_id"] == contract.mask_token_id
    write(tmp_path / "d", make_drafter())
    assert "mask_embedding.pt" not in names_in(tmp_path / "d")


@pytest.mark.parametrize(
    ("changes", "mask", "dialect", "message"),
    [
        ({}, torch.zeros(32), None, "has no place for a mask embedding, and one was given"),
        ({"has_mask_embedding": True}, None, None, "asks for a mask embedding, and none was given"),
        ({"has_mask_embedding": True}, torch.zeros(31), None, r"the mask embedding is \[31\], expected \[32\]"),
        ({"has_mask_embedding": True}, torch.full((32,), float("nan")), None, "finite numbers"),
        ({"has_mask_embedding": True}, torch.zeros(32), "assistant", "cannot state .*has_mask_embedding True"),
    ],
)
def test_mask_embeddings_that_have_no_place(
    tmp_path: Path,
    make_drafter: Make,
    changes: dict[str, bool],
    mask: Tensor | None,
    dialect: Dialect | None,
    message: str,
) -> None:
    contract = make_drafter(**changes)
    with pytest.raises(CheckpointError, match=message):
        write_drafter_folder(
            tmp_path / "d", contract, tensors_for(contract), None, {}, mask_embedding=mask, dialect=dialect
        )
    assert not list(tmp_path.iterdir())


def test_own_embedding_and_head_are_written(tmp_path: Path, make_drafter: Make) -> None:
    contract = make_drafter(has_own_embedding=True, has_own_head=True)
    tensors = tensors_for(contract)
    write_drafter_folder(tmp_path / "d", contract, tensors, None, {})
    source = open_safetensors(tmp_path / "d")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(source.load(name), tensors[name])


def test_tensors_of_one_memory_are_written_apart(tmp_path: Path, make_drafter: Make) -> None:
    contract = make_drafter(has_own_embedding=True, has_own_head=True)
    tensors = tensors_for(contract)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    ids = torch.arange(3)
    write_drafter_folder(tmp_path / "d", contract, tensors, {"a": ids, "b": ids}, {})
    source = open_safetensors(tmp_path / "d")
    assert torch.equal(source.load("lm_head.weight"), source.load("embed_tokens.weight"))
    assert open_safetensors_file(tmp_path / "d" / "fingerprint.safetensors").load("b").tolist() == [0, 1, 2]


def test_a_promise_that_gets_lost_on_the_way_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_drafter: Make
) -> None:
    """A writer that forgets a field: its default would be served in place of what was trained."""
    contract = make_drafter(input_embedding_scale=2.0, layer_windows=(16, None))

    def forgetful(contract: DrafterContract, dialect: Dialect) -> dict[str, object]:
        config = write_drafter_config(contract, dialect)
        del config["dflash_config"]["input_embedding_scale"]
        return config

    monkeypatch.setattr(export, "write_drafter_config", forgetful)
    with pytest.raises(CheckpointError, match=r"input_embedding_scale 2\.0 would be read as 1\.0"):
        write(tmp_path / "d", contract)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    write(tmp_path / "d", contract)


def test_weights_of_an_older_export_do_not_stay(tmp_path: Path, make_drafter: Make) -> None:
    """A shard or an index that stayed would contradict the new file."""
    folder = tmp_path / "d"
    write(folder, make_drafter())
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_text("old")
    (folder / "hf_quant_config.json").write_text("{}")
    write(folder, make_drafter(), seed=3)
    left = {"model-00001-of-00002.safetensors", "hf_quant_config.json"}
    assert left.isdisjoint(names_in(folder))
    assert "fc.weight" in open_safetensors(folder).names()


def test_extra_files_come_along(tmp_path: Path, make_drafter: Make) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    contract = make_drafter()
    write_drafter_folder(
        tmp_path / "d", contract, tensors_for(contract), None, {}, extra_files=[tmp_path / "tokenizer.json"]
    )
    assert (tmp_path / "d" / "tokenizer.json").read_text() == "{}"


def test_parents_made_for_nothing_are_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_drafter: Make
) -> None:
    monkeypatch.setattr(os, "fsync", FailingSync(3, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a" / "b" / "d", make_drafter())
    assert not list(tmp_path.iterdir())
