"""The z-lab dialect: read strictly, written in full, read back the same."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from tests.unit.checkpoint.dialects.strategies import contracts

from paceline.checkpoint.contract import (
    ConvolutionSettings,
    DrafterContract,
    MarkovSettings,
    RopeSettings,
    SelectorSettings,
    TargetLayerId,
)
from paceline.checkpoint.dialects import (
    contract_from_config,
    file_names,
    read_drafter_contract,
    write_drafter_config,
)
from paceline.errors import CheckpointError

WriteConfig = Callable[[dict[str, Any]], Path]


def public_config(**changes: Any) -> dict[str, Any]:
    """As z-lab publishes: Qwen3 top level, short nested part."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 16,
        "bos_token_id": 151643,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 40960,
        "max_window_layers": 5,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 36,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return {key: value for key, value in (config | changes).items() if value != "absent"}


def with_nested(**changes: Any) -> dict[str, Any]:
    nested = public_config()["dflash_config"] | changes
    return public_config(dflash_config={key: value for key, value in nested.items() if value != "absent"})


def test_public_shape_is_read(write_config: WriteConfig) -> None:
    folder = write_config(public_config())
    contract = read_drafter_contract(folder)
    assert contract == DrafterContract(
        family="dflash",
        origin=str(folder / "config.json"),
        target_name="",
        target_num_layers=36,
        target_hidden_size=4096,
        target_vocab_size=151936,
        target_layer_ids=tuple(TargetLayerId(tap) for tap in (1, 9, 17, 25, 33)),
        aux_hidden_stream="prefix",
        has_tap_norm=False,
        block_size=16,
        layout="fill_in",
        mask_token_id=151669,
        vocab_size=151936,
        draft_vocab_size=151936,
        num_layers=5,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        rms_norm_eps=1e-6,
        attention_bias=False,
        rope=RopeSettings(theta=1e6),
        is_neox_style=True,
        max_position_embeddings=40960,
        layer_windows=(None,) * 5,
        layer_causal=(False,) * 5,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        draft_sample_method="greedy",
        dtype="bfloat16",
    )
    assert contract.num_draft_tokens == 15 and contract.num_taps == 5


def test_flat_and_nested_spellings_resolve_alike() -> None:
    nested = contract_from_config(with_nested(block_size=16), "c")
    flat = public_config(target_layer_ids=[1, 9, 17, 25, 33], mask_token_id=151669, dflash_config={})
    assert contract_from_config(flat, "c") == nested == contract_from_config(public_config(), "c")


