"""The benchmark of weights in codes: its command line, and its rows from tiny weights."""

from __future__ import annotations

import pytest
import torch
from benchmarks import cpu_quantized
from tests.tiny import loaded, tiny_prompts
from tests.tiny_codes import coded

from paceline.engine.engine import Engine
from paceline.engine.settings import EngineSettings
from paceline.ops.native import integers, quantized
from paceline.ops.native.rows import pack

has_codes = pytest.mark.skipif(
    not (quantized.can_run_quantized() and integers.can_run_integers()), reason="no products with codes on this machine"
)


def test_quick_is_small_and_one_token_has_no_time() -> None:
    assert cpu_quantized.parse(["--quick"]).rows == [1, 8]
    with pytest.raises(SystemExit):
        cpu_quantized.parse(["--max-tokens", "1"])


@has_codes
def test_a_row_per_weight_and_one_for_all() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    held = coded(weight, 8)
    parts = held.scales_OC, held.minima_OC, held.codes_OI
    forms = pack(weight), quantized.pack_codes(*parts), integers.pack_integers(*parts)
    rows = cpu_quantized.product_rows([{"o": [form]} for form in forms], 2, num_passes=3)
    assert [row["weight"] for row in rows] == ["o", "all"]
    assert all(row["quantized_ratio"] > 0 and row["int8_ratio"] > 0 for row in rows)  # type: ignore[operator]


def test_texts_of_engines_take_turns() -> None:
    target, drafter = loaded("llama", linear_mode="plain")
    settings = EngineSettings(max_num_seqs=1, max_model_len=64)
    engines = {mode: Engine(target, drafter, settings) for mode in cpu_quantized.MODES}
    row = cpu_quantized.text_row(engines, tiny_prompts([5, 9]), drafter.num_draft_tokens, max_tokens=6)
    assert row["native_length"] == row["int8_length"] and row["int8_ratio"] > 0  # type: ignore[operator]
    for engine in engines.values():
        assert engine.stats().num_finished == 3, "one to warm up"
        engine.close()


def test_nearness_is_that_of_distributions() -> None:
    exact = loaded("llama", linear_mode="plain")[0]
    other = loaded("llama", linear_mode="plain")[0]
    with torch.no_grad():
        weight = other.model.lm_head.weight
        weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    targets = {"same": exact, "other": other}
    rows = cpu_quantized.nearness_rows(exact, targets, tiny_prompts([5, 9]), max_tokens=6)
    assert [row["mode"] for row in rows] == ["float32", "same", "other"]
    found = {row["mode"]: row for row in rows}
    assert found["same"]["divergence"] == 0 and found["same"]["agree"] == 1
    assert found["same"]["loss"] == found["float32"]["loss"]
    assert found["other"]["divergence"] > 0 and found["other"]["loss"] != found["float32"]["loss"]  # type: ignore[operator]
    assert all(row["positions"] == 12 for row in rows)
