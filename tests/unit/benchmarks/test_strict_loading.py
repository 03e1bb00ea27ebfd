from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import strict_loading
from benchmarks.strict_loading import bare_drafter, bare_target, main, rows_of, take_turns, weight_files
from safetensors.torch import load_file, save_file
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder

from paceline.errors import CheckpointError, ConfigError
from paceline.models.loading import load_drafter, load_target


def test_rows() -> None:
    """A turn in which the machine was slow counts as any other by the wall clock, and not by the CPU's."""
    slow = [(10.0, 3.0), (1.0, 1.0), (1.0, 1.0)]
    times = {
        "bare target": slow,
        "strict target": [(wall * 1.06, cpu * 1.04) for wall, cpu in slow],
        "bare drafter": [(1.0, 0.5)] * 3,
        "strict drafter": [(1.5, 0.75)] * 3,
        "fingerprint": [(0.1, 0.1)] * 3,
    }
    target, drafter, both = rows_of(times, {"target": 270.0, "drafter": 30.0})
    assert [row["part"] for row in (target, drafter, both)] == ["target", "drafter", "both"]
    assert target["loss"] == pytest.approx(0.06) and target["cpu_loss"] == pytest.approx(0.04)
    assert drafter["loss"] == pytest.approx(0.5) and "fingerprint_s" not in drafter
    assert both["megabytes"] == 300.0 and both["bare_s"] == 2.0 and both["strict_s"] == pytest.approx(2.56)
    assert both["loss"] == pytest.approx(0.28) and both["loss_with_fingerprint"] == pytest.approx(0.33)
    assert both["cpu_loss"] == pytest.approx(0.29 / 1.5)
    assert both["cpu_loss_with_fingerprint"] == pytest.approx(0.39 / 1.5)


def test_actions_take_turns_and_the_first_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []
    monkeypatch.setattr(strict_loading.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(strict_loading.time, "process_time", lambda: clock[0] / 2)
    durations = {"a": iter([100.0, 1.0, 9.0, 2.0]), "b": iter([100.0, 4.0, 5.0, 6.0])}

    def action(name: str) -> None:
        order.append(name)
        clock[0] += next(durations[name])

    found = take_turns({"a": lambda: action("a"), "b": lambda: action("b")}, 3)
    assert found == {"a": [(1.0, 0.5), (9.0, 4.5), (2.0, 1.0)], "b": [(4.0, 2.0), (5.0, 2.5), (6.0, 3.0)]}
    assert "".join(order) == "baabbaab", "whoever comes first in one turn comes last in the next"


def test_both_loaders_end_with_the_same_models_and_only_one_looks(tmp_path: Path) -> None:
    target = write_target_folder(tmp_path / "target", tiny_target())
    loaded = load_target(str(target), dtype="float32", device="cpu")
    folder = write_drafter(tmp_path / "drafter", loaded)
    model, tokenizer = bare_target(target, loaded)()
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], parameter), name
    assert tokenizer.token_id("<end>") == loaded.tokenizer.token_id("<end>")
    load = bare_drafter(folder, loaded)
    strict, bare = load_drafter(str(folder), loaded).model, load()
    for name, parameter in strict.named_parameters():
        assert torch.equal(dict(bare.named_parameters())[name], parameter), name
    # the cost that is measured buys something
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    load()
    with pytest.raises(CheckpointError, match=r"NaN or infinity: norm\.weight"):
        load_drafter(str(folder), loaded)


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_target_folder(tmp_path / "target", tiny_target())
    drafter = write_drafter(tmp_path / "drafter", wrap_target(tiny_target(), "plain"))
    arguments = ["--model", str(target), "--draft-model", str(drafter), "--num-loads", "1", "--threads", "1"]
    assert main([*arguments, "--dtype", "float32", "--out", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out" / "strict-loading.json").read_text())["rows"]
    assert [(row["dtype"], row["storage"], row["part"]) for row in rows] == [
        ("float32", "safetensors", part) for part in ("target", "drafter", "both")
    ]
    assert rows[2]["fingerprint_s"] > 0 and rows[0]["bare_s"] > 0
    assert "loss_with_fingerprint" in capsys.readouterr().out


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors files"):
        weight_files(tmp_path)
    assert weight_files(tmp_path / "packed.gguf") == [tmp_path / "packed.gguf"]
    target = write_target_folder(tmp_path / "target", tiny_target())
    bare = write_drafter(tmp_path / "drafter", wrap_target(tiny_target(), "plain"), fingerprint=False)
    assert [file.name for file in weight_files(bare)] == ["model.safetensors"]
    with pytest.raises(ConfigError, match="has no fingerprint"):
        main(["--model", str(target), "--draft-model", str(bare), "--num-loads", "1", "--dtype", "float32"])
