"""Whether a drafter fits a target: every disagreement at once, before any weight is read."""

from __future__ import annotations

from paceline.checkpoint.contract import DrafterContract, TargetContract
from paceline.errors import CompatibilityError


def find_misfits(drafter: DrafterContract, target: TargetContract, *, num_draft_tokens: int | None = None) -> list[str]:
    """List what speaks against running a drafter on a target.

    Args:
        drafter: what the drafter was trained on.
        target: the model that it would ride on.
        num_draft_tokens: proposals per step that were asked for; None means as trained.
    Returns:
        One sentence per disagreement, with both values; empty when they fit.
    """
    misfits: list[str] = []
    if drafter.target_hidden_size != target.hidden_size:
        misfits.append(
            f"the drafter expects {drafter.num_taps} taps of width {drafter.target_hidden_size} (fc.weight is "
            f"[{drafter.hidden_size}, {drafter.num_taps * drafter.target_hidden_size}]); "
            f"the target's hidden_size is {target.hidden_size}"
        )
    if drafter.hidden_size != target.hidden_size:
        misfits.append(
            f"the drafter's width is {drafter.hidden_size}, and the embedding and output head that it shares with the "
            f"target have width {target.hidden_size}"
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
    if drafter.aux_hidden_stream != "prefix":
        misfits.append(
            f"the drafter reads the stream {drafter.aux_hidden_stream!r}; a {target.architecture} has only 'prefix'"
        )
    misfits.extend(_vocabulary_misfits(drafter, target))
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
        hint = f"at most {drafter.num_draft_tokens} draft tokens per step"
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


def _vocabulary_misfits(drafter: DrafterContract, target: TargetContract) -> list[str]:
    misfits = []
    if drafter.target_vocab_size != target.vocab_size:
        misfits.append(
            f"the drafter's target has {drafter.target_vocab_size} token ids, this one has {target.vocab_size}"
        )
    if drafter.vocab_size != drafter.target_vocab_size:
        misfits.append(
            f"the drafter's vocab_size is {drafter.vocab_size}, that of its target {drafter.target_vocab_size}; "
            "it has no embedding of its own for other ids"
        )
    if drafter.draft_vocab_size != drafter.vocab_size:
        misfits.append(
            f"the drafter proposes from {drafter.draft_vocab_size} of {drafter.vocab_size} ids; "
            "a reduced vocabulary is not supported"
        )
    if not 0 <= drafter.mask_token_id < target.vocab_size:
        misfits.append(f"the mask id {drafter.mask_token_id} is outside the target's {target.vocab_size} ids")
    return misfits


def _block_misfits(drafter: DrafterContract, num_draft_tokens: int | None) -> list[str]:
    misfits = []
    if drafter.layout != "fill_in":
        misfits.append(
            f"the drafter's block layout is {drafter.layout!r}; family {drafter.family!r} has 'fill_in' only"
        )
    if num_draft_tokens is not None and not 1 <= num_draft_tokens <= drafter.num_draft_tokens:
        misfits.append(
            f"{num_draft_tokens} draft tokens per step were asked for; the drafter was trained for 1 to "
            f"{drafter.num_draft_tokens} (block_size {drafter.block_size}, layout {drafter.layout})"
        )
    narrow = [
        f"layer {layer} sees {window}"
        for layer, window in enumerate(drafter.layer_windows)
        if window is not None and window < drafter.block_size
    ]
    if narrow:
        misfits.append(f"the window is smaller than block_size {drafter.block_size}: {', '.join(narrow)} tokens")
    return misfits
