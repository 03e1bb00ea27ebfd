"""From settings to a contract: what each family promises, what does not fit together, and the recipes beside them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.tiny import tiny_target_contract
from tests.tiny_kimi import k3_tiny_config, kimi_contract
from tests.tiny_run import tiny_settings

from paceline.checkpoint.contract import DrafterContract, LatentAttentionSettings, RopeSettings, TargetContract
from paceline.checkpoint.dialects import contract_from_config, write_drafter_config
from paceline.checkpoint.names import drafter_slots
from paceline.configuration.load import load_settings
from paceline.configuration.run import TrainRun
from paceline.errors import ConfigError
from paceline.training.contract import drafter_contract

EXAMPLES = Path(__file__).parents[3] / "examples"


def contract(target: TargetContract | None = None, **changes: Any) -> DrafterContract:
    drafter = {f"drafter_{key}": value for key, value in changes.items()}
    return drafter_contract(tiny_settings(Path("run"), Path("data.npz"), **drafter), target or tiny_target_contract())


def test_dspark_of_both_layouts() -> None:
    found = contract(family="dspark", markov_rank=8, markov_kind="rnn", layout="anchor_sampling", block_size=7)
    assert (found.layout, found.num_draft_tokens) == ("anchor_sampling", 7)
    assert found.markov is not None and (found.markov.rank, found.markov.kind) == (8, "rnn")
    assert found.confidence is not None and found.confidence.with_markov
    found = contract(family="dspark", block_size=8, markov_rank=0)
    assert (found.layout, found.num_draft_tokens, found.markov) == ("fill_in", 7, None)
    assert found.confidence is not None and not found.confidence.with_markov
    assert contract(family="dspark", confidence_head=False).confidence is None


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_what_a_run_leaves_open_is_drafted_as_a_folder_that_says_nothing(family: str) -> None:
    """Served from a folder whose config lacks our field, a drafter of the family would pick its proposals alike."""
    mask = {"mask_token_id": None} if family == "eagle3" else {}
    found = contract(family=family, **mask)
    config = write_drafter_config(found)
    for place in [config, *(value for value in config.values() if isinstance(value, dict))]:
        place.pop("draft_sample_method", None)
    assert contract_from_config(config, "here").draft_sample_method == found.draft_sample_method
    assert found.draft_sample_method == ("probabilistic" if family in ("dflash2", "dspark") else "greedy")
    assert contract(family=family, draft_sample_method="greedy", **mask).draft_sample_method == "greedy"
    assert contract(family=family, draft_sample_method="probabilistic", **mask).draft_sample_method == "probabilistic"


def test_latent_attention_of_both_families_is_what_k3_drafters_have() -> None:
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_size": 8, "qk_rope_head_size": 6, "v_head_size": 12}
    for family, layout in (("dspark", "anchor_sampling"), ("dflash2", "fill_in")):
        found = contract(family=family, layout=layout, **sizes)
        assert found.latent == LatentAttentionSettings(24, 16, 8, 6, 12)
        assert not found.is_neox_style and found.rotary_size == 6
        assert contract_from_config(write_drafter_config(found), "here").latent == found.latent
    public = contract(family="dspark", layout="anchor_sampling", kv_lora_rank=512).latent
    assert public == LatentAttentionSettings(1536, 512, 128, 64, 128)
    plain = contract(family="dspark")
    assert plain.latent is None and plain.is_neox_style


def test_eagle3_borrows_its_tables_unless_told_otherwise() -> None:
    found = contract(family="eagle3", mask_token_id=None, block_size=8)
    assert (found.layout, found.num_draft_tokens, found.layer_causal) == ("autoregressive", 7, (True,))
    assert not (found.has_own_head or found.has_own_embedding or found.has_qk_norm or found.has_vocabulary_map)
    assert found.eagle3 is not None and found.eagle3.norm_before_residual and not found.eagle3.norm_output
    assert contract(family="eagle3", mask_token_id=None, own_head=True).has_own_head
    few = contract(family="eagle3", mask_token_id=None, draft_vocab_size=64)
    assert few.has_vocabulary_map and few.has_own_head, "the target's head scores all ids"
    whole = contract(family="eagle3", mask_token_id=None, draft_vocab_size=512)
    assert not (whole.has_vocabulary_map or whole.has_own_head)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"drafter_mask_token_id": None}, "mask_token_id is missing; a dflash drafter"),
        ({"drafter_family": "eagle3"}, "mask_token_id is 3; an eagle3 drafter has no rows to fill"),
        ({"drafter_layout": "anchor_sampling"}, "layout is 'anchor_sampling'; family 'dflash' has no such choice"),
        ({"drafter_own_head": True}, "own_head is True"),
        ({"drafter_family": "dspark", "drafter_draft_vocab_size": 64}, "draft_vocab_size is 64"),
        ({"drafter_kv_lora_rank": 16}, "family 'dflash' has no latent attention, 'dflash2' and 'dspark' have"),
        ({"drafter_kv_lora_rank": 16, "drafter_family": "dspark"}, "layout is 'fill_in'.*has anchor_sampling alone"),
        ({"drafter_kv_lora_rank": 16, "drafter_qk_rope_head_size": 7}, "multiple of 2"),
        ({"objective_loss": {}}, "name kl, ce or l1"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        tiny_settings(Path("run"), Path("data.npz"), **changes)


SMOLLM2 = tiny_target_contract(
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    vocab_size=49_152,
    rope=RopeSettings(theta=100_000.0),
    max_position_embeddings=8192,
)


@pytest.mark.parametrize(
    "recipe",
    [path for path in sorted(EXAMPLES.glob("train_*.toml")) if "8b" not in path.stem],
    ids=lambda path: path.stem,
)
def test_recipes_fit_their_target_and_thirty_megabytes(recipe: Path) -> None:
    run = load_settings(TrainRun, recipe, [])
    found = drafter_contract(run, SMOLLM2)
    num_bytes = 2 * sum(math.prod(slot.shape) for slot in drafter_slots(found))
    assert num_bytes < 30e6
    if "smollm2" in recipe.stem:
        assert found.num_draft_tokens == 7 == run.drafter.num_draft_tokens
        assert found.target_layer_ids == (1, 8, 15, 22, 27)


def test_the_recipe_for_eight_billion_parameters_fits_such_a_target() -> None:
    run = load_settings(TrainRun, EXAMPLES / "train_8b_24gb.toml", [])
    sizes: dict[str, Any] = {"num_layers": 36, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8}
    target = tiny_target_contract("qwen3", head_size=128, vocab_size=151_936, max_position_embeddings=40_960, **sizes)
    found = drafter_contract(run, target)
    assert found.target_layer_ids == (1, 17, 33) and found.num_draft_tokens == 7


@pytest.mark.parametrize("family", ["dflash", "dflash2", "dspark", "eagle3"])
def test_drafters_of_a_kimi_target_read_either_of_its_streams(family: str) -> None:
    target = kimi_contract(k3_tiny_config())
    mask = {"mask_token_id": None} if family == "eagle3" else {}
    for stream in ("prefix", "attn_res"):
        found = contract(target, family=family, aux_hidden_stream=stream, **mask)
        assert found.aux_hidden_stream == stream and found.target_hidden_size == 128
        assert found.num_heads == found.num_kv_heads == 4 and found.head_size == 32
    assert contract(target, family=family, **mask).aux_hidden_stream == "prefix"
    plain = kimi_contract(k3_tiny_config(attn_res_block_size=None))
    for without in (plain, tiny_target_contract()):
        with pytest.raises(ConfigError, match="aux_hidden_stream is 'attn_res'; the target has prefix"):
            contract(without, family=family, aux_hidden_stream="attn_res", **mask)


def test_a_target_that_scales_its_logits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiplies its logits by 0\.5"):
        contract(kimi_contract(k3_tiny_config(logit_scale=0.5)))
