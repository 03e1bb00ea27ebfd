"""Whether a drafter fits a target: every disagreement at once, before any weight is read.

What a drafter's layout does not say about its target (0 in the contract) is taken from the target at hand and cannot
disagree; everything that is said must agree, apart from padding of the vocabulary that no table of the drafter sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from paceline.checkpoint.contract import BlockLayout, DrafterContract, DrafterFamily, TargetContract
from paceline.errors import CompatibilityError

# layouts that a family is drafted in; engines refuse the others, since no trainer of the family makes them
_LAYOUTS: Mapping[DrafterFamily, tuple[BlockLayout, ...]] = {
    "dflash": ("fill_in",),
    "dflash2": ("fill_in",),
    "dspark": ("anchor_sampling", "fill_in"),
    "eagle3": ("autoregressive",),
}
# models of one tokenizer differ by fewer rows than this (151936 and 152064 in one family), and by a small share of them
_LARGEST_PADDING, _LARGEST_SHARE = 1024, 0.25


def complete_contract(drafter: DrafterContract, target: TargetContract) -> DrafterContract:
    """Fill in what a drafter's layout does not say about its target.

    Args:
        drafter: as read; 0 stands for a depth or a vocabulary that the file does not state.
        target: the model that it will ride on.
    Returns:
        A contract without unstated sizes.
    """
    return dataclasses.replace(
        drafter,
        target_num_layers=drafter.target_num_layers or target.num_layers,
        target_vocab_size=drafter.target_vocab_size or target.vocab_size,
        vocab_size=drafter.vocab_size or target.vocab_size,
        draft_vocab_size=drafter.draft_vocab_size or target.vocab_size,
    )


def find_misfits(drafter: DrafterContract, target: TargetContract, *, num_draft_tokens: int | None = None) -> list[str]:
    """List what speaks against running a drafter on a target.

    Args:
        drafter: what the drafter was trained on.
        target: the model that it would ride on.
        num_draft_tokens: proposals per step that were asked for; None means as trained.
    Returns:
        One sentence per disagreement, with both values; empty when they fit.
    """
    drafter = complete_contract(drafter, target)
    misfits: list[str] = []
    if drafter.target_hidden_size != target.hidden_size:
        misfits.append(
            f"the drafter expects {drafter.num_taps} taps of width {drafter.target_hidden_size} (fc.weight is "
            f"[{drafter.hidden_size}, {drafter.num_taps * drafter.target_hidden_size}]); "
            f"the target's hidden_size is {target.hidden_size}"
        )
    lent = [
        name
        for name, is_own in (("embedding", drafter.has_own_embedding), ("output head", drafter.has_own_head))
        if not is_own
    ]
    if drafter.hidden_size != target.hidden_size and lent:
        misfits.append(
            f"the drafter's width is {drafter.hidden_size}, and the {' and '.join(lent)} that it shares with the "
            f"target {'has' if len(lent) == 1 else 'have'} width {target.hidden_size}"
        )
    if drafter.target_num_layers != target.num_layers:
        misfits.append(f"the drafter's target has {drafter.target_num_layers} layers, this one has {target.num_layers}")
    legal = range(-1, target.num_layers - 1)
    beyond = [int(tap) for tap in drafter.target_layer_ids if tap not in legal]
    if beyond:
        misfits.append(
            f"taps {beyond} are not among the target's legal ones, -1 (the embedding) to {target.num_layers - 2} "
            "(the last layer but one)"
        )
    if drafter.aux_hidden_stream not in target.aux_hidden_streams:
        misfits.append(
            f"the drafter reads the stream {drafter.aux_hidden_stream!r}; this {target.architecture} has only 'prefix'"
        )
    misfits.extend(vocabulary_misfits(drafter, target))
    misfits.extend(_block_misfits(drafter, num_draft_tokens))
    return misfits


def check_fit(drafter: DrafterContract, target: TargetContract, *, num_draft_tokens: int | None = None) -> None:
    """Refuse a drafter that does not fit a target.

    Args:
        drafter: what the drafter was trained on.
        target: the model that it would ride on.
        num_draft_tokens: proposals per step that were asked for; None means as trained.
    Raises:
        CompatibilityError: they disagree; the message lists every point.
    """
    misfits = find_misfits(drafter, target, num_draft_tokens=num_draft_tokens)
    if not misfits:
        return
    if not find_misfits(drafter, target):
        hint = _fewer_drafts(drafter)
    elif drafter.target_name:
        hint = f"the target {drafter.target_name}, which the drafter's config names"
    else:
        hint = "the target that the drafter was trained on"
    text = misfits[0] if len(misfits) == 1 else f"{len(misfits)} disagreements:\n  - " + "\n  - ".join(misfits)
    raise CompatibilityError(
        text,
        origin={"drafter": drafter.origin, "target": target.origin},
        hint=hint,
    )


def _fewer_drafts(drafter: DrafterContract) -> str:
    if drafter.family == "eagle3":
        return "at least 1 draft token per step"
    return f"at most {drafter.num_draft_tokens} draft tokens per step"


def vocabulary_misfits(drafter: DrafterContract, target: TargetContract) -> list[str]:
    """Disagreements of token ids.

    Two sizes of one tokenizer may differ by padding rows. That is harmless where the drafter borrows what has a row per
    token. A table of its own must cover every id that the target can emit, and propose none that it cannot read.
    """
    misfits = []
    stated, real = drafter.target_vocab_size, target.vocab_size
    if stated != real:
        # the Markov head's bias is added to the scores of the target's ids, d2t names them: both need exactly these
        is_bound = drafter.markov is not None or drafter.draft_vocab_size < stated
        if is_bound or not is_padding(stated, real):
            misfits.append(f"the drafter's target has {stated} token ids, this one has {real}")
        elif drafter.has_own_head and drafter.draft_vocab_size > real:
            misfits.append(
                f"the drafter's own head scores {drafter.draft_vocab_size} ids, and the target reads {real} of them"
            )
    indexed = [name for name, is_there in _indexed_by_token(drafter).items() if is_there]
    if indexed and drafter.vocab_size < real:
        misfits.append(
            f"the drafter's own {' and '.join(indexed)} have {drafter.vocab_size} rows, and the target emits "
            f"{real} token ids"
        )
    if drafter.vocab_size > drafter.target_vocab_size and not drafter.has_own_embedding:
        misfits.append(
            f"the drafter's vocab_size is {drafter.vocab_size}, that of its target {drafter.target_vocab_size}; "
            "it has no embedding of its own for the ids beyond"
        )
    if drafter.draft_vocab_size > drafter.target_vocab_size:
        misfits.append(
            f"the drafter proposes from {drafter.draft_vocab_size} ids, more than its target's "
            f"{drafter.target_vocab_size}"
        )
    is_reduced = drafter.draft_vocab_size < drafter.target_vocab_size
    if is_reduced and not drafter.has_own_head:
        misfits.append(
            f"the drafter proposes from {drafter.draft_vocab_size} of {drafter.target_vocab_size} ids and has no head "
            "of its own for them"
        )
    if is_reduced and drafter.family == "dflash2":
        misfits.append(
            f"the drafter proposes from {drafter.draft_vocab_size} of {drafter.target_vocab_size} ids; the candidates "
            "of a DFlash2 selector are target ids"
        )
    rows = drafter.vocab_size if drafter.has_own_embedding else real
    if drafter.family != "eagle3" and not 0 <= drafter.mask_token_id < rows:
        whose = "drafter's" if drafter.has_own_embedding else "target's"
        misfits.append(f"the mask id {drafter.mask_token_id} is outside the {whose} {rows} ids")
    return misfits


def is_padding(size: int, other: int) -> bool:
    """Whether two vocabulary sizes may belong to one tokenizer, padded to different multiples."""
    return abs(size - other) < min(_LARGEST_PADDING, _LARGEST_SHARE * min(size, other))


def _indexed_by_token(drafter: DrafterContract) -> dict[str, bool]:
    return {
        "embedding": drafter.has_own_embedding,
        "selector codebooks": drafter.selector is not None,
    }


def _block_misfits(drafter: DrafterContract, num_draft_tokens: int | None) -> list[str]:
    misfits = []
    if drafter.layout not in _LAYOUTS[drafter.family]:
        legal = " and ".join(repr(layout) for layout in _LAYOUTS[drafter.family])
        misfits.append(f"the drafter's block layout is {drafter.layout!r}; family {drafter.family!r} has {legal} only")
    if num_draft_tokens is not None:
        # one pass per draft can go on for ever; a block has as many rows as it was trained with
        is_limited = drafter.family != "eagle3"
        if num_draft_tokens < 1 or (is_limited and num_draft_tokens > drafter.num_draft_tokens):
            upper = f"1 to {drafter.num_draft_tokens}" if is_limited else "1 or more"
            misfits.append(
                f"{num_draft_tokens} draft tokens per step were asked for; the drafter was trained for {upper} "
                f"(block_size {drafter.block_size}, layout {drafter.layout})"
            )
    narrow = [
        f"layer {layer} sees {window}"
        for layer, window in enumerate(drafter.layer_windows)
        if window is not None and window < drafter.block_size
    ]
    if narrow and drafter.family != "eagle3":
        misfits.append(f"the window is smaller than block_size {drafter.block_size}: {', '.join(narrow)} tokens")
    return misfits
