"""Configs of families that are not supported, and of models that are no drafters, are refused by name."""

from __future__ import annotations

import pytest
from tests.unit.checkpoint.dialects.conftest import (
    GOLDEN_NAMES,
    load_golden,
)

from paceline.checkpoint.dialects import (
    contract_from_config,
    is_drafter_config,
)
from paceline.errors import CheckpointError


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("DFlash2BeamDraftModel", "Beam"),
        ("PEagleDraftModel", "P-EAGLE"),
        ("PeagleQwen3ForCausalLM", "P-EAGLE"),
        ("LiLiCorrDraftModel", "LiLiCorr"),
        ("Qwen3XPressModel", "XPress"),
        ("DFlashLagunaForCausalLM", "Laguna"),
        ("Gemma4DSparkModel", "Gemma 4"),
        ("MuseSparkDSparkModel", "Muse Spark"),
        ("Qwen3OmniDSparkModel", "Omni"),
        ("DFlashSpeculator", "speculators_model_type"),
    ],
)
def test_families_that_are_not_supported_are_named(architecture: str, family: str) -> None:
    config = load_golden("zlab-dflash") | {"architectures": [architecture]}
    assert is_drafter_config(config)
    with pytest.raises(CheckpointError) as caught:
        contract_from_config(config, "c")
    message = caught.value.message
    assert family in message and architecture in message and "DFlashDraftModel" in message


def test_deepseek_and_domino_are_told_from_specforge() -> None:
    deepseek = load_golden("specforge-dspark") | {"model_type": "deepseek_v4"}
    with pytest.raises(CheckpointError, match="DeepSeek-V4"):
        contract_from_config(deepseek, "c")
    domino = load_golden("specforge-dflash")
    domino["dflash_config"]["projector_type"] = "domino"
    with pytest.raises(CheckpointError, match="Domino"):
        contract_from_config(domino, "c")


def test_targets_are_not_drafters() -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert not is_drafter_config(config)
    with pytest.raises(CheckpointError, match=r"model of its own \(Qwen3ForCausalLM\)"):
        contract_from_config(config, "c")
    for name in GOLDEN_NAMES:
        assert is_drafter_config(load_golden(name)), name
