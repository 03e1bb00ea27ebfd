"""What a run would need, from config.json alone, against arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from tests.tiny_kimi import k3_tiny_config, kimi_contract
from tests.unit.cli.folders import target_folder
from tests.unit.cli.test_main import run

from paceline.checkpoint.target_config import read_target_contract
from paceline.cli.estimate import (
    memory_terms,
    num_active_parameters,
    num_drafter_parameters,
    num_target_parameters,
)
from paceline.configuration.load import load_settings
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError
from paceline.training import attention_choice
from paceline.training.contract import drafter_contract

RECIPE = Path(__file__).parents[3] / "examples" / "train_8b_24gb.toml"
EIGHT_B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
GIB = 2**30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return target_folder(tmp_path / "eight-b", **EIGHT_B)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    count, length = 60, 600
    file = tmp_path / "data.npz"
    numpy.savez(
        file,
        tokens=numpy.full(count * length, 100, numpy.uint32),
        prompt_len=numpy.full(count, 100),
        response_len=numpy.full(count, length - 100),
    )
    return file


def settings(folder: Path, data: Path, *changes: str) -> TrainRun:
    given = [f'target.name="{folder}"', f'data.files=["{data}"]', "data.hold_out=8", "evaluate.num_conversations=8"]
    return load_settings(TrainRun, RECIPE, [*given, *changes])


def test_parameters_of_an_eight_b_target(folder: Path) -> None:
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    assert num_target_parameters(read_target_contract(folder, "eight-b")) == 36 * layer + 2 * 151936 * 4096


def test_every_term_of_the_recipe_is_what_a_hand_gives(folder: Path, data: Path) -> None:
    asked = settings(folder, data, "drafter.num_layers=2", "drafter.intermediate_size=4096", "drafter.num_taps=3")
    target = read_target_contract(folder, "eight-b")
    drafter = drafter_contract(asked, target)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 4096 + 2 * 4096 + 2 * 128
    trained = 2 * layer + 3 * 4096 * 4096 + 3 * 4096 + 2 * 4096  # layers, projection, tap norms, both last norms
    assert num_drafter_parameters(drafter) == trained
    rows, length, anchors = asked.schedule.batch_size, asked.data.max_length, asked.schedule.num_anchors
    slots = rows * anchors * asked.drafter.block_size
    found = memory_terms(asked, target, drafter, 600.0)
    assert found == {
        "target_weights": 2 * num_target_parameters(target),
        "drafter_values": 4 * trained,
        "drafter_gradients": 4 * trained,
        "drafter_moments": 8 * trained,
        "drafter_cast": 2 * trained,
        "step_features": rows * length * 4 * 4096 * 2,
        "step_target_layer": rows * length * (4 * 4096 + 3 * 12288) * 2,
        "step_context": rows * length * (4096 + 2 * 2 * 1024) * 2,
        "step_drafter_layers": slots * 4096 * 20 * 2 * 2,
        # A byte per pair; for each of 4 query heads per key head another one and, in both layers, a bf16 number.
        "step_masks": slots * (length + anchors * 8) * (1 + 4 * (1 + 2 * 2)),
        "step_scores": 3 * asked.objective.chunk_rows * 151936 * 4,
        "evaluation_features": asked.evaluate.batch_size * length * 4 * 4096 * 2,
        "evaluation_masks": asked.evaluate.batch_size * length * 8 * (length + length * 8) * (1 + 4 * (1 + 2)),
        "evaluation_scores": asked.evaluate.batch_size * length * 7 * 151936 * 2,
    }


def test_masks_are_those_of_the_attention_that_the_run_takes(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned for a GPU that is not here, with Triton or without it here."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(attention_choice, "HAS_TRITON", False)
    sizes = ["schedule.batch_size=8", "data.max_length=2048", "schedule.num_anchors=256", "drafter.block_size=16"]
    target = read_target_contract(folder, "eight-b")

    def masks(*changes: str) -> float:
        asked = settings(folder, data, *sizes, *changes)
        return memory_terms(asked, target, drafter_contract(asked, target), 2048.0)["step_masks"]

    tiles = (256 * 16 // 128) * (2048 // 128 + 256 * 16 // 128)
    assert masks("schedule.attention=flex") == masks() == 8 * 4 * (4 * tiles + 2 * (32 + 48))
    assert masks("schedule.attention=dense") == 8 * 256 * 16 * (2048 + 256 * 16) * 21
    assert masks("schedule.num_anchors=16") == 8 * 16 * 16 * (2048 + 16 * 16) * 21  # few scores: auto takes dense masks
    with pytest.raises(ConfigError, match=r"schedule.attention is 'flex'; .* the device is cpu"):
        masks("schedule.attention=flex", "device=cpu")
    given = [f'target.name="{folder}"', f'data.files=["{data}"]', "data.hold_out=8", "evaluate.num_conversations=8"]
    for attention in ("dense", "flex"):
        command = ["train", str(RECIPE), *given, *sizes, f"schedule.attention={attention}", "--dry-run", "--json"]
        assert run(command) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["attention"] == attention
        assert (found["memory_step_masks_mib"] > 3000) == (attention == "dense")


def test_the_recipe_fits_a_card_of_24_gb_and_a_large_drafter_does_not(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def peak(*changes: str) -> tuple[int, dict[str, Any]]:
        given = [f'target.name="{folder}"', f'data.files=["{data}"]', "data.hold_out=8", "evaluate.num_conversations=8"]
        assert run(["train", str(RECIPE), *given, *changes, "--dry-run", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["memory_mib"] * 2**20, found

    recipe, found = peak()
    assert recipe < 23 * GIB  # of 24, less what CUDA and the allocator keep
    assert recipe > 2 * num_target_parameters(read_target_contract(folder, "eight-b"))
    terms = {key: value for key, value in found.items() if key.startswith("memory_") and key != "memory_mib"}
    step = sum(value for key, value in terms.items() if key.startswith("memory_step_"))
    masks, scores = terms["memory_evaluation_masks_mib"], terms["memory_evaluation_scores_mib"]
    evaluation = terms["memory_evaluation_features_mib"] + max(masks, scores)
    always = sum(value for key, value in terms.items() if not key.startswith(("memory_step_", "memory_evaluation_")))
    assert found["memory_mib"] == pytest.approx(always + max(step, evaluation), abs=8)
    assert peak("drafter.num_layers=5", "drafter.intermediate_size=12288", "drafter.num_taps=5")[0] > 30 * GIB


def test_a_gpu_run_is_planned_where_there_is_no_gpu(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = [f'target.name="{folder}"', f'data.files=["{data}"]', "data.hold_out=8", "evaluate.num_conversations=8"]
    assert run(["train", str(RECIPE), *given, "device=cuda", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time_minutes"] is None


def test_of_a_mixture_a_token_meets_the_chosen_experts_alone() -> None:
    contract = kimi_contract(k3_tiny_config())
    assert num_target_parameters(contract) == 1_574_588 - 6 * 28  # its count has decay rates as wide as a head
    assert num_active_parameters(contract) == num_target_parameters(contract) - 7 * 2 * 12_288
    dense = kimi_contract(k3_tiny_config(num_experts=None))
    assert num_active_parameters(dense) == num_target_parameters(dense)
