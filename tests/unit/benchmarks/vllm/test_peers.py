from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.vllm.peers import join_peers, main, peer_columns, read_peers


def test_nothing_measured_says_nothing(tmp_path: Path) -> None:
    assert read_peers(None) == {} == read_peers(tmp_path / "absent")
    assert join_peers(tmp_path / "absent.json", {}) == 0
    row = {"shape": "a", "kind": "plain", "batch": 1, "weights": "normal", "ours_ms": 2.0}
    assert peer_columns({}, row) == {"peer": None, "peer_ms": None, "peer_over_ours": None}


def test_rows_that_say_nothing_of_weights_are_of_normal_ones() -> None:
    peers = {("a", "plain", 1, "normal"): {"peer": "vllm 0", "ms": 3.0}}
    assert peer_columns(peers, {"shape": "a", "kind": "plain", "batch": 1, "ours_ms": 2.0})["peer_over_ours"] == 1.5


@pytest.mark.parametrize(("ours", "ratio"), [({"ours_ms": 2.0}, 1.5), ({}, None), ({"ours_ms": None}, None)])
def test_a_ratio_needs_both_sides(ours: dict[str, object], ratio: float | None) -> None:
    peers = {("a", "plain", 1, "normal"): {"peer": "vllm 0", "ms": 3.0}}
    found = peer_columns(peers, {"shape": "a", "kind": "plain", "batch": 1, "weights": "normal", **ours})
    assert found == {"peer": "vllm 0", "peer_ms": 3.0, "peer_over_ours": ratio}


def test_files_are_joined_afterwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, lines = tmp_path / "gpu-steps.json", tmp_path / "lines.jsonl"
    alike = {"shape": "a", "kind": "plain"}
    rows = [{**alike, "batch": batch, "weights": "normal", "ours_ms": 2.0} for batch in (1, 8)]
    result.write_text(json.dumps({"name": "gpu-steps", "machine": "a GPU", "rows": rows}))
    arguments = [str(result), str(lines), "--fact", "the peer on another"]
    assert main(arguments) == 1
    normal = {"peer": "vllm 0", **alike, "batch": 1, "weights": "normal", "ms": 3.0}
    dummy = {"peer": "vllm 0", **alike, "batch": 8, "ms": 3.0}  # written before weights were told apart
    lines.write_text("".join(json.dumps(each) + "\n" for each in (normal, dummy)))
    assert main(arguments) == main(arguments) == 0
    found = json.loads(result.read_text())
    assert [row["peer_over_ours"] for row in found["rows"]] == [1.5, None]
    assert found["machine"] == "a GPU, the peer on another"
    assert "1 rows of gpu-steps.json" in capsys.readouterr().out
