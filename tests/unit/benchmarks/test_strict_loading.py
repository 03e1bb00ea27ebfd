from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import strict_loading
from benchmarks.strict_loading import main, median_seconds, rows_of, weight_files
from tests.tiny import tiny_target, wrap_target
from tests.tiny_run import write_drafter, write_target_folder

from paceline.errors import ConfigError


def test_rows() -> None:
    seconds = {"plain target": 1.0, "strict target": 1.5, "plain drafter": 0.2, "strict drafter": 0.5}
    target, drafter = rows_of({**seconds, "fingerprint": 0.1}, ["t", "d"], [270.0, 30.0])
    assert (target["model"], target["strict_over_plain"], target["fingerprint_share"]) == ("t", 1.5, None)
    assert (drafter["strict_over_plain"], drafter["fingerprint_s"], drafter["fingerprint_share"]) == (2.5, 0.1, 0.05)


def test_actions_take_turns_and_the_first_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], []
    monkeypatch.setattr(strict_loading.time, "perf_counter", lambda: clock[0])
    durations = {"a": iter([100.0, 1.0, 9.0, 2.0]), "b": iter([100.0, 4.0, 5.0, 6.0])}

    def action(name: str) -> None:
        order.append(name)
        clock[0] += next(durations[name])

    found = median_seconds({"a": lambda: action("a"), "b": lambda: action("b")}, 3)
    assert found == {"a": 2.0, "b": 5.0} and "".join(order) == "ab" * 4


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_target_folder(tmp_path / "target", tiny_target())
    drafter = write_drafter(tmp_path / "drafter", wrap_target(tiny_target(), "plain"))
    arguments = ["--model", str(target), "--draft-model", str(drafter), "--num-loads", "1", "--threads", "1"]
    assert main([*arguments, "--dtype", "float32", "--out", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out" / "strict-loading.json").read_text())["rows"]
    assert [(row["dtype"], row["model"]) for row in rows] == [("float32", "target"), ("float32", "drafter")]
    assert rows[0]["fingerprint_s"] is None and rows[1]["fingerprint_share"] > 0
    assert "strict_over_plain" in capsys.readouterr().out


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors files"):
        weight_files(tmp_path)
    assert weight_files(tmp_path / "packed.gguf") == [tmp_path / "packed.gguf"]
    target = write_target_folder(tmp_path / "target", tiny_target())
    bare = write_drafter(tmp_path / "drafter", wrap_target(tiny_target(), "plain"), fingerprint=False)
    assert [file.name for file in weight_files(bare)] == ["model.safetensors"]
    with pytest.raises(ConfigError, match="has no fingerprint"):
        main(["--model", str(target), "--draft-model", str(bare), "--num-loads", "1", "--dtype", "float32"])
