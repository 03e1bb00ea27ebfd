"""Faults between the trainer and what serves its drafter: a teacher's state, a dropped tensor, one draft too few.

Each check stands beside the fault that it has to find.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_run import chat_target, hugging_face_config, random_rows, tiny_settings, write_token_file
from torch import Tensor

from paceline.checkpoint.contract import CaptureId
from paceline.checkpoint.target_config import read_target_contract
from paceline.checkpoint.weights import open_safetensors_file, save_safetensors
from paceline.engine.engine import Engine
from paceline.engine.request import SamplingParameters
from paceline.errors import CheckpointError, CompatibilityError, PacelineError
from paceline.models.attends import WholeSequence
from paceline.models.loading import LoadedTarget, load_drafter
from paceline.models.taps import TapCollector
from paceline.training.data import Batch
from paceline.training.features import TargetFeatures
from paceline.training.loop import train


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    made = chat_target()
    gains = torch.Generator().manual_seed(3)
    with torch.no_grad():  # a final norm whose gains are 1 would hide that it is left out
        made.model.norm.weight.uniform_(0.2, 3.0, generator=gains)
    return made


# --- 13: the teacher is what the target says next ---


def agreement(target: LoadedTarget, states: Callable[[Tensor], Tensor]) -> float:
    """Share of greedy tokens that the head finds best in the state before them."""
    prompts = random_rows(4, 5, vocab_size=400, seed=1)
    results = Engine(target).generate(prompts, SamplingParameters(max_tokens=24, ignore_eos=True))
    right, count = 0, 0
    for prompt, result in zip(prompts, results, strict=True):
        text = torch.tensor([[*prompt, *result.token_ids]])
        best = (states(text)[0] @ target.model.lm_head.weight.T).argmax(-1)
        says = torch.tensor(result.token_ids)
        right += int((best[len(prompt) - 1 : -1] == says).sum())
        count += len(says)
    return right / count


@torch.no_grad()
def test_the_teachers_best_id_is_the_next_greedy_token(target: LoadedTarget) -> None:
    features = TargetFeatures(target.model, ())
    assert agreement(target, lambda text: features(Batch.of_rows(text)).hidden_BSD) == 1.0

    def captured(text: Tensor, capture: int) -> Tensor:
        collector = TapCollector([CaptureId(capture)])
        target.model(text, torch.arange(text.shape[1])[None], WholeSequence(), collector)
        return collector.collected()[0]

    last = target.contract.num_layers
    faults: dict[str, Callable[[Tensor], Tensor]] = {
        "before the final norm": lambda text: captured(text, last),
        "one layer early, normed": lambda text: target.model.norm(captured(text, last - 1)),
        "one position late": lambda text: features(Batch.of_rows(text)).hidden_BSD.roll(1, dims=1),
        "gain of 1 + w": lambda text: (
            features(Batch.of_rows(text)).hidden_BSD / target.model.norm.weight * (1 + target.model.norm.weight)
        ),
    }
    found = {name: agreement(target, states) for name, states in faults.items()}
    assert all(share < 0.97 for share in found.values()), found


# --- 14: what is done to the target's logits is done to the teacher's ---


@torch.no_grad()
def test_rebuilt_logits_are_the_targets_and_a_transform_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    text = torch.tensor(random_rows(1, 12, vocab_size=400))
    features = TargetFeatures(target.model, ())
    hidden = target.model(text, torch.arange(12)[None], WholeSequence())
    rebuilt = features(Batch.of_rows(text)).hidden_BSD @ features.head_VD.T
    assert (rebuilt - target.model.logits(hidden)).abs().max() < 1e-5
    assert (rebuilt - 5.0 * torch.tanh(target.model.logits(hidden) / 5.0)).abs().max() > 1e-2
    config = hugging_face_config(target.contract)
    for key, value in (("final_logit_softcapping", 30.0), ("logit_scale", 0.0625), ("logits_scaling", 8.0)):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(CheckpointError, match=f"{key} is {value}"):
            read_target_contract(tmp_path, "t")


# --- 16 and 29: the folder that is served ---


def exported(target: LoadedTarget, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    data = write_token_file(folder / "data.npz", random_rows(12, 20, vocab_size=400), num_prompt_tokens=4)
    run = tiny_settings(folder / "run", data, schedule_num_steps=4, data_hold_out=4, **changes)
    outcome = train(run, target)
    assert outcome.drafter is not None
    return outcome.drafter


def rewrite(folder: Path, without: str) -> None:
    source = open_safetensors_file(folder / "model.safetensors")
    tensors = {name: source.load(name).clone() for name in source.names() if without not in name}
    assert len(tensors) < len(source.names())
    save_safetensors(folder / "model.safetensors", tensors, {})
    (folder / "model.safetensors.index.json").unlink()  # it lists what the file should hold


def test_norms_of_taps_are_exported_and_a_folder_without_them_is_refused(target: LoadedTarget, tmp_path: Path) -> None:
    folder = exported(target, tmp_path / "made", drafter_tap_norm=True)
    assert len(load_drafter(str(folder), target).model.backbone.fc_norm) == 2
    rewrite(folder, without="fc_norm.1")
    with pytest.raises(CheckpointError, match=r"fc_norm\.1"):
        load_drafter(str(folder), target)


def test_norms_of_taps_that_the_config_does_not_speak_of_are_refused(target: LoadedTarget, tmp_path: Path) -> None:
    """Neither may be dropped alone: tensors that nobody asked for are as wrong as tensors that are missing."""
    folder = exported(target, tmp_path / "made", drafter_tap_norm=True)
    config = (folder / "config.json").read_text()
    assert '"fc_norm": true' in config
    (folder / "config.json").write_text(config.replace('"fc_norm": true', '"fc_norm": false'))
    with pytest.raises(PacelineError, match="fc_norm"):
        load_drafter(str(folder), target)
    rewrite(folder, without="fc_norm")  # both dropped: the recorded states of the trained drafter tell
    with pytest.raises(CompatibilityError, match="fc_norm"):
        load_drafter(str(folder), target)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dflash": (3, {}),
    "dflash2": (3, {"drafter_family": "dflash2", "drafter_selector_rank": 8, "drafter_selector_top_k": 4}),
    "dspark, fill-in": (3, {"drafter_family": "dspark", "drafter_markov_rank": 8}),
    "dspark": (4, {"drafter_family": "dspark", "drafter_markov_rank": 8, "drafter_layout": "anchor_sampling"}),
    "eagle3": (3, {"drafter_family": "eagle3", "drafter_mask_token_id": None}),
}


def drafts_per_step(target: LoadedTarget, folder: Path) -> set[int]:
    """As the engine serves the folder, in the middle of a long answer."""
    engine = Engine(target, load_drafter(str(folder), target))
    prompt = random_rows(1, 6, vocab_size=400, seed=4)[0]
    (result,) = engine.generate([prompt], SamplingParameters(max_tokens=24, ignore_eos=True))
    return {record.num_draft_tokens for record in result.trace.records[:4]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_trained_with_blocks_of_4_proposes_as_many_as_its_layout_says(
    target: LoadedTarget, tmp_path: Path, name: str
) -> None:
    expected, changes = LAYOUTS[name]
    folder = exported(target, tmp_path / "made", **changes)
    assert load_drafter(str(folder), target).num_draft_tokens == expected
    assert drafts_per_step(target, folder) == {expected}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("dspark", True, False), ("dspark, fill-in", False, True), ("dflash", False, True)],
)
def test_the_other_layout_in_the_config_is_refused(
    target: LoadedTarget, tmp_path: Path, name: str, right: bool, wrong: bool
) -> None:
    folder = exported(target, tmp_path / "made", **LAYOUTS[name][1])
    config = (folder / "config.json").read_text()
    key = f'"sample_from_anchor": {json.dumps(right)}'
    assert key in config
    (folder / "config.json").write_text(config.replace(key, f'"sample_from_anchor": {json.dumps(wrong)}'))
    with pytest.raises(PacelineError, match=r"sample_from_anchor|layout"):
        load_drafter(str(folder), target)
