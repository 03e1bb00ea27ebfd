from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.vllm.peers import join_peers, peer_columns, read_peers


def test_nothing_measured_says_nothing(tmp_path: Path) -> None:
    assert read_peers(None) == {} == read_peers(tmp_path / "absent")
    assert join_peers(tmp_path / "absent.json", {}) == 0
    row = {"shape": "a", "kind": "plain", "batch": 1, "ours_ms": 2.0}
    assert peer_columns({}, row) == {"peer": None, "peer_ms": None, "peer_over_ours": None}


@pytest.mark.parametrize(("ours", "ratio"), [({"ours_ms": 2.0}, 1.5), ({}, None), ({"ours_ms": None}, None)])
def test_a_ratio_needs_both_sides(ours: dict[str, object], ratio: float | None) -> None:
    peers = {("a", "plain", 1): {"peer": "vllm 0", "ms": 3.0}}
    found = peer_columns(peers, {"shape": "a", "kind": "plain", "batch": 1, **ours})
    assert found == {"peer": "vllm 0", "peer_ms": 3.0, "peer_over_ours": ratio}
