"""A drafter and a target: all disagreements at once, each with both values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from paceline.checkpoint.compatibility import check_fit, complete_contract, find_misfits
from paceline.checkpoint.contract import DrafterContract, MarkovSettings, SelectorSettings, TargetContract
from paceline.errors import CompatibilityError

MakeDrafter = Callable[..., DrafterContract]
MakeTarget = Callable[..., TargetContract]


def test_a_pair_that_fits(make_drafter: MakeDrafter, make_target: MakeTarget) -> None:
    check_fit(make_drafter(), make_target())
    for num_draft_tokens in (1, 7):
        check_fit(make_drafter(), make_target(), num_draft_tokens=num_draft_tokens)


@pytest.mark.parametrize(
    ("drafter", "target", "parts"),
    [
        ({"target_hidden_size": 48}, {}, ["2 taps of width 48", "fc.weight is [32, 96]", "hidden_size is 32"]),
        ({"hidden_size": 48}, {}, ["width is 48", "have width 32"]),
        ({"target_num_layers": 6}, {}, ["has 6 layers", "this one has 4"]),
        ({"target_layer_ids": (0, 3), "target_num_layers": 4}, {}, ["taps [3]", "to 2"]),
        ({"target_layer_ids": (0, 2, 9)}, {}, ["taps [9]"]),
        ({"aux_hidden_stream": "attn_res"}, {}, ["'attn_res'", "'prefix'"]),
        ({}, {"vocab_size": 40}, ["has 64 token ids", "this one has 40"]),
        ({}, {"vocab_size": 90}, ["has 64 token ids", "this one has 90"]),
        ({"vocab_size": 70}, {}, ["vocab_size is 70", "64"]),
        ({"draft_vocab_size": 70}, {}, ["proposes from 70 ids", "64"]),
        ({"draft_vocab_size": 32}, {}, ["32 of 64 ids", "no head of its own"]),
        ({"has_own_head": True, "hidden_size": 48}, {}, ["width is 48", "the embedding that it shares", "width 32"]),
        ({"has_own_embedding": True, "mask_token_id": 64}, {}, ["mask id 64", "drafter's 64 ids"]),
        ({"has_own_head": True}, {"vocab_size": 60}, ["own head scores 64 ids", "reads 60"]),
        ({"has_own_embedding": True}, {"vocab_size": 66}, ["own embedding", "64 rows", "66 token ids"]),
        ({"mask_token_id": 64}, {}, ["mask id 64", "64 ids"]),
        ({"mask_token_id": -1}, {}, ["mask id -1"]),
        ({"layer_windows": (4, None)}, {}, ["layer 0 sees 4", "block_size 8"]),
    ],
)
def test_each_disagreement_shows_both_values(
    make_drafter: MakeDrafter,
    make_target: MakeTarget,
    drafter: dict[str, Any],
    target: dict[str, Any],
    parts: list[str],
) -> None:
    misfits = find_misfits(make_drafter(**drafter), make_target(**target))
    assert len(misfits) == 1, misfits
    assert all(part in misfits[0] for part in parts), misfits
    with pytest.raises(CompatibilityError) as caught:
        check_fit(make_drafter(**drafter), make_target(**target))
    assert misfits[0] in str(caught.value)
    assert "drafter/config.json" in str(caught.value) and "tiny/config.json" in str(caught.value)


@pytest.mark.parametrize("num_draft_tokens", [0, 8, -1])
def test_proposals_outside_what_was_trained(
    make_drafter: MakeDrafter, make_target: MakeTarget, num_draft_tokens: int
) -> None:
    with pytest.raises(CompatibilityError, match=rf"{num_draft_tokens} draft tokens .* 1 to 7"):
        check_fit(make_drafter(), make_target(), num_draft_tokens=num_draft_tokens)
    check_fit(make_drafter(), make_target(), num_draft_tokens=1)


@pytest.mark.parametrize(
    ("family", "legal", "refused"),
    [
        ("dflash", ["fill_in"], ["anchor_sampling", "autoregressive"]),
        ("dflash2", ["fill_in"], ["anchor_sampling", "autoregressive"]),
        ("dspark", ["anchor_sampling", "fill_in"], ["autoregressive"]),
        ("eagle3", ["autoregressive"], ["fill_in", "anchor_sampling"]),
    ],
)
def test_layouts_of_each_family(
    make_drafter: MakeDrafter, make_target: MakeTarget, family: str, legal: list[str], refused: list[str]
) -> None:
    for layout in legal:
        assert find_misfits(make_drafter(family=family, layout=layout), make_target()) == []
    for layout in refused:
        (misfit,) = find_misfits(make_drafter(family=family, layout=layout), make_target())
        assert repr(layout) in misfit and family in misfit


def test_eagle3_drafts_as_many_as_asked_for(make_drafter: MakeDrafter, make_target: MakeTarget) -> None:
    drafter = make_drafter(family="eagle3", layout="autoregressive", mask_token_id=-1, layer_windows=(4, None))
    for num_draft_tokens in (1, 7, 30):
        check_fit(drafter, make_target(), num_draft_tokens=num_draft_tokens)
    with pytest.raises(CompatibilityError, match=r"0 draft tokens.*1 or more"):
        check_fit(drafter, make_target(), num_draft_tokens=0)


def test_padding_rows_of_the_vocabulary_do_not_matter_where_no_table_has_them(
    make_drafter: MakeDrafter, make_target: MakeTarget
) -> None:
    """Report B26: 151936 and 152064 rows of one tokenizer, and 576 rows against 512."""
    padded = make_drafter(vocab_size=576, draft_vocab_size=576, target_vocab_size=576)
    check_fit(padded, make_target(vocab_size=512))
    qwen = make_drafter(vocab_size=151936, draft_vocab_size=151936, target_vocab_size=151936)
    check_fit(qwen, make_target(vocab_size=152064))
    # its own embedding has a row for every id of the smaller target; its Markov bias has none for the padding
    check_fit(dataclasses.replace(padded, has_own_embedding=True), make_target(vocab_size=512))
    markov = dataclasses.replace(padded, family="dspark", markov=MarkovSettings(4, "vanilla"))
    assert any(
        "576 token ids, this one has 512" in misfit for misfit in find_misfits(markov, make_target(vocab_size=512))
    )
    codebooks = dataclasses.replace(qwen, family="dflash2", selector=SelectorSettings(4, 4))
    (misfit,) = find_misfits(codebooks, make_target(vocab_size=152064))
    assert "selector codebooks have 151936 rows" in misfit


def test_expanded_embedding_and_reduced_head(make_drafter: MakeDrafter, make_target: MakeTarget) -> None:
    """An added mask row needs the drafter's own embedding; a reduced vocabulary needs its own head."""
    check_fit(make_drafter(vocab_size=65, mask_token_id=64, has_own_embedding=True), make_target())
    check_fit(make_drafter(draft_vocab_size=32, has_own_head=True), make_target())
    both = make_drafter(hidden_size=48, has_own_embedding=True, has_own_head=True)
    check_fit(both, make_target())
    assert find_misfits(make_drafter(family="dflash2", draft_vocab_size=32, has_own_head=True), make_target())


