from __future__ import annotations

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
from benchmarks.random_dense import in_float32, random_prompts
from benchmarks.step_shapes import make_drafter, make_target

from paceline.engine.engine import Engine, EngineSettings

CPU = torch.device("cpu")
PROMPTS = random_prompts(2, 12, 512)


def test_modes_differ_in_recording_alone() -> None:
    assert engine_settings(GRAPH, max_num_seqs=3) == EngineSettings(max_num_seqs=3, cuda_graphs=True)
    assert engine_settings(EAGER).cuda_graphs is False and engine_settings().cuda_graphs is None
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
            results[1].trace.records[3] = type(record)(**{**vars(record), "emitted_ids": (7,), "bonus_id": 7})
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
    reference = in_float32(target)
    engine = Engine(target, None, EngineSettings(max_num_seqs=2, max_model_len=96))
    texts = [result.token_ids for result in answer(engine, PROMPTS, 24)]
    found = compare_with_float32(reference, PROMPTS, texts)
    assert found["num_tokens"] == 48 and float(str(found["agreement"])) > 0.9
    assert float(str(found["largest_gap"])) < 0.1 * float(str(found["logit_spread"]))
    wrong = [[*texts[0][:5], (texts[0][5] + 1) % 512, *texts[0][6:]], texts[1]]
    found = compare_with_float32(reference, PROMPTS, wrong)
    assert found["first_divergence"] is not None and float(str(found["largest_gap"])) > 0.3
    own = [result.token_ids for result in answer(Engine(reference, None, engine.settings), PROMPTS, 24)]
    assert compare_with_float32(reference, PROMPTS, own) | {"logit_spread": 1.0} == {
        "agreement": 1.0,
        "num_tokens": 48,
        "first_divergence": None,
        "gap_at_divergence": 0.0,
        "largest_gap": 0.0,
        "logit_spread": 1.0,
    }
