"""Fields that all layouts share: typed, never guessed, and said twice only if said alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.checkpoint.config_reader import ConfigReader
from paceline.checkpoint.contract import DrafterContract, MarkovSettings
from paceline.checkpoint.dialects.fields import (
    read_dtype,
    read_own_tables,
    read_scores,
    read_vocabulary,
    require,
    require_stated,
)
from paceline.errors import CheckpointError


def reader(**config: Any) -> ConfigReader:
    return ConfigReader(config, "c")


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        ([{"dtype": "bfloat16"}], "bfloat16"),
        ([{"torch_dtype": "float16"}], "float16"),
        ([{"dtype": "float32", "torch_dtype": "float32"}], "float32"),
        ([{}, {"torch_dtype": "bfloat16"}], "bfloat16"),
        ([{"dtype": "bfloat16"}, {"dtype": "float32"}], "dtype is 'bfloat16' and dtype is 'float32'"),
        ([{"dtype": "bfloat16", "torch_dtype": "float32"}], "torch_dtype is 'float32'"),
        ([{}], "dtype is None"),
        ([{"dtype": "auto"}], "dtype is 'auto'"),
    ],
)
def test_dtype(configs: list[dict[str, str]], found: str) -> None:
    if found in ("bfloat16", "float16", "float32"):
        assert read_dtype(reader(), *configs) == found
    else:
        with pytest.raises(CheckpointError, match=found):
            read_dtype(reader(), *configs)


@pytest.mark.parametrize(
    ("names", "embedding", "head"),
    [
        (["fc.weight"], False, False),
        (["embed_tokens.weight"], True, False),
        (["lm_head.weight"], False, True),
        (["lm_head.weight_packed", "lm_head.weight_scale"], False, True),  # quantised, and still its own
        (["lm_head_norm.weight", "embed_tokens_2.weight"], False, False),
    ],
)
def test_own_tables_by_whole_modules(names: list[str], embedding: bool, head: bool) -> None:
    assert read_own_tables({}, names, reader()) == {"has_own_embedding": embedding, "has_own_head": head}


def test_a_promised_head_must_be_there() -> None:
    promising = reader(has_own_lm_head=True)
    assert read_own_tables({}, (), promising)["has_own_head"]
    assert read_own_tables({}, ["lm_head.weight"], promising)["has_own_head"]
    with pytest.raises(CheckpointError, match="the weights have no lm_head"):
        read_own_tables({}, ["fc.weight"], promising)


def test_vocabulary() -> None:
    assert read_vocabulary(reader(), 10, 8) == {"vocab_size": 10, "target_vocab_size": 8, "draft_vocab_size": 8}
    assert read_vocabulary(reader(draft_vocab_size=4), 8, 8)["draft_vocab_size"] == 4
    assert read_vocabulary(reader(), 0, 0)["draft_vocab_size"] == 0  # of a layout that states none
    with pytest.raises(CheckpointError, match="a selector has the full vocabulary, here 8"):
        read_vocabulary(reader(draft_vocab_size=4), 8, 8, full_because="a selector")
    with pytest.raises(CheckpointError, match="more than the 8 ids of the target"):
        read_vocabulary(reader(draft_vocab_size=9), 8, 8)


@pytest.mark.parametrize(("cap", "found"), [(None, None), (0, None), (0.0, None), (30, 30.0)])
def test_soft_cap(cap: float | None, found: float | None) -> None:
    config = {"final_logit_softcapping": cap}
    assert read_scores(config, reader(**config))["final_logit_softcapping"] == found


@pytest.mark.parametrize("cap", [False, -1.0, "30", float("inf")])
def test_soft_caps_that_are_none(cap: object) -> None:
    config = {"final_logit_softcapping": cap}
    with pytest.raises(CheckpointError, match="final_logit_softcapping is"):
        read_scores(config, reader(**config))


def test_require_lists_every_field(make_drafter: Callable[..., DrafterContract]) -> None:
    contract = make_drafter(block_size=4, markov=MarkovSettings(2, "gated"))
    require(contract, "X", block_size=4)
    with pytest.raises(CheckpointError) as caught:
        require(contract, "X", block_size=8, markov=None)
    assert (
        "the X layout cannot state block_size 4 (its readers assume 8); markov MarkovSettings" in caught.value.message
    )
    require_stated(contract, "X", "vocab_size")
    with pytest.raises(CheckpointError, match="without vocab_size, and"):
        require_stated(make_drafter(vocab_size=0), "X", "vocab_size", "target_num_layers")
