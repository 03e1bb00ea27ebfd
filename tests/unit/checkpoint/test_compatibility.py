"""A drafter and a target: all disagreements at once, each with both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.checkpoint.compatibility import check_fit, find_misfits
from paceline.checkpoint.contract import DrafterContract, TargetContract
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
        ({}, {"vocab_size": 60}, ["has 64 token ids", "this one has 60"]),
        ({"vocab_size": 70, "draft_vocab_size": 70}, {}, ["vocab_size is 70", "64"]),
        ({"draft_vocab_size": 32}, {}, ["32 of 64 ids"]),
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


def test_a_layout_that_no_family_drafts(make_drafter: MakeDrafter, make_target: MakeTarget) -> None:
    with pytest.raises(CompatibilityError, match=r"'anchor_sampling'.*'fill_in' only"):
        check_fit(make_drafter(layout="anchor_sampling"), make_target())


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
