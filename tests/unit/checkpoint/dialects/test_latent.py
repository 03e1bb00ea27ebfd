"""DFlash2 with latent attention, as Kimi-K3's public drafter has it under z-lab's names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.unit.checkpoint.dialects.conftest import full_contract, load_golden, tiny_tensors, write_folder

from paceline.checkpoint.dialects import contract_from_config, read_drafter, write_drafter_config
from paceline.checkpoint.names import drafter_slots
from paceline.errors import CheckpointError
from paceline.models.building import empty_drafter
from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.drafters.latent import LatentAttention

NAME = "zlab-dflash2-latent"


def config(top: dict[str, Any] | None = None, **nested: Any) -> dict[str, Any]:
    merged = load_golden(NAME) | (top or {})
    merged["dflash_config"] = merged["dflash_config"] | nested
    return {key: value for key, value in merged.items() if value != "absent"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (config({"kv_lora_rank": "absent"}), "kv_lora_rank is missing"),
        (config({"q_lora_rank": None}), "q_lora_rank is missing"),
        (config({"qk_rope_head_dim": 3}), "qk_rope_head_dim is 3; rotary positions need an even one"),
        (config({"attention_bias": True}), "attention_bias is True; latent attention has none"),
        (config({"mla_use_output_gate": True}), "mla_use_output_gate is True"),
        (config(mla_use_output_gate=True), r"dflash_config\.mla_use_output_gate is True"),
        (config({"mla_use_nope": True}), "mla_use_nope is True"),
        (config(attention_sink_bias=True), "neither sinks nor a value scale"),
        (config(attention_value_scale=0.5), "neither sinks nor a value scale"),
        (config(attention_mode="gqa"), "kv_lora_rank belongs to latent attention"),
        (config({"attention_mode": "gqa"}), r"attention_mode is 'mla' and the top-level attention_mode is 'gqa'"),
        (config(sample_from_anchor=True, markov_rank=4), "markov_rank belongs to DSpark"),
    ],
)
def test_refusals(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        contract_from_config(changed, "c")


def test_pairings_in_every_spelling_must_agree() -> None:
    """Absent means interleaved pairs, whatever z-lab's dense drafters mean by its absence."""
    assert not contract_from_config(config(), "c").is_neox_style
    assert not contract_from_config(config({"rope_interleave": True}, mla_rope_interleaved=True), "c").is_neox_style
    for changed in (config({"is_neox_style": True}), config(mla_rope_interleaved=False)):
        assert contract_from_config(changed, "c").is_neox_style
    with pytest.raises(CheckpointError, match="is 'split halves' and the top-level is_neox_style is 'interleaved"):
        contract_from_config(config({"is_neox_style": False}, mla_rope_interleaved=False), "c")


def test_the_sliding_layers_of_the_public_shape() -> None:
    """Four sliding layers and a full one, bidirectional; the taps and the window are Kimi-K3's."""
    public = config(
        {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 4096}
    )
    contract = contract_from_config(public, "c")
    assert contract.layer_windows == (4096,) * 4 + (None,) and contract.layer_causal == (False,) * 5
    assert contract.rotary_size == 4 and contract.latent is not None and contract.latent.latent_size == 20


def test_its_checkpoint_fills_a_drafter(tmp_path: Any) -> None:
    files = read_drafter(write_folder(tmp_path / "drafter", load_golden(NAME), tiny_tensors(NAME)))
    drafter = empty_drafter(files.contract, torch.float32, torch.device("cpu"))
    assert isinstance(drafter, DFlash2Drafter)
    assert isinstance(drafter.backbone.layers[1].self_attn, LatentAttention)
    assert {name for name in files.source.names() if "proj" in name and ".self_attn." in name} == {
        f"layers.{layer}.self_attn.{part}.weight"
        for layer in range(2)
        for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    }


def test_a_dense_drafters_weights_are_not_taken_for_latent_ones(tmp_path: Any) -> None:
    folder = write_folder(tmp_path / "drafter", load_golden(NAME), tiny_tensors("zlab-dflash2"))
    with pytest.raises(CheckpointError, match="with kv_a_proj_with_mqa"):
        read_drafter(folder)
    save_file(tiny_tensors(NAME), folder / "model.safetensors")
    read_drafter(folder)


def test_written_contract_reads_back_the_same() -> None:
    contract = full_contract(NAME)
    for changes in ({}, {"is_neox_style": True}, {"has_tap_norm": True, "aux_hidden_stream": "attn_res"}):
        changed = dataclasses.replace(contract, **changes)
        written = write_drafter_config(changed)
        assert written["dflash_config"]["attention_mode"] == "mla" and written["kv_lora_rank"] == 16
        names = [slot.name for slot in drafter_slots(changed)]
        assert contract_from_config(written, "c", names) == changed
    with pytest.raises(CheckpointError, match="attention_value_scale"):
        write_drafter_config(dataclasses.replace(contract, attention_value_scale=2.0))