@pytest.mark.parametrize(
    ("config", "first", "second"),
    [
        (with_nested(block_size=8), "8", "16"),
        (public_config(mask_token_id=5), "151669", "5"),
        (public_config(target_layer_ids=[1, 9, 17, 25, 34]), "33", "34"),
        (public_config(fc_norm=True) | {"dflash_config": with_nested(fc_norm=False)["dflash_config"]}, "False", "True"),
    ],
)
def test_two_places_that_differ_are_refused_with_both_values(config: dict[str, Any], first: str, second: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        contract_from_config(config, "c")
    assert first in caught.value.message and second in caught.value.message and "dflash_config." in caught.value.message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_nested(mask_token_id="absent"), "mask_token_id is missing"),
        (with_nested(mask_token_id=-1), "mask_token_id is -1"),
        (with_nested(mask_token_id=151936), "mask_token_id is 151936, the vocabulary has 151936 ids"),
        (with_nested(target_layer_ids="absent"), "target_layer_ids is missing"),
        (with_nested(target_layer_ids=[]), r"target_layer_ids is \[\]"),
        (with_nested(target_layer_ids=[1, 17, 9]), "each once and in ascending order"),
        (with_nested(target_layer_ids=[1, 9, 9]), "each once and in ascending order"),
        (with_nested(target_layer_ids=[1, 35]), "legal are -1 .* to 34 .* 35 is the last layer"),
        (with_nested(target_layer_ids=[1, 36]), "legal are -1"),
        (with_nested(target_layer_ids=[-2, 3]), "legal are -1"),
        (with_nested(target_layer_ids=[1.0, 3]), "expected a list of layer numbers"),
        (public_config(block_size="absent"), "block_size is missing"),
        (public_config(block_size=1), "block_size is 1"),
        (public_config(rope_theta="absent"), "names no rope_theta"),
        (public_config(num_target_layers="absent"), "num_target_layers is missing"),
        (public_config(num_target_layers=5), "legal are -1"),
        (public_config(head_dim="absent"), "head_dim is missing"),
        (public_config(head_dim=63), "needs? an even one"),
        (public_config(dtype="absent"), "dtype is None"),
        (public_config(draft_vocab_size=151937), "draft_vocab_size is 151937, more than the 151936"),
        (public_config(num_key_value_heads=5), "not a multiple of num_key_value_heads 5"),
        (public_config(layer_types=["sliding_attention"] * 5), "are sliding and sliding_window is None"),
        (public_config(layer_types=["sliding_attention"] * 5, sliding_window=64), "use_sliding_window true"),
        (with_nested(aux_hidden_stream="suffix"), "aux_hidden_stream is 'suffix'; legal are prefix and attn_res"),
        (with_nested(draft_sample_method="beam"), "legal are greedy and probabilistic"),
        (with_nested(final_logit_softcapping=-3.0), "final_logit_softcapping is -3.0"),
        (with_nested(output_multiplier=0), "output_multiplier is 0"),
        (public_config(dflash_config=[1]), r"dflash_config is \[1\]"),
    ],
)
def test_refusals_name_the_value(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        contract_from_config(config, "where/config.json")
    assert "where/config.json" in str(caught.value)
    import re

    assert re.search(message, str(caught.value), re.S), str(caught.value)


def test_missing_taps_suggest_the_default_of_that_depth() -> None:
    with pytest.raises(CheckpointError, match="trained") as caught:
        contract_from_config(with_nested(target_layer_ids="absent"), "c")
    assert "[1, 9, 17, 25, 33]" in str(caught.value)


def test_embedding_may_be_tapped() -> None:
    assert contract_from_config(with_nested(target_layer_ids=[-1, 5, 34]), "c").target_layer_ids == (-1, 5, 34)


def test_options_reach_the_contract() -> None:
    config = public_config(
        is_neox_style=False,
        attention_bias=True,
        is_causal=True,
        target_hidden_size=2048,
        dflash_config=public_config()["dflash_config"]
        | {
            "fc_norm": True,
            "aux_hidden_stream": "attn_res",
            "sample_from_anchor": True,
            "input_embedding_scale": 2.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 30,
            "draft_sample_method": "probabilistic",
            "target_name": "somebody/target",
            "target_vocab_size": 151000,
        },
    )
    found = contract_from_config(config, "c")
    assert not found.is_neox_style and found.attention_bias and found.layer_causal == (True,) * 5
    assert found.has_tap_norm and found.aux_hidden_stream == "attn_res" and found.layout == "anchor_sampling"
    assert found.num_draft_tokens == 16
    assert (found.input_embedding_scale, found.output_multiplier, found.final_logit_softcapping) == (2.0, 0.5, 30.0)
    assert found.draft_sample_method == "probabilistic" and found.target_name == "somebody/target"
    assert found.target_hidden_size == 2048 and found.target_vocab_size == 151000


@pytest.mark.parametrize("off", [0, 0.0, None])
def test_soft_cap_of_zero_or_null_is_off(off: float | None) -> None:
    assert contract_from_config(with_nested(final_logit_softcapping=off), "c").final_logit_softcapping is None


@given(contract=contracts("dflash") | contracts("dflash2"))
def test_written_contract_reads_back_the_same(contract: DrafterContract) -> None:
    text = json.dumps(write_drafter_config(contract), allow_nan=False)
    names = file_names(contract).values()
    assert contract_from_config(json.loads(text), "c", names) == contract


def test_every_optional_field_is_written(make_drafter: Callable[..., DrafterContract]) -> None:
    written = write_drafter_config(make_drafter())
    for key in (
        "is_causal",
        "is_neox_style",
        "layer_types",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "block_size",
    ):
        assert key in written, key
    for key in (
        "causal",
        "fc_norm",
        "aux_hidden_stream",
        "sample_from_anchor",
        "final_logit_softcapping",
        "block_size",
    ):
        assert key in written["dflash_config"], key
    # a field that is forgotten on writing would come back as its default
    flipped = make_drafter(is_neox_style=False, has_tap_norm=False, draft_sample_method="probabilistic")
    assert contract_from_config(write_drafter_config(flipped), flipped.origin) == flipped


def test_transformers_can_read_what_is_written(tmp_path: Path, make_drafter: Callable[..., DrafterContract]) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(write_drafter_config(make_drafter())))
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.dflash_config["target_layer_ids"] == [0, 2]
    assert config.rope_parameters["rope_theta"] == 100000.0