def test_what_the_layout_does_not_say_is_taken_from_the_target(
    make_drafter: MakeDrafter, make_target: MakeTarget
) -> None:
    unstated = make_drafter(target_num_layers=0, vocab_size=0, draft_vocab_size=0, target_vocab_size=0)
    check_fit(unstated, make_target())
    assert complete_contract(unstated, make_target()) == make_drafter()
    assert complete_contract(make_drafter(), make_target(num_layers=9)) == make_drafter()
    assert "taps [2]" in find_misfits(unstated, make_target(num_layers=3))[0]


def test_everything_is_listed_at_once(make_drafter: MakeDrafter, make_target: MakeTarget) -> None:
    target = make_target(hidden_size=48, num_layers=2, vocab_size=4)
    with pytest.raises(CompatibilityError) as caught:
        check_fit(make_drafter(), target, num_draft_tokens=99)
    text = str(caught.value)
    assert "7 disagreements" in text
    for part in (
        "taps of width 32",
        "width is 32",
        "has 4 layers",
        "taps [2]",
        "64 token ids",
        "mask id 5",
        "99 draft",
    ):
        assert part in text, part
    assert "the target tiny" in text


def test_unnamed_target_still_gives_a_hint(make_drafter: MakeDrafter, make_target: MakeTarget) -> None:
    with pytest.raises(CompatibilityError) as caught:
        check_fit(make_drafter(target_name="", hidden_size=48), make_target())
    assert "try: the target that the drafter was trained on" in str(caught.value)


def test_embedding_tap_and_edge_values_fit(make_drafter: MakeDrafter, make_target: MakeTarget) -> None:
    check_fit(make_drafter(target_layer_ids=(-1, 2), mask_token_id=63, layer_windows=(8, 8)), make_target())
