"""EAGLE-3 in the two forms that share their architecture strings: the form decides what a key means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from tests.unit.checkpoint.dialects.conftest import load_golden
from tests.unit.checkpoint.dialects.strategies import contracts

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import contract_from_config, detect_dialect, file_names, write_drafter_config
from paceline.errors import CheckpointError

KEY = "eagle_aux_hidden_state_layer_ids"


def specforge(**changes: Any) -> dict[str, Any]:
    return load_golden("specforge-eagle3") | changes


def native(**changes: Any) -> dict[str, Any]:
    return load_golden("native-eagle3") | changes


def test_ids_are_numbered_by_where_they_stand() -> None:
    """The same list at the top level is one layer earlier than inside `eagle_config` (report B01)."""
    inner = specforge()
    assert contract_from_config(inner, "c").target_layer_ids == (1, 17, 32)
    assert detect_dialect(inner, "c") == "specforge"
    outer = specforge(eagle_config={}, **{KEY: [1, 17, 32]})
    assert contract_from_config(outer, "c").target_layer_ids == (0, 16, 31)
    assert detect_dialect(outer, "c") == "zlab"
    both = specforge(**{KEY: [2, 18, 33]})
    assert contract_from_config(both, "c").target_layer_ids == (1, 17, 32)
    with pytest.raises(CheckpointError, match=r"outputs of layers \[0, 16, 31\] and eagle_config.*\[1, 17, 32\]"):
        contract_from_config(specforge(**{KEY: [1, 17, 32]}), "c")


def test_missing_ids_are_refused() -> None:
    with pytest.raises(CheckpointError, match=f"eagle_config.{KEY} is missing") as caught:
        contract_from_config(specforge(eagle_config={}), "c")
    assert "[1, L/2 - 1, L - 4]" in str(caught.value)


def test_norm_output_means_two_things() -> None:
    in_specforge = contract_from_config(specforge(norm_output=True), "c").eagle3
    assert in_specforge is not None and in_specforge.norm_output is False
    with pytest.raises(CheckpointError, match="before the final norm"):
        contract_from_config(specforge(norm_output=False), "c")
    for value in (True, False):
        elsewhere = contract_from_config(native(norm_output=value), "c").eagle3
        assert elsewhere is not None and elsewhere.norm_output is value
    # neither form for sure: taps as in vLLM's, tensors as in SpecForge's
    with pytest.raises(CheckpointError, match="midlayer"):
        contract_from_config(specforge(**{KEY: [2, 18, 33]}), "c", _stored())
    without = specforge(**{KEY: [2, 18, 33]})
    del without["norm_output"]
    assert contract_from_config(without, "c", _stored()).target_layer_ids == (1, 17, 32)


def _stored() -> list[str]:
    contract = contract_from_config(specforge(), "c")
    names = [name.replace("layers.0.", "midlayer.") for name in file_names(contract, "zlab").values()]
    return [*names, "lm_head.weight", "d2t", "t2d"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_aux_hidden_states": 5}, "num_aux_hidden_states is 5 and the number of ids"),
        ({"num_aux_layers": 2}, "num_aux_layers is 2"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 9}, "of the Llama flavour has 'full_attention' only"),
        ({"pard_token": 5}, "pard_token belongs to P-EAGLE"),
        ({"ptd_token_id": 5}, "ptd_token_id belongs to P-EAGLE"),
        ({"mask_token_id": 5}, "unknown config key mask_token_id"),
        ({"markov_rank": 5}, "markov_rank belongs to DSpark"),
        ({"norm_before_fc": False}, "eagle_config.norm_before_fc is True and the top-level norm_before_fc is False"),
        ({"fc_norm": True}, "norm_before_fc and fc_norm are both true"),
        ({"is_causal": False}, "is_causal is False"),
        ({"draft_vocab_size": 129}, "more than the 128 ids"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        contract_from_config(specforge(**change), "c")


def test_eagle1_is_refused() -> None:
    config = specforge()
    config["eagle_config"]["use_aux_hidden_state"] = False
    with pytest.raises(CheckpointError, match="use_aux_hidden_state is False"):
        contract_from_config(config, "c")


def test_per_tap_norm_in_the_nested_object_is_read() -> None:
    """Report B06: a flag of the nested object that nobody read."""
    config = specforge()
    config["eagle_config"] = {KEY: [1, 17, 32], "fc_norm": True}
    assert contract_from_config(config, "c").has_tap_norm
    config["eagle_config"] = {KEY: [1, 17, 32], "norm_before_fc": True}
    switches = contract_from_config(config, "c").eagle3
    assert switches is not None and switches.norm_before_fc


def test_trained_steps() -> None:
    assert contract_from_config(specforge(), "c").num_draft_tokens == 7
    assert contract_from_config(specforge(ttt_length=5), "c").num_draft_tokens == 5
    with pytest.raises(CheckpointError, match=r"ttt_length is 7 and paceline.num_draft_tokens is 5"):
        contract_from_config(native(ttt_length=7), "c")


def test_depth_said_twice() -> None:
    config = native()
    config["paceline"]["target_num_layers"] = 35
    with pytest.raises(CheckpointError, match=r"num_target_layers is 36 and paceline.target_num_layers is 35"):
        contract_from_config(config, "c")
    del config["num_target_layers"]
    assert contract_from_config(config, "c").target_num_layers == 35


@pytest.mark.parametrize(
    ("architecture", "has_qk_norm"),
    [("LlamaForCausalLMEagle3", False), ("Eagle3LlamaForCausalLM", False), ("Eagle3Qwen3ForCausalLM", True)],
)
def test_flavours(architecture: str, has_qk_norm: bool) -> None:
    config = specforge(architectures=[architecture], model_type="qwen3" if has_qk_norm else "llama")
    assert contract_from_config(config, "c").has_qk_norm is has_qk_norm
    config["model_type"] = "llama" if has_qk_norm else "qwen3"
    with pytest.raises(CheckpointError, match="and its model_type is"):
        contract_from_config(config, "c")


def test_native_form_serves_both_kinds_of_engines() -> None:
    """Engine ids at the top level, output ids inside `eagle_config`, every switch explicit."""
    config = write_drafter_config(contract_from_config(native(), "c"))
    assert config[KEY] == [2, 18, 33] and config["eagle_config"][KEY] == [1, 17, 32]
    for switch in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"):
        assert isinstance(config[switch], bool)


@given(contract=contracts("eagle3"))
def test_written_contract_reads_back_the_same(contract: DrafterContract) -> None:
    config = write_drafter_config(contract)
    assert contract_from_config(config, contract.origin, file_names(contract).values()) == contract
