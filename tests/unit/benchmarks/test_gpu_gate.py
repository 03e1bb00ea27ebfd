from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks import gpu_gate
from benchmarks.gpu_gate import (
    EAGER,
    GRAPH,
    answer,
    compare_modes,
    compare_with_float32,
    engine_settings,
    first_difference,
    records_steps,
)
from benchmarks.random_dense import DENSE_SHAPES, random_prompts, random_target
from benchmarks.step_shapes import make_drafter, make_target

from paceline.engine.engine import Engine, EngineSettings

CPU = torch.device("cpu")
PROMPTS = random_prompts(2, 12, 512)


def test_modes_differ_in_recording_alone() -> None:
    recorded, eager = (engine_settings(mode, max_num_seqs=3) for mode in (GRAPH, EAGER))
    assert recorded.cuda_graphs is True and engine_settings().cuda_graphs is None
    assert eager == replace(recorded, cuda_graphs=False) and not eager.prefix_cache
    assert not records_steps(CPU)


def test_equal_steps_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # No graphs on a CPU: the engine asked for one is the other, and the comparison is what is tested.
    asked = []

    def settings(mode: str, **chosen: object) -> EngineSettings:
        asked.append(mode)
        return EngineSettings(**chosen)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_gate, "engine_settings", settings)
    monkeypatch.setattr(gpu_gate, "NUM_STEPS", 6)
    target = make_target("tiny-smollm2", CPU, dtype=torch.float32, linear_mode="row_invariant")
    drafter = make_drafter(target)
    found = compare_modes(target, drafter, PROMPTS, max_model_len=96)
    assert asked == [EAGER, GRAPH]
    assert found == {"num_same": 2, "num_prompts": 2, "num_steps": 6, "num_replayed": 0, "first_difference": None}

    served = gpu_gate.answer

    def faulty(engine: Engine, *arguments: object) -> object:
        results = served(engine, *arguments)  # type: ignore[arg-type]
        if len(asked) == 4:  # the recorded engine of the second comparison
            record = results[1].trace.records[3]
            results[1].trace.records[3] = replace(record, emitted_ids=(7,), bonus_id=7)
        return results

    monkeypatch.setattr(gpu_gate, "answer", faulty)
    found = compare_modes(target, drafter, PROMPTS, max_model_len=96)
    assert (found["num_same"], found["first_difference"]) == (1, 3)


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_a_text_of_the_same_weights_follows_float32_and_another_does_not() -> None:
    target = make_target("tiny-qwen3", CPU, dtype=torch.bfloat16, linear_mode="plain")
    settings = EngineSettings(max_num_seqs=2, max_model_len=96)
    texts = [list(result.token_ids) for result in answer(Engine(target, None, settings), PROMPTS, 24)]
    found: Any = compare_with_float32(target, PROMPTS, texts)
    assert found["num_tokens"] == 48 and found["follows"] and found["agreement"] > 0.9 < found["normal_agreement"]
    assert found["largest_gap"] < 0.1 * found["logit_spread"]
    wrong = [[*texts[0][:5], (texts[0][5] + 1) % 512, *texts[0][6:]], texts[1]]
    found = compare_with_float32(target, PROMPTS, wrong)
    assert found["first_divergence"] is not None and found["gap_at_divergence"] > 0.3


def test_another_models_text_does_not_follow() -> None:
    target, other = (
        random_target(DENSE_SHAPES["tiny-qwen3"], CPU, dtype=torch.bfloat16, seed=seed, linear_mode="plain")
        for seed in (0, 1)
    )
    settings = EngineSettings(max_num_seqs=2, max_model_len=96)
    texts = [result.token_ids for result in answer(Engine(other, None, settings), PROMPTS, 24)]
    found: Any = compare_with_float32(target, PROMPTS, texts)
    assert not found["follows"] and found["agreement"] < 0.2 < found["normal_agreement"]


def test_float32_agrees_with_itself() -> None:
    target = make_target("tiny-smollm2", CPU, dtype=torch.float32, linear_mode="plain")
    settings = EngineSettings(max_num_seqs=2, max_model_len=96)
    texts = [result.token_ids for result in answer(Engine(target, None, settings), PROMPTS, 24)]
    found: Any = compare_with_float32(target, PROMPTS, texts)
    assert found["agreement"] == found["normal_agreement"] == 1.0 and found["first_divergence"] is None
    assert found["gap_at_divergence"] == found["largest_gap"] == found["normal_gap"] == 0.0
