"""DeepSpec's flat configs and the native form of DSpark: spellings, heads, the target's leftovers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from tests.unit.checkpoint.dialects.conftest import full_contract, load_golden
from tests.unit.checkpoint.dialects.strategies import contracts

from paceline.checkpoint.contract import ConfidenceSettings, DrafterContract, MarkovSettings
from paceline.checkpoint.dialects import contract_from_config, detect_dialect, file_names, write_drafter_config
from paceline.errors import CheckpointError


def config(**changes: Any) -> dict[str, Any]:
    merged = load_golden("deepspec-dspark") | changes
    return {key: value for key, value in merged.items() if value != "absent"}


_RENAMED = {
    "target_layer_ids": "dspark_target_layer_ids",
    "mask_token_id": "dspark_noise_token_id",
    "block_size": "dspark_block_size",
    "markov_rank": "dspark_markov_rank",
}


def test_report_b32_flat_nested_and_prefixed_spellings_resolve_alike() -> None:
    flat = config()
    expected = contract_from_config(flat, "c")
    prefixed = {_RENAMED.get(key, key): value for key, value in flat.items()}
    nested = {key: value for key, value in flat.items() if key not in _RENAMED}
    nested["dflash_config"] = {key: flat[key] for key in _RENAMED}
    both = flat | {new: flat[old] for old, new in _RENAMED.items()}
    for spelled in (prefixed, nested, both):
        assert contract_from_config(spelled, "c") == expected
    for old in _RENAMED:
        with pytest.raises(CheckpointError, match=f"{old} is missing"):
            contract_from_config(config(**{old: "absent"}), "c")


@pytest.mark.parametrize(("old", "new"), list(_RENAMED.items()))
def test_contradicting_spellings_are_refused(old: str, new: str) -> None:
    wrong = [1, 9, 17, 25, 34] if old == "target_layer_ids" else config()[old] + 1
    with pytest.raises(CheckpointError, match=f"the top-level {old} is .* and the top-level {new} is"):
        contract_from_config(config(**{new: wrong}), "c")


def test_mask_id_sources_in_order_and_in_agreement() -> None:
    """Nested, flat, DeepSeek's name: any one of them will do, all that are there must agree, none is no id."""
    for place in (
        {"dflash_config": {"mask_token_id": 5}},
        {"mask_token_id": 5},
        {"dspark_noise_token_id": 5},
        {"dflash_config": {"dspark_noise_token_id": 5}},
    ):
        found = contract_from_config(config(**({"mask_token_id": "absent"} | place)), "c")
        assert found.mask_token_id == 5
    with pytest.raises(CheckpointError, match="mask_token_id is missing") as caught:
        contract_from_config(config(mask_token_id="absent", eos_token_id=2, pad_token_id=0), "c")
    assert "no substitute" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "confidence"),
    [
        ({"confidence_head_alpha": 1.0}, ConfidenceSettings(True)),
        ({"confidence_head_alpha": 0.0}, None),
        ({"enable_confidence_head": True}, ConfidenceSettings(True)),
        ({"enable_confidence_head": False}, None),
        ({}, None),
        ({"confidence_head_alpha": 1.0, "confidence_head_with_markov": False}, ConfidenceSettings(False)),
    ],
)
def test_confidence_head(changes: dict[str, Any], confidence: ConfidenceSettings | None) -> None:
    plain = {"confidence_head_alpha": "absent", "enable_confidence_head": "absent"}
    assert contract_from_config(config(**(plain | changes)), "c").confidence == confidence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_confidence_head": False}, "enable_confidence_head is False and confidence_head_alpha is 1.0"),
        ({"confidence_head_with_markov": "absent"}, "confidence_head_with_markov is missing"),
        ({"confidence_head_alpha": "high"}, "confidence_head_alpha is 'high'"),
        ({"markov_head_type": "absent"}, "markov_head_type is missing"),
        ({"markov_rank": 0}, "markov_rank is 0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "of the DeepSpec layout have 'full_attention' only"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor is True"),
        ({"sample_from_anchor": False, "dspark_bonus_anchor": False}, "dspark_bonus_anchor is False"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state is False"),
        ({"target_layer_ids": [1, 9, 17, 25, 35]}, "35 is the last layer"),
        ({"num_target_layers": 5}, "the target's depth must be that of the target"),
        ({"n_mtp_layers": 3}, "DeepSeek-V4"),
        ({"attention_k_eq_v": True}, "Gemma 4"),
        ({"conv_kernel_size": 2}, "belongs to DFlash2"),
        ({"eagle_config": {}}, "belongs to EAGLE-3"),
        ({"paceline": {"other": 1}}, "paceline.other"),
        ({"rope_theta": "absent"}, "names no rope_theta"),
        ({"is_causal": True}, "is_causal is True; supported is False or None"),  # of the target, never of the drafter
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias is True; supported is False or None"),
        ({"is_causal": True, "dflash_config": None}, "is_causal is True; supported is False or None"),
        ({"paceline": {"target_num_layers": 35}}, r"paceline\.target_num_layers is 35 and .* is 36"),
        ({"paceline": {"num_draft_tokens": 6}}, r"paceline\.num_draft_tokens is 6 and .* is 7"),
        ({"paceline": {"mask_token_id": 5}}, r"paceline\.mask_token_id is 5 and .* is 126"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        contract_from_config(config(**changes), "c")
    del caught


def test_refusal_hints_reach_the_reader() -> None:
    with pytest.raises(CheckpointError) as caught:
        contract_from_config(config(num_target_layers=5), "c")
    assert "not the number of taps" in str(caught.value)


def test_layouts() -> None:
    assert contract_from_config(config(), "c").layout == "anchor_sampling"
    fill_in = contract_from_config(config(sample_from_anchor=False), "c")
    assert fill_in.layout == "fill_in" and fill_in.num_draft_tokens == 6
    assert contract_from_config(config(sample_from_anchor=False, dspark_bonus_anchor=True), "c") == fill_in


def test_rank_0_is_dspark_without_a_head() -> None:
    """DeepSpec's "DFlash" is not z-lab's: every row is sampled."""
    contract = contract_from_config(load_golden("deepspec-dflash"), "c")
    assert contract.family == "dspark" and contract.markov is None and contract.num_draft_tokens == 7


def test_the_targets_leftovers_have_no_effect() -> None:
    """The config is a copy of the target's: window and layer types of 36 layers, its tied head."""
    plain = contract_from_config(config(layer_types="absent", tie_word_embeddings=False), "c")
    assert contract_from_config(config(), "c") == plain
    assert contract_from_config(config(sliding_window=4096, use_sliding_window=False), "c") == plain
    assert contract_from_config(config(is_causal=False, add_swa_attention_sink_bias=False), "c") == plain
    assert contract_from_config(config(dflash_config=None, sliding_window=4096), "c") == plain


def test_causality_and_sinks_are_the_native_forms_own() -> None:
    native = load_golden("native-dspark")
    del native["dflash_config"]["causal"]
    found = contract_from_config(native | {"is_causal": True, "add_swa_attention_sink_bias": True}, "c")
    assert found.layer_causal == (True, True) and found.has_attention_sink


def test_native_form_is_flat_for_others_and_complete_for_us() -> None:
    contract = full_contract("native-dspark")
    written = write_drafter_config(contract)
    assert written["architectures"] == ["Qwen3DSparkModel"] and detect_dialect(written, "c") == "zlab"
    for key in ("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "sample_from_anchor"):
        assert key in written, key
    with pytest.raises(CheckpointError) as caught:
        write_drafter_config(contract, "deepspec")
    for field in ("input_embedding_scale 2.0", "draft_top_k 5", "layout 'fill_in'", "has_tap_norm True"):
        assert field in caught.value.message, field


def test_deepspecs_own_form_has_no_nested_object() -> None:
    contract = full_contract("deepspec-dspark")
    written = write_drafter_config(contract, "deepspec")
    assert detect_dialect(written, "c") == "deepspec" and "dflash_config" not in written
    assert contract.markov == MarkovSettings(6, "vanilla")


@given(contract=contracts("dspark"))
def test_written_contract_reads_back_the_same(contract: DrafterContract) -> None:
    names = file_names(contract).values()
    assert contract_from_config(write_drafter_config(contract), "c", names) == contract
