"""The shipped drafter and its target: faults planted in the real pair are named, and copies of the target pass."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.cli.test_main import run

from paceline.checkpoint.contract import RopeSettings, TargetLayerId
from paceline.errors import CompatibilityError
from paceline.evaluation.contract_search import search_contract
from paceline.evaluation.own_text import answered, own_questions
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.drafters.table import Drafter
from paceline.models.fingerprint import NEAR_TOLERANCE, check_fingerprint, replay_fingerprint
from paceline.models.loading import LoadedTarget, load_drafter, load_target, read_fingerprint
from paceline.models.readings import reread

DRAFTER = Path(__file__).parents[2] / "drafters" / "smollm2-135m-instruct-dflash"
ALIAS = "smollm2-135m-instruct"

pytestmark = pytest.mark.skipif(not DRAFTER.is_dir(), reason="a source archive comes without the drafter")


@pytest.fixture(scope="module")
def target() -> Iterator[LoadedTarget]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_target(ALIAS, dtype="float32", device="cpu", linear_mode="plain", offline=True)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def drafter(target: LoadedTarget) -> DFlashDrafter:
    model = load_drafter(str(DRAFTER), target, offline=True).model
    assert isinstance(model, DFlashDrafter)
    return model


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    found = read_fingerprint(DRAFTER)
    assert found is not None
    return found


def test_the_pair_fits_with_room_to_spare(
    target: LoadedTarget, drafter: DFlashDrafter, stored: dict[str, torch.Tensor]
) -> None:
    """Recorded in bf16, replayed in float32."""
    replay = replay_fingerprint(target.model, drafter, stored)
    assert [result.stage for result in replay.results] == [
        "taps", "fc_input", "context", "keys", "embeddings", "rows", "logits", "drafts", "config"
    ]  # fmt: skip
    assert max(comparison.error for comparison in replay.taps) < NEAR_TOLERANCE / 5
    assert max(result.error for result in replay.results[1:]) < 0.3


def test_the_fingerprint_is_small() -> None:
    assert (DRAFTER / "fingerprint.safetensors").stat().st_size < 200_000


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"target_layer_ids": (2, 9, 16, 23, 28)},
            "it matches layer 22, the config says 23",
        ),
        ({"target_layer_ids": (0, 7, 14, 21, 26)}, "it matches layer 22, the config says 21"),
        ({"target_layer_ids": (1, 8, 15, 21, 27)}, "tap 3 differs by 32%"),
        ({"target_layer_ids": (1, 15, 8, 22, 27)}, "taps 1 and 2 are swapped"),
        ({"has_tap_norm": False}, "fc_norm is missing"),
        ({"is_neox_style": False}, "split halves: is_neox_style should be true"),
        ({"rope": RopeSettings(theta=1e4)}, "theta 100000: rope_theta is 10000"),
        ({"rope": RopeSettings(theta=123456.0)}, "theta 100000: rope_theta is 123456"),
        ({"input_embedding_scale": 24.0}, "input_embedding_scale 1; the config says 24"),
        ({"mask_token_id": 2}, "the stored mask row is token 0's"),
        ({"layer_causal": (True,) * 4}, "rows of a block are bidirectional"),
        ({"layer_windows": (128,) * 4}, "without windows"),
        ({"block_size": 16}, "in blocks of 8 rows, the config says 16"),
        ({"output_multiplier": 0.5}, "output_multiplier 1; the config says 0.5"),
        ({"final_logit_softcapping": 30.0}, "without a soft-cap"),
    ],
)
def test_planted_faults_are_named(
    target: LoadedTarget, drafter: DFlashDrafter, stored: dict[str, torch.Tensor], changes: dict[str, Any], text: str
) -> None:
    if "target_layer_ids" in changes:
        changes = {"target_layer_ids": tuple(map(TargetLayerId, changes["target_layer_ids"]))}
    with pytest.raises(CompatibilityError) as caught:
        check_fingerprint(target.model, reread(drafter, **changes), stored)
    assert text in caught.value.message and caught.value.hint


def test_an_edited_folder_is_refused_as_it_is_loaded(target: LoadedTarget, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(DRAFTER, folder)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 17
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CompatibilityError, match="token 0's") as caught:
        load_drafter(str(folder), target, offline=True)
    assert caught.value.hint is not None and '"mask_token_id": 0' in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rms_norm_eps": 1e-6}, "recorded with rms_norm_eps"),
        ({"input_embedding_scale": 1.03}, "recorded with input_embedding_scale 1.0, the config says 1.03"),
        ({"output_multiplier": 1.03}, "output_multiplier 1.0, the config says 1.03"),
        ({"layer_windows": (4096,) * 4}, "recorded with layer_windows [None, None, None, None]"),
        ({"max_position_embeddings": 64}, "recorded with max_position_embeddings"),
    ],
)
def test_what_the_numbers_cannot_see_is_named_from_the_record(
    target: LoadedTarget, drafter: DFlashDrafter, stored: dict[str, torch.Tensor], changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(CompatibilityError) as caught:
        check_fingerprint(target.model, reread(drafter, **changes), stored)
    assert text in caught.value.message and drafter.contract.origin in str(caught.value)


@pytest.fixture(scope="module")
def others(target: LoadedTarget) -> dict[str, tuple[Drafter, dict[str, torch.Tensor]]]:
    """The other shipped drafters and their fingerprints."""
    found = {}
    for family in ("dflash2", "dspark", "eagle3"):
        folder = DRAFTER.with_name(f"smollm2-135m-instruct-{family}")
        stored = read_fingerprint(folder)
        assert stored is not None
        found[family] = load_drafter(str(folder), target, check_fingerprint=False, offline=True).model, stored
    return found


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_1", "Q4_0"])
def test_quantised_copies_of_the_target_pass(
    target: LoadedTarget,
    drafter: DFlashDrafter,
    stored: dict[str, torch.Tensor],
    others: dict[str, tuple[Drafter, dict[str, torch.Tensor]]],
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gguf = pytest.importorskip("gguf")
    which = gguf.GGMLQuantizationType[kind]
    copied = copy.deepcopy(target.model)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.dim() == 2:
                packed = gguf.quants.quantize(np.ascontiguousarray(parameter.numpy()), which)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, which)))
    with caplog.at_level(logging.WARNING):
        check_fingerprint(copied, drafter, stored)
    assert ("coarser quantisation" in caplog.text) == (kind in ("Q5_0", "Q4_0"))
    for other, of_other in others.values():
        check_fingerprint(copied, other, of_other)
    moved = reread(drafter, target_layer_ids=tuple(map(TargetLayerId, (2, 9, 16, 23, 28))))
    with pytest.raises(CompatibilityError, match="it matches layer 22, the config says 23"):
        check_fingerprint(copied, moved, stored)
    without_selector, of_other = copy.deepcopy(others["dflash2"][0]), others["dflash2"][1]
    without_selector.get_parameter("candidate_selector.predecessor_codebook").data.zero_()
    with pytest.raises(CompatibilityError, match="the drafter's drafts differ"):
        check_fingerprint(copied, without_selector, of_other)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "bfloat16") for family in ("dflash", "dflash2", "dspark", "eagle3")), ("dflash", "float32")],
)
def test_the_verb_says_yes_to_every_shipped_drafter_in_either_precision(
    family: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target itself is a GGUF-quantised copy of what its publisher trained."""
    folder = DRAFTER.with_name(f"smollm2-135m-instruct-{family}")
    arguments = ["check", str(folder), "--target", ALIAS, "--dtype", dtype, "--device", "cpu", "--offline", "--json"]
    assert run([*arguments, "--threads", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["methods"] == ["fingerprint"] and found["causes"] == found["notes"] == []
    assert {row["ok"] for row in found["stages"]} == {True}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prompts_name_faults_where_there_is_no_fingerprint() -> None:
    """In bf16, as on any CPU that has it; some forty readings of 24 short answers each."""
    target = load_target(ALIAS, dtype="bfloat16", device="cpu", offline=True)
    drafter = load_drafter(str(DRAFTER), target, offline=True).model
    texts = answered(target, own_questions())
    verdict = search_contract(target.model, drafter, texts)
    assert verdict.says_yes and verdict.declared.first_accepted > 0.5
    shifted = tuple(map(TargetLayerId, (2, 9, 16, 23, 28)))
    faults: tuple[tuple[dict[str, Any], str], ...] = (
        ({"is_neox_style": False}, "RoPE with split halves"),
        ({"mask_token_id": 17}, "the mask id 0"),
        ({"target_layer_ids": shifted}, "every tap one layer earlier"),
    )
    for changes, name in faults:
        verdict = search_contract(target.model, reread(drafter, **changes), texts)
        assert verdict.better is not None and verdict.better.name == name
