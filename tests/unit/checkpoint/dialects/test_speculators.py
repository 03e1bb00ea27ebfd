"""The speculators layout: engine ids, causality per layer, and what its config object promises."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.unit.checkpoint.dialects.conftest import full_contract, load_golden, with_change

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import contract_from_config, file_names, write_drafter_config
from paceline.errors import CheckpointError

METHODS = ("dflash", "dflash2", "dspark", "eagle3")


def golden(method: str, *path: str, value: Any = "absent") -> dict[str, Any]:
    config = load_golden(f"speculators-{method}")
    return with_change(config, path, None if value == "absent" else lambda _: value) if path else config


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize(
    ("types", "non_causal", "causal"),
    [
        (["sliding_attention", "full_attention"], False, (True, False)),
        (["sliding_attention", "full_attention"], True, (False, False)),
        (["full_attention", "full_attention"], False, (False, False)),  # other engines serve this one causally
        (["sliding_attention", "sliding_attention"], False, (True, True)),
    ],
)
def test_only_sliding_layers_are_causal_and_the_flag_is_honoured(
    method: str, types: list[str], non_causal: bool, causal: tuple[bool, ...]
) -> None:
    config = golden(method, "sliding_window_non_causal", value=non_causal)
    config["transformer_layer_config"]["layer_types"] = types
    contract = contract_from_config(config, "c")
    assert contract.layer_causal == causal
    assert contract.layer_windows == tuple(64 if kind == "sliding_attention" else None for kind in types)


@pytest.mark.parametrize(("method", "causal"), [("dflash", True), ("dflash2", False), ("dspark", True)])
def test_absent_flag_means_the_classes_own_default(method: str, causal: bool) -> None:
    contract = contract_from_config(golden(method, "sliding_window_non_causal"), "c")
    assert contract.layer_causal == (causal, False)


def test_written_flag_keeps_full_layers_bidirectional_elsewhere() -> None:
    """Engines turn a false flag into a causal whole drafter; where nothing is causal, true is written."""
    contract = dataclasses.replace(
        full_contract("speculators-dflash"), layer_windows=(None, None), layer_causal=(False, False)
    )
    assert write_drafter_config(contract, "speculators")["sliding_window_non_causal"] is True
    mixed = dataclasses.replace(contract, layer_windows=(64, None), layer_causal=(True, False))
    assert write_drafter_config(mixed, "speculators")["sliding_window_non_causal"] is False
    for causal in ((True, True), (False, True)):
        with pytest.raises(CheckpointError, match="cannot state layer_causal"):
            write_drafter_config(dataclasses.replace(mixed, layer_causal=causal), "speculators")


@pytest.mark.parametrize(("method", "default"), [("dflash", "fill_in"), ("dspark", "anchor_sampling")])
def test_absent_sample_from_anchor(method: str, default: str) -> None:
    assert contract_from_config(golden(method, "sample_from_anchor"), "c").layout == default


def test_taps_mirror_must_agree() -> None:
    config = golden("dflash", "target_layer_ids", value=[2, 10, 18, 26, 34])  # the planted fault: not shifted
    with pytest.raises(CheckpointError) as caught:
        contract_from_config(config, "c")
    assert "outputs of layers [1, 9, 17, 25, 33]" in caught.value.message
    assert "those of [2, 10, 18, 26, 34]" in caught.value.message


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 2], None),  # the embedding
        ([2, 1], "ascending"),
        ([2, 2], "ascending"),
        ([-1, 2], r"legal are 0 \(the embedding\) to the last layer but one"),
        (None, r"falls back to the hidden states \[2, L/2, L - 3\]"),
    ],
)
def test_engine_ids(ids: list[int] | None, message: str | None) -> None:
    config = golden("dspark", "aux_hidden_state_layer_ids", value=ids)
    if message is None:
        assert contract_from_config(config, "c").target_layer_ids == (-1, 1)
        return
    with pytest.raises(CheckpointError) as caught:
        contract_from_config(config, "c")
    import re

    assert re.search(message, str(caught.value))


def test_last_layer_is_refused_where_the_depth_is_known() -> None:
    config = write_drafter_config(
        dataclasses.replace(full_contract("speculators-dflash"), target_num_layers=36), "speculators"
    )
    del config["paceline"]["target_num_layers"]
    config["aux_hidden_state_layer_ids"] = [2, 36]
    assert contract_from_config(config, "c").target_layer_ids == (1, 35)  # found out when it meets its target
    config["paceline"]["target_num_layers"] = 36
    with pytest.raises(CheckpointError, match=r"legal are 0 .* to 35 .*36 is the last layer"):
        contract_from_config(config, "c")


@pytest.mark.parametrize(
    ("method", "path", "value", "message"),
    [
        ("dflash", ("speculators_model_type",), "peagle", "P-EAGLE"),
        ("dflash", ("speculators_model_type",), "xpress", "XPress"),
        ("dflash", ("speculators_model_type",), "mtp", "multi-token prediction"),
        ("dflash", ("speculators_model_type",), None, "supported are dflash, dflash2, dspark, eagle3"),
        ("dflash", ("speculators_model_type",), "dflash2", "architectures is .'DFlashDraftModel'. and"),
        ("dflash", ("architectures",), ["DFlash2DraftModel"], "its architecture is DFlashSpeculator"),
        ("dflash", ("speculators_config", "algorithm"), "dspark", "algorithm is 'dspark'"),
        ("dflash", ("speculators_config", "proposal_methods"), [], "expected a list of one object"),
        ("dflash", ("speculators_config", "default_proposal_method"), "tree", "supported is 'greedy'"),
        ("dflash", ("draft_vocab_size",), None, "draft_vocab_size is missing"),
        ("dflash", ("target_num_layers",), 36, "unknown config key target_num_layers"),
        ("dflash2", ("draft_vocab_size",), 64, "a DFlash2 selector has the full vocabulary"),
        ("dflash2", ("selector_rank",), None, "selector_rank is missing"),
        ("dspark", ("markov_rank",), None, "markov_rank is missing"),
        ("dspark", ("markov_head_type",), "linear", "legal are vanilla, gated, rnn"),
        ("dspark", ("markov_rank",), 0, "confidence_head_with_markov is true, and markov_rank is 0"),
        ("eagle3", ("norm_before_residual",), None, "norm_before_residual is missing"),
        ("eagle3", ("fc_norm",), True, "norm_before_fc and fc_norm are both true"),
        ("eagle3", ("transformer_layer_config", "model_type"), "gpt2", "supported are 'llama' and 'qwen3'"),
        ("eagle3", ("mask_token_id",), 5, "unknown config key mask_token_id"),
        ("dflash", ("conv_kernel_size",), 2, "conv_kernel_size belongs to DFlash2"),
        ("dflash", ("markov_rank",), 4, "markov_rank belongs to DSpark"),
        ("dflash", ("dflash_config",), {"causal": False}, "unknown config key dflash_config"),
        ("dflash", ("paceline",), {"other": 1}, "unknown config key paceline.other"),
        ("dflash", ("transformer_layer_config", "sliding_window"), None, "sliding_window is None"),
        ("dflash", ("transformer_layer_config", "is_causal"), True, r"is_causal is True and .* is \[True, False\]"),
        ("eagle3", ("transformer_layer_config", "is_causal"), False, r"is_causal is False and .* is \[True, True\]"),
        ("dflash", ("transformer_layer_config", "quantization_config"), {"quant_method": "fp8"}, "supported is None"),
        ("dflash", ("paceline",), {"target_vocab_size": 99}, r"paceline\.target_vocab_size is 99 and .* is 128"),
        ("dflash", ("paceline",), {"num_draft_tokens": 3}, r"paceline\.num_draft_tokens is 3 and .* is 7"),
        ("dflash", ("paceline",), {"mask_token_id": 5}, r"paceline\.mask_token_id is 5 and .* is 126"),
        ("eagle3", ("paceline",), {"num_draft_tokens": 4}, r"paceline\.num_draft_tokens is 4 and .* is 3"),
        ("dflash", ("paceline",), {"target_name": "a/b"}, r"name_or_path is 'Qwen/Qwen3-8B' and paceline\.target_name"),
    ],
)
def test_refusals(method: str, path: tuple[str, ...], value: object, message: str) -> None:
    config = golden(method)
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(CheckpointError, match=message):
        contract_from_config(config, "c")


@pytest.mark.parametrize(
    ("key", "value"), [("verifier_accept_k", 5), ("accept_tolerance", 0.5), ("proposal_type", "tree")]
)
def test_acceptance_that_is_not_lossless_is_refused(key: str, value: object) -> None:
    config = golden("dflash")
    config["speculators_config"]["proposal_methods"][0][key] = value
    with pytest.raises(CheckpointError, match=rf"{key} is {value!r}"):
        contract_from_config(config, "c")


def test_number_of_proposals_and_block_must_fit() -> None:
    config = golden("dspark")
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 9
    with pytest.raises(CheckpointError, match=r"speculative_tokens is 9 and .* 8"):
        contract_from_config(config, "c")
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 5  # fewer are always legal
    assert contract_from_config(config, "c").num_draft_tokens == 8


def test_every_field_of_the_classes_is_written() -> None:
    """All fields of the pydantic classes, defaults too: readers differ in them."""
    common = {
        "speculators_model_type",
        "speculators_version",
        "speculators_config",
        "architectures",
        "draft_vocab_size",
    }
    common |= {"transformer_layer_config", "target_hidden_size"}
    block = {"block_size", "aux_hidden_state_layer_ids", "mask_token_id", "sliding_window_non_causal"}
    block |= {"sample_from_anchor"}
    of_method = {
        "dflash": block,
        "dflash2": block | {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"},
        "dspark": block | {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"},
        "eagle3": {
            "eagle_aux_hidden_state_layer_ids",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
        },
    }
    for method in METHODS:
        contract = _with_target(full_contract(f"speculators-{method}"))
        config = write_drafter_config(contract, "speculators")
        assert common | of_method[method] <= set(config), method
        assert contract_from_config(config, "c", file_names(contract, "speculators").values()) == contract
        native = write_drafter_config(contract)
        assert contract_from_config(native, "c", file_names(contract).values()) == contract


def _with_target(contract: DrafterContract) -> DrafterContract:
    return dataclasses.replace(contract, target_num_layers=36)
