from __future__ import annotations

import pytest
import torch
from benchmarks.random_kimi import kimi_config
from benchmarks.step_shapes import MAIN_SHAPES, SHAPES, kimi_shapes, make_drafter, make_target

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters


@pytest.mark.parametrize("shape", ["tiny-smollm2", "tiny-k3"])
def test_every_kind_of_shape_serves_with_its_drafter(shape: str) -> None:
    target = make_target(shape, torch.device("cpu"), dtype=torch.float32, linear_mode="plain")
    engine = Engine(target, make_drafter(target), EngineSettings(max_num_seqs=1, max_model_len=96))
    (result,) = engine.generate([[11, 12, 13]], SamplingParameters(max_tokens=4, ignore_eos=True))
    assert len(result.token_ids) == 4
    assert len(result.trace.records[0].proposed_ids) == 15


def test_k3_mini_is_of_the_size_it_is_called_by() -> None:
    from pathlib import Path

    from paceline.checkpoint.kimi_config import read_kimi_contract
    from paceline.models.targets.kimi import KimiTarget

    contract = read_kimi_contract(kimi_shapes()["k3-mini"], Path("random"), "random")
    with torch.device("meta"):
        model = KimiTarget(contract)
    assert sum(parameter.numel() for parameter in model.parameters()) == 47_330_680
    assert contract.kimi is not None and contract.kimi.delta is not None
    assert len(contract.kimi.delta.layers) == 24 and contract.kimi.delta.head_size == 64
    assert kimi_config(32, 8, 320)["linear_attn_config"]["head_dim"] == 80, "the shared config is not changed"


def test_main_shapes_are_known() -> None:
    assert set(MAIN_SHAPES) < set(SHAPES)
