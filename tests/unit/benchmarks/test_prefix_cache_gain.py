"""Tiny models behind one long prefix: what the cache gives, and that every loss of it would be seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import prefix_cache_gain
from benchmarks.prefix_cache_gain import CACHES, Measured, exit_code, main, read_prefix, rows_of, run_states
from tests import tiny
from tests.fakes import ByteTokenizer

from paceline.engine.prefix_index import PrefixIndex
from paceline.errors import DataError

(PREFIX,) = tiny.tiny_prompts([70], seed=5)
PROMPTS = [(*PREFIX, *end) for end in tiny.tiny_prompts([3, 9, 5], seed=6)]


def states(family: str | None) -> dict[str, list[Measured]]:
    target, drafter = tiny.loaded("qwen3", drafter_family=family or "dflash")
    return run_states(target, drafter if family else None, PROMPTS, 12)


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_the_gain_is_the_same_and_so_is_the_hit(family: str) -> None:
    plain = states(None)
    rows = list(rows_of(states(family), plain))
    assert [row["cache"] for row in rows] == list(CACHES)
    assert [row["identical_sequences"] for row in rows] == [2] * 4 == [row["identical_texts"] for row in rows]
    assert [row["num_hit_tokens"] for row in rows] == [0, 0, 64, 64]
    assert [row["num_hit_tokens_plain"] for row in rows] == [0, 0, 64, 64]
    assert exit_code(rows) == 0


def test_a_hit_without_the_drafters_keys_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, match = states(None), PrefixIndex.match

    def hit_of_the_target_alone(self: PrefixIndex, *arguments: Any, **options: Any) -> Any:
        found = match(self, *arguments, **options)
        return [type(block)(block.block, False) for block in found]

    monkeypatch.setattr(PrefixIndex, "match", hit_of_the_target_alone)
    rows = list(rows_of(states("dflash2"), plain))
    assert [row["identical_texts"] for row in rows] == [2] * 4
    assert [row["identical_sequences"] == 2 for row in rows] == [True, True, False, False]
    assert exit_code(rows) == 3


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"num_hit_tokens": 32.0}, 0),  # a block less
        ({"num_hit_tokens": 31.0}, 3),
        ({"num_hit_tokens": 0.0, "num_hit_tokens_plain": 0.0}, 3),
        ({"identical_texts": 3}, 3),
    ],
)
def test_verdict(change: dict[str, object], code: int) -> None:
    row = {"cache": "warm", "identical_sequences": 4, "identical_texts": 4, "num_prompts": 4}
    hits = {"num_hit_tokens": 64.0, "num_hit_tokens_plain": 64.0}
    assert exit_code([{**row, **hits, **change}]) == code


def test_the_prefix_is_cut_out_of_the_texts(tmp_path: Path) -> None:
    texts = [tmp_path / "a", tmp_path / "b"]
    for path in texts:
        path.write_text("abc")
    assert read_prefix(texts, ByteTokenizer(), 6) == list(b"abc\n\na")
    with pytest.raises(DataError, match="8 tokens, fewer than 9"):
        read_prefix(texts, ByteTokenizer(), 9)


def test_table_and_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = {"cache": "off", "identical_sequences": 1, "identical_texts": 1, "num_prompts": 1}
    rows = [{**row, "num_hit_tokens": 0.0, "num_hit_tokens_plain": 0.0}]
    monkeypatch.setattr(prefix_cache_gain, "measure", lambda _options: iter(rows))
    monkeypatch.setattr(torch, "set_num_threads", lambda _number: None)
    assert main(["--out", str(tmp_path), "--threads", "1"]) == 0
    assert json.loads((tmp_path / "prefix-cache-gain.json").read_text())["rows"] == rows


def test_where_bits_depend_on_the_company_only_hits_are_judged() -> None:
    row = {
        "cache": "warm",
        "num_prompts": 4,
        "identical_sequences": 3,
        "identical_texts": 3,
        "num_hit_tokens": 64.0,
        "num_hit_tokens_plain": 128.0,
    }
    assert exit_code([row], 64) == 3 and exit_code([row], 64, is_exact=False) == 0
    assert (
        exit_code([row], 63, is_exact=False) == 3 and exit_code([{**row, "num_hit_tokens": 0.0}], is_exact=False) == 3
    )
