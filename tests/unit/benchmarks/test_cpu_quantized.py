"""The benchmark of weights in codes: its command line, and its rows from tiny weights."""

from __future__ import annotations

import pytest
import torch
from benchmarks import cpu_quantized
from tests.tiny import loaded, tiny_prompts
from tests.tiny_codes import coded

from paceline.engine.engine import Engine
from paceline.engine.settings import EngineSettings
from paceline.ops.native import quantized
from paceline.ops.native.rows import pack

has_codes = pytest.mark.skipif(not quantized.can_run_quantized(), reason="no products with codes on this machine")


def test_quick_is_small_and_one_token_has_no_time() -> None:
    assert cpu_quantized.parse(["--quick"]).rows == [1, 8]
    with pytest.raises(SystemExit):
        cpu_quantized.parse(["--max-tokens", "1"])


@has_codes
def test_a_row_per_weight_and_one_for_all() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    held = coded(weight, 8)
    codes = quantized.pack_codes(held.scales_OC, held.minima_OC, held.codes_OI)
    rows = cpu_quantized.product_rows([{"o": [pack(weight)]}, {"o": [codes]}], 2, num_passes=3)
    assert [row["weight"] for row in rows] == ["o", "all"] and all(row["ratio"] > 0 for row in rows)  # type: ignore[operator]


def test_texts_of_two_engines_take_turns() -> None:
    target, drafter = loaded("llama", linear_mode="plain")
    engines = [Engine(target, drafter, EngineSettings(max_num_seqs=1, max_model_len=64)) for _ in range(2)]
    row = cpu_quantized.text_row(engines, tiny_prompts([5, 9]), drafter.num_draft_tokens, max_tokens=6)
    assert row["bf16_length"] == row["codes_length"] and row["ratio"] > 0  # type: ignore[operator]
    for engine in engines:
        assert engine.stats().num_finished == 3, "one to warm up"
        engine.close()
