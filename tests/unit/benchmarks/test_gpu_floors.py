from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu_floors import Ceilings, measure_ceilings, step_floor_ms
from benchmarks.random_dense import QWEN3_8B, SMOLLM2_135M, dflash_contract
from benchmarks.step_shapes import make_drafter, make_target

from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.targets.dense import DenseTarget

H200 = Ceilings(4.3e12, 790e12)


def without_weights(contract: Any) -> tuple[Any, Any]:
    drafter = dflash_contract(contract)
    with torch.device("meta"):
        target_model = DenseTarget(contract, max_positions=2)
        drafter_model = DFlashDrafter(drafter, max_positions=2)
        drafter_model.prepare_for_serving("plain")
    return (
        SimpleNamespace(contract=contract, model=target_model),
        SimpleNamespace(contract=drafter, model=drafter_model, num_draft_tokens=15),
    )


@pytest.mark.parametrize(
    ("contract", "batch", "plain", "drafted"),
    [
        (SMOLLM2_135M, 1, 0.068, 0.093),
        (SMOLLM2_135M, 8, 0.107, 0.151),
        (SMOLLM2_135M, 32, 0.240, 0.497),
        (QWEN3_8B, 1, 3.556, 4.362),
        (QWEN3_8B, 8, 3.803, 4.681),
        (QWEN3_8B, 32, 4.651, 13.436),
    ],
)
def test_floors_are_those_that_were_worked_out_by_hand(contract, batch, plain, drafted) -> None:
    target, drafter = without_weights(contract)
    found = [step_floor_ms(target, each, batch=batch, context=1024, ceilings=H200) for each in (None, drafter)]
    assert found == pytest.approx([plain, drafted], abs=1e-3)


def test_a_mixture_reads_the_experts_that_are_chosen() -> None:
    target = make_target("tiny-k3", torch.device("cpu"), dtype=torch.bfloat16, linear_mode="plain")
    slow = Ceilings(1e6, 1e30)  # bytes alone
    experts = sum(p.numel() for name, p in target.model.named_parameters() if ".experts." in name)
    one, many = (step_floor_ms(target, None, batch=batch, context=0, ceilings=slow) for batch in (1, 64))
    kimi = target.contract.kimi
    assert kimi is not None and kimi.delta is not None
    state = 2 * len(kimi.delta.layers) * kimi.delta.num_heads * kimi.delta.head_size**2 * 4
    logits = 3 * 512 * 2
    assert many - one == pytest.approx((experts * 0.5 * 2 + 63 * (state + logits)) / 1e3, rel=1e-3)
    assert step_floor_ms(target, make_drafter(target), batch=1, context=0, ceilings=slow) > one


def test_ceilings_are_measured() -> None:
    found = measure_ceilings(torch.device("cpu"))
    assert found.bytes_per_s > 1e6 and found.operations_per_s > 1e3
