"""Other readings of a drafter's weights, by stage: what a wrong config, converter or engine would have made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import RopeSettings
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.table import Drafter
from paceline.models.probe.stages import REACH, Stage
from paceline.models.readings import gains_plus_one, reread

THETAS = (1e4, 5e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_WINDOWS = (128, 256, 512, 1024, 2048, 4096)
_CAPS = (None, 15.0, 30.0, 50.0)


@dataclass(frozen=True)
class Alternative:
    """One reading.

    Attributes:
        text: "context keys fit with ...", to be put behind "the".
        fix: what to do if it is right.
        make: builds the drafter that reads so; may fail where the family does not draft so.
        stored: the fingerprint as this reading has it.
    """

    text: str
    fix: str
    make: Callable[[], Drafter]
    stored: Mapping[str, Tensor]


def alternatives_of(
    stage: Stage, drafter: Drafter, stored: Mapping[str, Tensor], changed: Mapping[str, Any]
) -> Iterator[Alternative]:
    """Readings to try for a stage.

    Args:
        stage: that differs.
        drafter: as declared.
        stored: the fingerprint.
        changed: fields of the recorded contract that matter to the stage and are not as declared.
    """
    if stage in ("fc_input", "context"):
        yield from _features(drafter, stored)
    elif stage == "keys":
        yield from _keys(drafter, stored, changed)
    elif stage in ("rows", "recycled"):
        yield from _rows(drafter, stored)
    elif stage == "logits":
        yield from _logits(drafter, stored, changed)
    elif stage == "drafts":
        yield from _drafts(drafter, stored)
    if changed:
        names = ", ".join(changed)
        yield Alternative(
            f"{stage} stage fits with {names} as when the fingerprint was recorded: "
            + ", ".join(
                f"{name} {value!r}, the config says {getattr(drafter.contract, name)!r}"
                for name, value in changed.items()
            ),
            "these values in the drafter's config",
            partial(reread, drafter, **changed),
            stored,
        )


def _features(drafter: Drafter, stored: Mapping[str, Tensor]) -> Iterator[Alternative]:
    contract = drafter.contract
    what = "context features fit"
    if contract.has_tap_norm:
        yield Alternative(
            f"{what} without fc_norm: the drafter was trained without a norm per tap",
            '"fc_norm": false, and no fc_norm tensors',
            partial(reread, drafter, has_tap_norm=False),
            stored,
        )
    eagle3 = contract.eagle3
    if eagle3 is not None and eagle3.norm_before_fc:
        yield Alternative(
            f"{what} without the norm over all taps: norm_before_fc should be false",
            '"norm_before_fc": false, and no input_norm tensor',
            partial(reread, drafter, eagle3=replace(eagle3, norm_before_fc=False)),
            stored,
        )
    yield Alternative(
        f"{what} with gains read as 1 + w: the norms store their distance from 1",
        "a converter that adds 1 to the norms' gains",
        partial(gains_plus_one, drafter),
        stored,
    )
    for one, other in itertools.combinations(range(contract.num_taps), 2):
        yield Alternative(
            f"{what} if taps {one} and {other} are swapped: fc.weight has their columns in another order",
            f"swap the blocks of columns {one} and {other} of fc.weight",
            partial(_with_columns_swapped, drafter, one, other),
            stored,
        )


def _keys(drafter: Drafter, stored: Mapping[str, Tensor], changed: Mapping[str, Any]) -> Iterator[Alternative]:
    contract = drafter.contract
    flipped = not contract.is_neox_style
    pairing = f"{'split halves' if flipped else 'interleaved pairs'}: is_neox_style should be {str(flipped).lower()}"
    ropes = [RopeSettings(theta=theta) for theta in THETAS] + [replace(contract.rope, theta=theta) for theta in THETAS]
    if isinstance(changed.get("rope"), RopeSettings):
        ropes.insert(0, changed["rope"])
    yield Alternative(
        f"context keys fit with {pairing}",
        f'"is_neox_style": {str(flipped).lower()} in the drafter\'s config',
        partial(reread, drafter, is_neox_style=flipped),
        stored,
    )
    for rope, is_flipped in itertools.product(dict.fromkeys(ropes), (False, True)):
        if rope == contract.rope:
            continue
        also = f", and with {pairing}" if is_flipped else ""
        yield Alternative(
            f"context keys fit with {_rope_text(rope, contract.rope)}{also}",
            f"{_rope_fix(rope, contract.rope)} in the drafter's config"
            + (f', "is_neox_style": {str(flipped).lower()}' * is_flipped),
            partial(reread, drafter, rope=rope, is_neox_style=contract.is_neox_style != is_flipped),
            stored,
        )
    for step in (1, -1):
        moved = {**stored, "key_positions": (stored["key_positions"] + step).clamp(min=0)}
        yield Alternative(
            f"context keys fit {abs(step)} position {'later' if step > 0 else 'earlier'}: positions are counted from "
            f"{'1' if step > 0 else '-1'}",
            "context positions that start at 0",
            partial(_itself, drafter),
            moved,
        )
    yield Alternative(
        "context keys fit with gains read as 1 + w: k_norm stores its distance from 1",
        "a converter that adds 1 to the norms' gains",
        partial(gains_plus_one, drafter),
        stored,
    )


def _rows(drafter: Drafter, stored: Mapping[str, Tensor]) -> Iterator[Alternative]:
    contract = drafter.contract
    depth = contract.num_layers
    if isinstance(drafter, Eagle3Drafter):
        eagle3 = contract.eagle3
        assert eagle3 is not None
        for field in ("norm_before_residual", "norm_output"):
            flipped = not getattr(eagle3, field)
            yield Alternative(
                f"hidden rows fit with {field} {str(flipped).lower()}",
                f'"{field}": {str(flipped).lower()} in the drafter\'s config',
                partial(reread, drafter, eagle3=replace(eagle3, **{field: flipped})),
                stored,
            )
    else:
        yield from _block_rows(drafter, stored)
    for window in (None, *_WINDOWS):
        if contract.layer_windows != (window,) * depth:
            text = "without windows" if window is None else f"with windows of {window} tokens in every layer"
            yield Alternative(
                f"hidden rows fit {text}",
                "layer_types and sliding_window as the drafter was trained with",
                partial(reread, drafter, layer_windows=(window,) * depth),
                stored,
            )


def _block_rows(drafter: BlockDrafter, stored: Mapping[str, Tensor]) -> Iterator[Alternative]:
    contract = drafter.contract
    depth = contract.num_layers
    num_rows = stored["block_hidden"].shape[1]
    size = num_rows if contract.layout == "anchor_sampling" else num_rows - 1 + contract.first_predicted_row
    if size != contract.block_size:
        yield Alternative(
            f"hidden rows fit in blocks of {size} rows, the config says {contract.block_size}",
            f'"block_size": {size} in the drafter\'s config',
            partial(reread, drafter, block_size=size),
            stored,
        )
    patterns = {
        "causal": (True,) * depth,
        "bidirectional": (False,) * depth,
        "causal in layers with a window only": tuple(window is not None for window in contract.layer_windows),
    }
    for name, causal in patterns.items():
        if causal != contract.layer_causal:
            yield Alternative(
                f"hidden rows fit if the rows of a block are {name}",
                "is_causal as the drafter was trained with",
                partial(reread, drafter, layer_causal=causal),
                stored,
            )
    for step in (1, -1):
        moved = {**stored, "block_anchor_positions": stored["block_anchor_positions"] + step}
        yield Alternative(
            f"hidden rows fit if the anchor stands one position {'later' if step > 0 else 'earlier'}",
            "the anchor right behind the last context position",
            partial(_itself, drafter),
            moved,
        )
    if contract.convolution is not None:
        rows = drafter.num_rows(contract.num_draft_tokens)
        for length in sorted({2 * rows, rows + 1, rows - 1, rows // 2, contract.convolution.num_taps} - {rows, 0}):
            yield Alternative(
                f"hidden rows fit if the convolution looks back over blocks of {length} rows, not {rows}",
                f"a drafter whose convolution starts anew every {rows} rows: what recorded this fingerprint let rows "
                "of one block reach another",
                partial(with_convolution_length, drafter, length),
                stored,
            )


def _logits(drafter: Drafter, stored: Mapping[str, Tensor], changed: Mapping[str, Any]) -> Iterator[Alternative]:
    contract = drafter.contract
    layout = "fill_in" if contract.layout == "anchor_sampling" else "anchor_sampling"
    if isinstance(drafter, BlockDrafter):
        yield Alternative(
            f"draft logits fit with the block layout {layout!r}, the config says {contract.layout!r}",
            f'"sample_from_anchor": {str(layout == "anchor_sampling").lower()} in the drafter\'s config',
            partial(reread, drafter, layout=layout),
            stored,
        )
    for cap in (*_CAPS, changed.get("final_logit_softcapping")):
        if (cap or None) != (contract.final_logit_softcapping or None):
            yield Alternative(
                "draft logits fit without a soft-cap" if not cap else f"draft logits fit with a soft-cap of {cap:g}",
                f'"final_logit_softcapping": {cap if cap else "null"} in the drafter\'s config',
                partial(reread, drafter, final_logit_softcapping=cap),
                stored,
            )


def _drafts(drafter: Drafter, stored: Mapping[str, Tensor]) -> Iterator[Alternative]:
    table = drafter.vocabulary.target_ids_V
    if table is None:
        return
    own = torch.arange(len(table), device=table.device)
    yield Alternative(
        "drafts fit if d2t is read as absolute ids: the file holds target ids, not offsets",
        "d2t as offsets, target id = draft id + d2t[draft id]: subtract the draft ids from the table",
        partial(_with_table, drafter, table - own),
        stored,
    )
    yield Alternative(
        "drafts fit if d2t is read as offsets: the file holds distances from the draft id, not target ids",
        "a reader that adds the draft id to d2t",
        partial(_with_table, drafter, table + own),
        stored,
    )
    yield Alternative(
        "drafts fit without d2t: draft ids are target ids", "no d2t table", partial(_with_table, drafter, own), stored
    )


def with_convolution_length(drafter: BlockDrafter, length: int) -> BlockDrafter:
    """The same drafter, with a convolution that starts anew every `length` rows of a batch."""
    # wrapped layers cannot be read again for a longer position table
    other = reread(drafter, max_position_embeddings=max(2 * REACH, drafter.contract.max_position_embeddings))
    other.backbone.layers = nn.ModuleList(_OtherBlocks(layer, length) for layer in other.backbone.layers)
    return other


class _OtherBlocks(nn.Module):
    """A convolved layer that is told of blocks of another length."""

    def __init__(self, layer: nn.Module, length: int) -> None:
        super().__init__()
        self.layer, self.self_attn, self.length = layer, layer.self_attn, length

    def forward(self, x_BTD: Tensor, *arguments: Any, offset_R: Tensor | None, **options: Any) -> Tensor:
        """Run the layer."""
        del offset_R
        rows = torch.arange(x_BTD.shape[0] * x_BTD.shape[1], device=x_BTD.device) % self.length
        y: Tensor = self.layer(x_BTD, *arguments, offset_R=rows, **options)
        return y


def _with_columns_swapped(drafter: Drafter, one: int, other: int) -> Drafter:
    changed = reread(drafter)
    fc = changed.backbone.fc if isinstance(changed, BlockDrafter) else changed.fc
    blocks = list(fc.weight.detach().chunk(drafter.contract.num_taps, dim=1))
    blocks[one], blocks[other] = blocks[other], blocks[one]
    fc.weight = nn.Parameter(torch.cat(blocks, dim=1), requires_grad=False)
    return changed


def _itself(drafter: Drafter) -> Drafter:
    return drafter


def _with_table(drafter: Drafter, table: Tensor) -> Drafter:
    changed = reread(drafter)
    changed.vocabulary.target_ids_V = table
    return changed


def _rope_text(rope: RopeSettings, declared: RopeSettings) -> str:
    if (rope.kind, rope.theta) == (declared.kind, declared.theta):
        said = ", ".join(repr(getattr(declared, name)) for name in _changed(rope, declared))
        values = ", ".join(f"{name} {value!r}" for name, value in _changed(rope, declared).items())
        return f"RoPE of {values}; the config says {said}"
    if rope.kind == declared.kind:
        return f"theta {rope.theta:.10g}: rope_theta is {declared.theta:.10g} in the config"
    said = f"{declared.theta:.10g} and {declared.kind!r}"
    return f"theta {rope.theta:.10g} and RoPE of kind {rope.kind!r}; the config says {said}"


def _changed(rope: RopeSettings, declared: RopeSettings) -> dict[str, object]:
    """Fields that are not as declared."""
    values = {field.name: getattr(rope, field.name) for field in fields(rope)}
    return {name: value for name, value in values.items() if value != getattr(declared, name)}


def _rope_fix(rope: RopeSettings, declared: RopeSettings) -> str:
    if (rope.kind, rope.theta) == (declared.kind, declared.theta):
        return ", ".join(f'"{name}": {value}' for name, value in _changed(rope, declared).items())
    return f'"rope_theta": {rope.theta:.10g}' + (f', rope_type "{rope.kind}"' if rope.kind != "default" else "")