def test_missing_damaged_and_wrong_folders(tmp_path: Path, write_config: WriteConfig) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_drafter_contract(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_drafter_contract(tmp_path)
    folder = write_config(public_config(architectures=["Qwen3ForCausalLM"], dflash_config="absent"))
    with pytest.raises(CheckpointError, match=r"is a model of its own \(Qwen3ForCausalLM\), not a drafter"):
        read_drafter_contract(folder)
    (folder / "config.json").write_text('{"architectures": ')
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        read_drafter_contract(folder)
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_drafter_contract(folder / "config.json")


def test_contract_fields_are_all_compared(make_drafter: Callable[..., DrafterContract]) -> None:
    """A field that `write_drafter_config` leaves out must break the round trip: every field is reached by it."""
    written = json.dumps(write_drafter_config(make_drafter()))
    changed = {
        "target_name": "other",
        "target_num_layers": 9,
        "target_hidden_size": 16,
        "target_vocab_size": 63,
        "block_size": 4,
        "mask_token_id": 6,
        "hidden_size": 64,
        "intermediate_size": 41,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "max_position_embeddings": 256,
        "input_embedding_scale": 2.0,
        "output_multiplier": 2.0,
        "final_logit_softcapping": 5.0,
        "dtype": "float32",
    }
    for field, value in changed.items():
        contract = dataclasses.replace(make_drafter(), **{field: value})
        assert json.dumps(write_drafter_config(contract)) != written, field


def dflash2_config(**changes: Any) -> dict[str, Any]:
    fields = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    config = public_config(architectures=["DFlash2DraftModel"])
    config["dflash_config"] |= fields | changes
    config["dflash_config"] = {key: value for key, value in config["dflash_config"].items() if value != "absent"}
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dflash2_config(conv_kernel_size="absent"), "conv_kernel_size is missing"),
        (dflash2_config(selector_top_k="absent"), "selector_top_k is missing"),
        (dflash2_config(conv_kernel_size=17), "conv_kernel_size is 17, more than the 16 rows"),
        (dflash2_config(conv_group_size=24), "conv_group_size 24 does not divide hidden_size 4096"),
        (dflash2_config(selector_top_k=151937), "selector_top_k is 151937"),
        (dflash2_config() | {"draft_vocab_size": 32000}, "draft_vocab_size is 32000; a DFlash2 selector has the full"),
        (dflash2_config() | {"architectures": ["DFlashDraftModel"]}, "conv_group_size belongs to DFlash2"),
        (public_config(architectures=["DFlash2DraftModel"]), "conv_kernel_size is missing"),
        (dflash2_config(attention_mode="mla"), "q_lora_rank is missing"),
        (dflash2_config(attention_mode="mha", q_lora_rank=24), "q_lora_rank belongs to latent attention"),
        (dflash2_config(attention_mode="dsa"), "attention_mode is 'dsa'; legal are 'gqa', 'mha' and 'mla'"),
        (public_config(attention_mode="mla"), "attention_mode belongs to .*latent attention"),
    ],
)
def test_dflash2_needs_all_its_keys_and_dflash_has_none(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        contract_from_config(config, "c")


def test_dflash2_keys_may_stand_at_the_top() -> None:
    """z-lab's own lookup takes either place."""
    nested = dflash2_config()
    flat = dflash2_config()
    moved = {key: flat["dflash_config"].pop(key) for key in ("conv_kernel_size", "selector_rank")}
    assert contract_from_config(flat | moved, "c") == contract_from_config(nested, "c")


def test_sinks_in_both_spellings() -> None:
    config = public_config(add_swa_attention_sink_bias=True)
    assert contract_from_config(config, "c").has_attention_sink
    assert contract_from_config(with_nested(attention_sink_bias=True), "c").has_attention_sink
    config["dflash_config"]["attention_sink_bias"] = False
    with pytest.raises(CheckpointError, match="attention_sink_bias is False and add_swa_attention_sink_bias is True"):
        contract_from_config(config, "c")


def test_family_and_parts_must_agree_to_be_written(make_drafter: Callable[..., DrafterContract]) -> None:
    for changes in (
        {"family": "dflash2"},
        {"convolution": ConvolutionSettings(2, 8), "selector": SelectorSettings(4, 4)},
        {"family": "dflash2", "convolution": ConvolutionSettings(2, 8)},
    ):
        with pytest.raises(CheckpointError, match="DFlash2 has both, DFlash neither"):
            write_drafter_config(make_drafter(**changes))
    with pytest.raises(CheckpointError, match="cannot state markov"):
        write_drafter_config(make_drafter(markov=MarkovSettings(4, "vanilla")))


def test_mask_id_sources() -> None:
    """Nested, flat, or under PARD's names, as engines look for it; all that are there must agree."""
    plain = contract_from_config(public_config(), "c")
    for place in (
        {"dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669}},
        {"mask_token_id": 151669},
        {"pard_token": 151669},
        {"ptd_token_id": 151669},
    ):
        config = with_nested(mask_token_id="absent") | place
        assert contract_from_config(config, "c") == plain
    for key in ("mask_token_id", "pard_token", "ptd_token_id"):
        with pytest.raises(
            CheckpointError, match=f"dflash_config.mask_token_id is 151669 and the top-level {key} is 3"
        ):
            contract_from_config(public_config(**{key: 3}), "c")
    # DSpark's name for it is a sign of another family
    with pytest.raises(CheckpointError, match="dspark_noise_token_id belongs to DSpark"):
        contract_from_config(with_nested(mask_token_id="absent") | {"dspark_noise_token_id": 151669}, "c")
