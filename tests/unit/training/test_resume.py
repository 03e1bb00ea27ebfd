"""State on disk: complete, exact, of the same run, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.models.conftest import tiny_drafter
from torch import Tensor

from paceline.errors import CapacityError, CheckpointError, ConfigError
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.training.optimizer import make_optimizer
from paceline.training.resume import Progress, latest_checkpoint, load_state, save_state, step_folder

IDENTITY: dict[str, object] = {"seed": 0, "optimizer.betas": (0.9, 0.95), "data_sha256": "ab"}


def update(drafter: DFlashDrafter, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Optimizer steps on made-up gradients, the same for the same step."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        for parameter in drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def trained(num_steps: int, seed: int = 1) -> tuple[DFlashDrafter, torch.optim.Optimizer]:
    drafter = tiny_drafter(seed)
    optimizer = make_optimizer(drafter, weight_decay=0.1, betas=(0.9, 0.95))
    update(drafter, optimizer, range(num_steps))
    return drafter, optimizer


def values(drafter: DFlashDrafter) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


def save(folder: Path, step: int, *, keep: int = 9, num_updates: int | None = None) -> Path:
    drafter, optimizer = trained(step)
    progress = Progress(step, step if num_updates is None else num_updates)
    return save_state(folder, drafter, optimizer, progress, IDENTITY, keep=keep)


def differs(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [name for name in left if not torch.equal(left[name], right[name])]


def test_a_restored_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    save(tmp_path, 3)
    whole, _ = trained(6)
    drafter, optimizer = trained(2, seed=5)  # other weights and moments: everything must be replaced
    assert load_state(step_folder(tmp_path, 3), drafter, optimizer, IDENTITY) == Progress(3, 3)
    update(drafter, optimizer, range(3, 6))
    assert differs(values(whole), values(drafter)) == []


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "step"])
def test_without_a_part_of_the_state_it_would_not(tmp_path: Path, lost: str) -> None:
    """The planted fault: the test above sees every part of the optimizer's state."""
    save(tmp_path, 3)
    whole, _ = trained(6)
    drafter, optimizer = trained(0)
    load_state(step_folder(tmp_path, 3), drafter, optimizer, IDENTITY)
    for state in optimizer.state.values():
        state[lost].zero_()
    update(drafter, optimizer, range(3, 6))
    assert differs(values(whole), values(drafter))


def test_skipped_steps_do_not_count_as_updates(tmp_path: Path) -> None:
    save(tmp_path, 4, num_updates=3)
    drafter, optimizer = trained(0)
    assert load_state(step_folder(tmp_path, 4), drafter, optimizer, IDENTITY) == Progress(4, 3)
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


def test_a_state_before_the_first_update_is_complete(tmp_path: Path) -> None:
    save(tmp_path, 1, num_updates=0)
    drafter, optimizer = trained(0)
    assert load_state(step_folder(tmp_path, 1), drafter, optimizer, IDENTITY).num_updates == 0


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 10, 3):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000003", "step-0000010"]
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-0000010"


def test_unfinished_and_incomplete_folders_do_not_count(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    save(tmp_path, 2)
    (tmp_path / "step-0000003.unfinished").mkdir()
    (tmp_path / "step-0000004").mkdir()
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-0000002"


def test_a_leftover_of_a_killed_save_is_no_obstacle(tmp_path: Path) -> None:
    leftover = tmp_path / "step-0000002.unfinished"
    leftover.mkdir()
    (leftover / "state.safetensors").write_bytes(b"half")
    assert save(tmp_path, 2) == step_folder(tmp_path, 2)
    assert not leftover.exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 1}, "seed was 0, is 1"),
        ({"optimizer.betas": (0.9, 0.99)}, "optimizer.betas was [0.9, 0.95], is [0.9, 0.99]"),
        ({"data_sha256": "cd"}, "data_sha256 was 'ab', is 'cd'"),
        ({"new": 1}, "new was None, is 1"),
    ],
)
def test_another_run_is_refused_by_key(tmp_path: Path, change: dict[str, object], text: str) -> None:
    save(tmp_path, 1)
    drafter, optimizer = trained(0)
    before = values(drafter)
    with pytest.raises(ConfigError) as caught:
        load_state(step_folder(tmp_path, 1), drafter, optimizer, {**IDENTITY, **change})
    assert text in caught.value.message
    assert differs(before, values(drafter)) == [] and not optimizer.state


def test_another_network_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    drafter = tiny_drafter(has_tap_norm=True)
    optimizer = make_optimizer(drafter, weight_decay=0.1, betas=(0.9, 0.95))
    with pytest.raises(CheckpointError, match="fc_norm"):
        load_state(step_folder(tmp_path, 1), drafter, optimizer, IDENTITY)


@pytest.mark.parametrize("kind", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("fault", ["one row for all", "bfloat16", "NaN"])
def test_a_tensor_of_another_kind_is_refused(tmp_path: Path, kind: str, fault: str) -> None:
    """One that fits by broadcasting or rounding would be taken, and train on from numbers that nobody saved."""
    folder = save(tmp_path, 2)
    tensors = load_file(folder / "state.safetensors")
    name = f"{kind}.backbone.fc.weight"
    changed = {
        "one row for all": tensors[name][:1].contiguous(),
        "bfloat16": tensors[name].bfloat16(),
        "NaN": torch.full_like(tensors[name], float("nan")),
    }
    save_file(tensors | {name: changed[fault]}, folder / "state.safetensors")
    drafter, optimizer = trained(0)
    with pytest.raises(CheckpointError, match=rf"{name} is .*; expected finite numbers in torch\.float32"):
        load_state(folder, drafter, optimizer, IDENTITY)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"step": null, "num_updates": 1, "identity": {}}'])
def test_a_damaged_record_is_said(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path, 1)
    (folder / "state.json").write_text(text)
    drafter, optimizer = trained(0)
    with pytest.raises(CheckpointError, match="cannot read the state"):
        load_state(folder, drafter, optimizer, IDENTITY)


def test_truncated_tensors_are_said(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    file = folder / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    drafter, optimizer = trained(0)
    with pytest.raises(CheckpointError, match="truncated"):
        load_state(folder, drafter, optimizer, IDENTITY)


@pytest.mark.parametrize("good_calls", range(4))
def test_a_full_disk_leaves_the_earlier_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good_calls: int
) -> None:
    """Wherever the disk fills up, the new checkpoint is not there and the old one is what it was."""
    earlier = save(tmp_path, 1, keep=1)
    before = {path.name: path.read_bytes() for path in earlier.iterdir()}
    flush, calls = os.fsync, iter(range(99))

    def full(descriptor: int) -> None:
        if next(calls) >= good_calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match="disk is full"):
        save(tmp_path, 2, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == [earlier.name]
    assert {path.name: path.read_bytes() for path in earlier.iterdir()} == before


def test_ctrl_c_while_saving_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]


def test_the_state_covers_the_drafter_and_nothing_else(tmp_path: Path) -> None:
    from paceline.checkpoint.weights import open_safetensors_file

    folder = save(tmp_path, 1)
    names = [name for name, _ in tiny_drafter().named_parameters()]
    found = open_safetensors_file(folder / "state.safetensors").names()
    assert sorted(found) == sorted(f"{kind}.{name}" for kind in ("master", "exp_avg", "exp_avg_sq") for name in names)
    state = json.loads((folder / "state.json").read_text())
    assert sorted(state) == ["identity", "num_updates", "step"]
