"""What each shipped drafter accepts on a fixed set of prompts, held against what was measured when it was made.

Nearly every fault of drafting is seen here and nowhere else: the text stays right and a token less is kept per step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.contract import TargetLayerId
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.evaluation.prompts import encode_prompt, read_prompts
from paceline.models.loading import LoadedDrafter, LoadedTarget, load_drafter, load_target
from paceline.models.readings import reread
from paceline.trace.acceptance import AcceptanceSummary

ROOT = Path(__file__).parents[2]
FAMILIES = ("dflash", "dflash2", "dspark", "eagle3")
NUM_PROMPTS, NUM_TOKENS = 12, 32
DROP = 0.15  # shorter answers than those of the calibration, and half of its prompts
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (ROOT / "drafters").is_dir(), reason="a source archive comes without the drafters"),
]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    torch.set_num_threads(1)
    return load_target("smollm2-135m-instruct", dtype="bfloat16", device="cpu", offline=True)


@pytest.fixture(scope="module")
def prompts(target: LoadedTarget) -> list[list[int]]:
    found = read_prompts(ROOT / "prompts" / "first.jsonl", limit=NUM_PROMPTS)
    return [encode_prompt(prompt, target.tokenizer) for prompt in found]


def acceptance_length(target: LoadedTarget, drafter: LoadedDrafter, prompts: Sequence[Sequence[int]]) -> float:
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=4, max_model_len=256, draft_sample_method="greedy"))
    results = engine.generate(prompts, SamplingParameters(max_tokens=NUM_TOKENS))
    return AcceptanceSummary.from_steps(record for one in results for record in one.trace.records).acceptance_length


@pytest.mark.parametrize("family", FAMILIES)
def test_no_drafter_accepts_less_than_it_did(family: str, target: LoadedTarget, prompts: list[list[int]]) -> None:
    folder = ROOT / "drafters" / f"smollm2-135m-instruct-{family}"
    calibrated = 1 + sum(json.loads((folder / "calibration.json").read_text())["per_position"])
    found = acceptance_length(target, load_drafter(str(folder), target, offline=True), prompts)
    print(f"\n{family}: {found:.3f}, calibrated {calibrated:.3f}")
    assert found > (1 - DROP) * calibrated


def test_a_drafter_with_taps_one_layer_off_is_far_below(target: LoadedTarget, prompts: list[list[int]]) -> None:
    """The planted fault; its folder would be refused, so the taps are moved behind the check."""
    folder = ROOT / "drafters" / "smollm2-135m-instruct-dflash2"
    calibrated = 1 + sum(json.loads((folder / "calibration.json").read_text())["per_position"])
    loaded = load_drafter(str(folder), target, offline=True)
    moved = tuple(TargetLayerId(layer + 1) for layer in loaded.contract.target_layer_ids)
    model = reread(loaded.model, target_layer_ids=moved)
    model.prepare_for_serving(target.linear_mode)
    faulty = dataclasses.replace(loaded, model=model, contract=model.contract)
    assert acceptance_length(target, faulty, prompts) < (1 - DROP) * calibrated
