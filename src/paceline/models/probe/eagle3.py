"""The draft computation of EAGLE-3 in stages: rows over the probe's last tokens, then one pass on a recycled state.

C rows, D width, M key/value heads, H head size, R rows of compared keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.models.attends import BlocksOverContext
from paceline.models.drafters.draw import draw_rows
from paceline.models.drafters.eagle3 import DoubledLayer, Eagle3Drafter
from paceline.models.probe.block import (
    PROPOSAL_SHAPES,
    greedy_with_q,
    head_dtype,
    kept_logits,
    kept_proposal,
    kept_target_ids,
    visible_keys,
)
from paceline.models.probe.stages import NUM_CONTEXT_ROWS, NUM_KEYS, REACH, Stage, stretched
from paceline.models.readings import reread
from paceline.models.targets.target import Target
from paceline.ops.rotary import expand_rotary


class Eagle3Program:
    """See `stages.Program`.

    Args:
        drafter: prepared for serving or not.
    """

    stages: tuple[Stage, ...] = ("fc_input", "context", "embeddings", "keys", "rows", "logits", "drafts", "recycled")

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self.drafter = drafter

    def plan(self, probe_ids: list[int]) -> dict[str, Tensor]:
        """Rows at stretched positions before the probe's last token; a row reads the token after it."""
        reach = min(self.drafter.contract.max_position_embeddings, self.drafter.position_table.shape[0], REACH) - 2
        num_rows = min(NUM_CONTEXT_ROWS, len(probe_ids) - 2)
        distances = stretched(num_rows, max(1, reach))
        first = len(probe_ids) - 1 - num_rows
        # where the table is too short to stretch, rows sit side by side from 0 on
        rows = [reach - distance for distance in reversed(distances)] if len(distances) == num_rows else range(num_rows)
        return {
            "row_next_ids": torch.tensor(probe_ids[first + 1 : first + 1 + num_rows]),
            "row_positions": torch.tensor(list(rows)),
            "key_positions": torch.tensor([0, *stretched(NUM_KEYS - 1, max(1, reach))]),
        }

    def shapes(self, num_rows: int) -> dict[str, tuple[int | None, ...]]:
        """See `stages.Program`."""
        width = self.drafter.contract.hidden_size
        return {
            "row_next_ids": (num_rows,),
            "row_positions": (num_rows,),
            "key_positions": (None,),
            "fc_input": (2, None),
            "context": (num_rows, width),
            "row_embedding": (num_rows, width),
            "context_key": (None, None, None, None),
            "context_value": (None, None, None, None),
            "row_hidden": (None, width),
            "row_recycled": (1, width),
            "draft_embedding": (1, width),
            "second_hidden": (1, width),
            **PROPOSAL_SHAPES,
        }

    @torch.no_grad()
    def run(self, stage: Stage, target: Target, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `stages.Program`."""
        program = self._reaching_far(stored)
        drafter = program.drafter
        if stage == "fc_input":
            return {"fc_input": program._fc_input(stored)}
        if stage == "context":
            taps = [program._here(stored[f"tap.{tap}"]) for tap in range(drafter.contract.num_taps)]
            return {"context": drafter.features(taps)}
        if stage == "embeddings":
            return {"row_embedding": drafter.embed(program._here(stored["row_next_ids"]), target)}
        if stage == "keys":
            return program._keys(stored)
        if stage == "rows":
            out, recycled = program._rows(
                program._here(stored["row_embedding"]), program._here(stored["context"]), stored
            )
            return {"row_hidden": out[-4:], "row_recycled": recycled[-1:]}
        if stage == "recycled":
            return program._second_pass(target, stored)
        hidden = program._here(stored["row_hidden"][-1:]).to(head_dtype(drafter.vocabulary, target))
        logits = drafter.logits(hidden, target).unsqueeze(0)
        if stage == "logits":
            return kept_logits(logits, stored)
        anchors = program._here(stored["row_next_ids"][-1:])
        proposal = draw_rows(logits, greedy_with_q(anchors), drafter.vocabulary)
        return {**kept_target_ids(drafter.vocabulary, stored), **kept_proposal(proposal, stored)}

    def _here(self, tensor: Tensor) -> Tensor:
        weight = self.drafter.fc.weight
        return tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else tensor.dtype)

    def _reaching_far(self, stored: Mapping[str, Tensor]) -> Eagle3Program:
        needed = max(int(stored["key_positions"].max()), int(stored["row_positions"].max())) + 2
        if self.drafter.position_table.shape[0] >= needed:
            return self
        return Eagle3Program(reread(self.drafter, max_position_embeddings=needed))

    def _fc_input(self, stored: Mapping[str, Tensor]) -> Tensor:
        drafter = self.drafter
        taps = [self._here(stored[f"tap.{tap}"][-2:]) for tap in range(drafter.contract.num_taps)]
        if drafter.contract.has_tap_norm:
            taps = [norm(tap) for norm, tap in zip(drafter.fc_norm, taps, strict=True)]
        joined = torch.cat(taps, dim=-1)
        return joined if drafter.input_norm is None else drafter.input_norm(joined)

    def _keys(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keys of the first layer, which reads embedding and state side by side."""
        drafter = self.drafter
        layer = drafter.layers[0]
        assert isinstance(layer, DoubledLayer), "the first layer always reads both"
        positions_R = self._here(stored["key_positions"])
        rows = torch.arange(len(positions_R), device=positions_R.device) % len(stored["context"])
        both = torch.cat(
            (
                layer.input_layernorm(self._here(stored["row_embedding"])[rows]),
                layer.hidden_norm(self._here(stored["context"])[rows]),
            ),
            dim=-1,
        )
        neox = drafter.contract.is_neox_style
        turn = expand_rotary(drafter.position_table[positions_R], both.dtype, is_neox_style=neox)
        key, value = layer.self_attn.context_kv(both, turn, is_neox_style=neox)
        return {"context_key": key.unsqueeze(0), "context_value": value.unsqueeze(0)}

    def _rows(self, embeddings: Tensor, hidden: Tensor, stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """All rows in one causal pass, [rows, D] each."""
        contract = self.drafter.contract
        positions = self._here(stored["row_positions"])
        if len(embeddings) > len(positions):
            positions = torch.cat((positions, positions[-1:] + 1))
        positions_1T = positions.unsqueeze(0)
        nothing = positions_1T[:, :0]
        masks = [
            visible_keys(nothing, nothing.bool(), positions_1T, window=window, causal=True)
            for window in contract.layer_windows
        ]
        empty = embeddings.new_zeros(1, 0, contract.num_kv_heads, contract.head_size)
        attend = BlocksOverContext([(empty, empty)] * contract.num_layers, masks)
        out, recycled = self.drafter(embeddings.unsqueeze(0), hidden.unsqueeze(0), positions_1T, attend)
        return out[0], recycled[0]

    def _second_pass(self, target: Target, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The pass after the first draft: its embedding beside the recycled state of the last row."""
        draft = self._here(stored["draft_ids"]).flatten()[:1]
        embedded = self.drafter.embed(draft, target)
        recorded = self._here(stored["draft_embedding"]) if "draft_embedding" in stored else embedded
        embeddings = torch.cat((self._here(stored["row_embedding"]), recorded))
        hidden = torch.cat((self._here(stored["context"]), self._here(stored["row_recycled"])))
        out, _ = self._rows(embeddings, hidden, stored)
        return {"draft_embedding": embedded, "second_hidden": out[-1:]}
