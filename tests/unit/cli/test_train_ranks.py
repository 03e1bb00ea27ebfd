"""`paceline train` in two processes as torchrun starts them: who talks, and how they end."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
import torch
from tests.tiny_run import random_rows, write_target_folder, write_token_file
from tests.unit.cli.launched import launched, under_torchrun
from tests.unit.training.processes import start
from tests.unit.training.shared_runs import small_target

from paceline.configuration.load import to_toml
from paceline.configuration.run import DistributedSettings
from paceline.errors import ConfigError
from paceline.training.launching import join_ranks

STEPS = 8


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    from tests.unit.training.shared_runs import settings

    data = write_token_file(tmp_path / "data.npz", random_rows(40, 24, vocab_size=400), num_prompt_tokens=6)
    run = settings(tmp_path / "run", data, schedule_num_steps=STEPS, checkpoint_every=2)
    target = write_target_folder(tmp_path / "target", small_target().model)
    run = run.model_copy(update={"target": run.target.model_copy(update={"name": str(target)})})
    path = tmp_path / "run.toml"
    path.write_text(to_toml(run))
    return path


def launch(folder: Path, *arguments: str, dies_at: int | None = None) -> tuple[list[int | None], list[str], list[str]]:
    """Exit codes, stdout and stderr of both processes; the second dies at a step if asked to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(launched, rank, port, folder, arguments, dies_at if rank else None) for rank in range(2)]
    for process in processes:
        process.join(60)
        process.kill()
    texts = [[(folder / f"{name}-{rank}").read_text() for rank in range(2)] for name in ("out", "err")]
    return [process.exitcode for process in processes], texts[0], texts[1]


def test_the_first_process_talks_and_both_end_well(run_file: Path, tmp_path: Path) -> None:
    codes, out, err = launch(tmp_path, "train", str(run_file), "--offline")
    assert codes == [0, 0], err
    assert out == [f"{tmp_path / 'run' / 'drafter'}\n", ""]
    assert f"step {STEPS}/{STEPS}" in err[0] and "loading target" in err[0]
    assert err[1] == ""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun_itself(run_file: Path, tmp_path: Path, strategy: str) -> None:
    """Caches of sharded tensors keep the group and its threads, so these processes leave at once."""
    done = under_torchrun("train", str(run_file), "--offline", f"distributed.strategy={strategy}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'run' / 'drafter'}\n"
    assert done.stderr.count("threads at exit") == 2, done.stderr
    assert strategy == "fsdp" or done.stderr.count("threads at exit: none of gloo") == 2, done.stderr


def test_a_process_that_is_killed_ends_the_others_and_the_run_goes_on_later(run_file: Path, tmp_path: Path) -> None:
    codes, out, err = launch(tmp_path, "train", str(run_file), "--offline", dies_at=5)
    assert codes == [1, -signal.SIGKILL]
    assert out == ["", ""]
    assert "LostRankError: another process of this run is gone" in err[0] and "--resume" in err[0]
    assert "Traceback" not in err[0]
    codes, out, err = launch(tmp_path, "train", str(run_file), "--offline", "--resume")
    assert codes == [0, 0] and out[0].endswith("drafter\n")
    assert "resumed at step 4" in err[0]


def test_a_mistake_is_told_once(run_file: Path, tmp_path: Path) -> None:
    codes, out, err = launch(tmp_path, "train", str(run_file), "--offline", "schedule.batch_size=3")
    assert codes == [2, 2] and out == ["", ""]
    assert "ConfigError: schedule.batch_size 3 cannot be shared evenly among 2 processes" in err[0]
    assert err[1] == ""


def test_a_process_that_nobody_launched_is_alone() -> None:
    with join_ranks("cpu", DistributedSettings()) as ranks:
        assert (ranks.rank, ranks.size, ranks.device) == (0, 1, torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "local_rank", "text"), [("cuda:1", 0, "is one GPU"), ("cuda", 2, "process 2 of this machine has no GPU")]
)
def test_every_process_of_a_machine_takes_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, local_rank: int, text: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(ConfigError, match=text), join_ranks(device, DistributedSettings()):
        pass
