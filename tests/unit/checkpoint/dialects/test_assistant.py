"""The Hugging Face assistant: transformers reads what is written, and what transformers writes is read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.checkpoint.dialects.conftest import full_contract, load_golden

from paceline.checkpoint.dialects import contract_from_config, file_names, write_drafter_config
from paceline.errors import CheckpointError


def config(**changes: Any) -> dict[str, Any]:
    merged = load_golden("assistant-dflash") | changes
    return {key: value for key, value in merged.items() if value != "absent"}


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    from transformers import AutoConfig

    contract = dataclasses.replace(full_contract("zlab-dflash"), layer_windows=(64, None))
    (tmp_path / "config.json").write_text(json.dumps(write_drafter_config(contract, "assistant")))
    read = AutoConfig.from_pretrained(tmp_path)
    assert type(read).__name__ == "MuseGlimmerAssistantConfig"
    assert (read.block_size, read.mask_token_id, read.target_layer_ids) == (16, 126, [1, 9, 17, 25, 33])
    assert read.layer_types == ["sliding_attention", "full_attention"] and read.sliding_window == 64
    assert read.rope_parameters["rope_theta"] == 1000000.0 and read.head_dim == 16


def test_transformers_has_nothing_to_warn_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its class has token ids of one public vocabulary as defaults, which lie outside of most others."""
    from transformers import AutoConfig
    from transformers.utils import logging

    written = write_drafter_config(full_contract("zlab-dflash"), "assistant")
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert [written[key] for key in ids] == [None] * 3
    assert contract_from_config(written, "c") == contract_from_config(
        {key: value for key, value in written.items() if key not in ids}, "c"
    )
    logging.enable_propagation()
    try:
        for config, num_warnings in ((written, 0), ({k: v for k, v in written.items() if k not in ids}, 1)):
            caplog.clear()
            (tmp_path / "config.json").write_text(json.dumps(config))
            read = AutoConfig.from_pretrained(tmp_path)
            assert (read.bos_token_id is None) == (num_warnings == 0)
            assert min(len([r for r in caplog.records if "token_id" in r.getMessage()]), 1) == num_warnings
    finally:
        logging.disable_propagation()


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    from transformers import AutoConfig

    contract = dataclasses.replace(full_contract("zlab-dflash"), layer_windows=(64, None))
    (tmp_path / "config.json").write_text(json.dumps(write_drafter_config(contract, "assistant")))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert contract_from_config(again, "c") == contract


@pytest.mark.slow  # the first import of a model's code takes seconds
def test_transformers_models_have_the_names_that_are_written(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    contract = full_contract("zlab-dflash")
    (tmp_path / "config.json").write_text(json.dumps(write_drafter_config(contract, "assistant")))
    model = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))
    assert {name for name, _ in model.named_parameters()} == set(file_names(contract, "assistant").values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": "absent"}, "layer_types is missing; transformers would take every layer for a sliding one"),
        ({"sliding_window": "absent"}, "sliding_window is None"),
        ({"target_layer_ids": "absent"}, "target_layer_ids is missing"),
        ({"mask_token_id": "absent"}, "mask_token_id is missing"),
        ({"block_size": "absent"}, "block_size is missing"),
        ({"rope_parameters": "absent"}, "names no rope_theta"),
        ({"is_causal": True}, "is_causal is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"dflash_config": {}}, "unknown config key dflash_config"),
        ({"draft_vocab_size": 64}, "unknown config key draft_vocab_size"),
        ({"vocab_size": 100}, "mask_token_id is 126, the vocabulary has 100 ids"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        contract_from_config(config(**changes), "c")


def test_sliding_layers_are_never_causal() -> None:
    contract = contract_from_config(config(layer_types=["sliding_attention"] * 2), "c")
    assert contract.layer_windows == (2048, 2048) and contract.layer_causal == (False, False)
    with pytest.raises(CheckpointError, match="cannot state layer_causal"):
        write_drafter_config(dataclasses.replace(contract, layer_causal=(True, True)), "assistant")
    assert write_drafter_config(contract, "assistant")["is_causal"] is False


def test_target_sizes_are_unstated_unless_we_wrote_them() -> None:
    assert contract_from_config(config(), "c").target_num_layers == 0
    ours = contract_from_config(config(paceline={"target_num_layers": 36}, vocab_size=128), "c")
    assert (ours.target_num_layers, ours.vocab_size, ours.target_vocab_size) == (36, 128, 128)
    with pytest.raises(CheckpointError, match="33 is the last layer"):
        contract_from_config(config(paceline={"target_num_layers": 34}), "c")
