"""The draft computation of block drafters in stages: DFlash, DFlash2, DSpark.

Two blocks are drafted in one batch, and each once more alone. They share context rows but not their number; the first
has its rows at the probe's own positions, the second at positions stretched far apart, so that windows and slow
rotations have a say in a text of a few dozen tokens.

C context rows, Q block rows, K draft tokens, D width, M key/value heads, H head size, R rows of compared keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.models.attends import BlocksOverContext
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.proposal import DraftSampling, Proposal
from paceline.models.drafters.vocabulary import DraftVocabulary
from paceline.models.probe.stages import (
    NUM_CONTEXT_ROWS,
    NUM_KEYS,
    REACH,
    Stage,
    scored_ids,
    settled,
    stretched,
)
from paceline.models.readings import reread
from paceline.models.targets.target import Target

_NUM_CANDIDATES = 4
PROPOSAL_SHAPES: dict[str, tuple[int | None, ...]] = {
    "logit_ids": (None, None, None),
    "logit_values": (None, None, None),
    "top_target_ids": (None, None, None),
    "draft_ids": (None, None),
    "candidate_ids": (None, None, None),
    "candidate_log_q": (None, None, None),
}


class BlockProgram:
    """See `stages.Program`.

    Args:
        drafter: prepared for serving or not; as it is, so that what is served is what is checked.
    """

    stages: tuple[Stage, ...] = ("fc_input", "context", "keys", "embeddings", "rows", "logits", "drafts")

    def __init__(self, drafter: BlockDrafter) -> None:
        self.drafter = drafter
        self._scored: tuple[Mapping[str, Tensor], Tensor] | None = None  # two stages look at the same logits

    def plan(self, probe_ids: list[int]) -> dict[str, Tensor]:
        """Positions, lengths and anchors; the last probe token is the first block's anchor."""
        contract = self.drafter.contract
        num_positions = min(contract.max_position_embeddings, self.drafter.backbone.position_table.shape[0])
        num_context = min(NUM_CONTEXT_ROWS, len(probe_ids) - 2)
        natural = torch.arange(len(probe_ids) - 1 - num_context, len(probe_ids) - 1)
        reach = max(1, min(num_positions, REACH) - contract.block_size - 1)
        length = max(1, num_context * 2 // 3)
        distances = stretched(length, reach)
        far = natural.clone()
        far[: len(distances)] = reach - torch.tensor(distances).flip(0)
        return {
            "block_anchor_ids": torch.tensor([probe_ids[-1], probe_ids[len(probe_ids) // 2]]),
            "block_anchor_positions": torch.tensor([len(probe_ids) - 1, reach]),
            "block_context_positions": torch.stack((natural, far)),
            "block_lengths": torch.tensor([num_context, len(distances)]),
            "key_positions": torch.tensor([0, *stretched(NUM_KEYS - 1, reach)]),
        }

    def shapes(self, num_rows: int) -> dict[str, tuple[int | None, ...]]:
        """See `stages.Program`."""
        width = self.drafter.contract.hidden_size
        shapes: dict[str, tuple[int | None, ...]] = {
            "block_anchor_ids": (2,),
            "block_anchor_positions": (2,),
            "block_context_positions": (2, num_rows),
            "block_lengths": (2,),
            "key_positions": (None,),
            "fc_input": (2, None),
            "context": (num_rows, width),
            "context_key": (None, None, None, None),
            "context_value": (None, None, None, None),
            "block_embedding": (2, None, width),
            "block_hidden": (2, None, width),
            "block_hidden_alone": (2, None, width),
            **PROPOSAL_SHAPES,
        }
        return shapes | ({"confidence": (2, None)} if self.drafter.contract.confidence is not None else {})

    @torch.no_grad()
    def run(self, stage: Stage, target: Target, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `stages.Program`."""
        program = self._reaching_far(stored) if stage in ("keys", "rows") else self
        if stage == "fc_input":
            return {"fc_input": program._fc_input(stored)}
        if stage == "context":
            taps = [program._here(stored[f"tap.{tap}"]) for tap in range(program.drafter.contract.num_taps)]
            return {"context": program.drafter.backbone.context_features(taps)}
        if stage == "keys":
            return program._keys(stored)
        if stage == "embeddings":
            ids = program.drafter.block_ids(program._here(stored["block_anchor_ids"]), program._num_drafts)
            return {"block_embedding": program.drafter.embed(ids[:, :2], target)}
        if stage == "rows":
            return program._rows(stored)
        logits = program._logits(target, stored)
        return kept_logits(logits, stored) if stage == "logits" else program._drafts(logits, stored)

    @property
    def _num_drafts(self) -> int:
        return self.drafter.contract.num_draft_tokens

    def _here(self, tensor: Tensor) -> Tensor:
        """A stored tensor on the drafter's device, floats in its dtype."""
        weight = self.drafter.backbone.fc.weight
        return tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else tensor.dtype)

    def _reaching_far(self, stored: Mapping[str, Tensor]) -> BlockProgram:
        """Itself, or the same weights with a longer position table where a config was given a shorter one."""
        last = max(int(stored["key_positions"].max()), int(stored["block_anchor_positions"].max()))
        needed = last + self.drafter.contract.block_size + 1
        if self.drafter.backbone.position_table.shape[0] >= needed:
            return self
        return BlockProgram(reread(self.drafter, max_position_embeddings=needed))

    def _fc_input(self, stored: Mapping[str, Tensor]) -> Tensor:
        """What the projection reads, [2, num_taps * D]: it shows the gains of the per-tap norms."""
        backbone = self.drafter.backbone
        taps = [self._here(stored[f"tap.{tap}"][-2:]) for tap in range(self.drafter.contract.num_taps)]
        if self.drafter.contract.has_tap_norm:
            taps = [norm(tap) for norm, tap in zip(backbone.fc_norm, taps, strict=True)]
        return torch.cat(taps, dim=-1)

    def _keys(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        positions_R = self._here(stored["key_positions"])
        context = self._here(stored["context"])
        rows = context[torch.arange(len(positions_R), device=context.device) % len(context)]
        pairs = self.drafter.backbone.context_kv(rows, positions_R)
        ends = sorted({0, len(pairs) - 1})
        return {
            "context_key": torch.stack([pairs[layer][0] for layer in ends]),
            "context_value": torch.stack([pairs[layer][1] for layer in ends]),
        }

    def _rows(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        embeddings = self._here(stored["block_embedding"])
        num_rows = self.drafter.num_rows(self._num_drafts)
        embeddings = torch.cat((embeddings[:, :1], embeddings[:, 1:2].expand(-1, num_rows - 1, -1)), dim=1)
        anchors = self._here(stored["block_anchor_positions"])
        positions = self._here(stored["block_context_positions"])
        lengths = self._here(stored["block_lengths"])
        context = self._here(stored["context"]).expand(2, -1, -1)
        together = self._run_blocks(context, positions, lengths, embeddings, anchors)
        if "block_hidden" in stored and "block_hidden_alone" not in stored:
            return {"block_hidden": together}  # left out of a quick replay
        alone = []
        for block, length in enumerate(lengths.tolist()):
            one = slice(block, block + 1)
            alone.append(
                self._run_blocks(
                    context[one, :length], positions[one, :length], lengths[one], embeddings[one], anchors[one]
                )
            )
        return {"block_hidden": together, "block_hidden_alone": torch.cat(alone)}

    def _run_blocks(
        self, context: Tensor, positions: Tensor, lengths: Tensor, embeddings: Tensor, anchors: Tensor
    ) -> Tensor:
        backbone, contract = self.drafter.backbone, self.drafter.contract
        own = anchors.unsqueeze(1) + torch.arange(embeddings.shape[1], device=anchors.device)
        is_there = torch.arange(context.shape[1], device=anchors.device) < lengths.unsqueeze(1)
        kinds = list(zip(contract.layer_windows, contract.layer_causal, strict=True))
        masks = {
            kind: visible_keys(positions, is_there, own, window=kind[0], causal=kind[1])
            for kind in dict.fromkeys(kinds)
        }
        attend = BlocksOverContext(backbone.context_kv(context, positions), [masks[kind] for kind in kinds])
        hidden: Tensor = backbone(embeddings, own, attend)
        return hidden

    def _predicted(self, stored: Mapping[str, Tensor]) -> Tensor:
        return self.drafter.predicted_rows(self._here(stored["block_hidden"]))

    def _logits(self, target: Target, stored: Mapping[str, Tensor]) -> Tensor:
        """Scores of the stored rows; a drafter exported in 16 bits may meet a target in 32."""
        if self._scored is None or self._scored[0] is not stored:
            hidden = self._predicted(stored).to(head_dtype(self.drafter.vocabulary, target)).contiguous()
            self._scored = stored, self.drafter.logits(hidden, target)
        return self._scored[1]

    def _drafts(self, logits: Tensor, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = kept_target_ids(self.drafter.vocabulary, stored)
        table = self.drafter.vocabulary.target_ids_V
        if (
            table is not None
            and not 0 <= int(table.min()) <= int(table.max()) < self.drafter.contract.target_vocab_size
        ):
            return kept  # heads that couple positions look drafts up
        anchors = self._here(stored["block_anchor_ids"])
        proposal = self.drafter.propose(self._predicted(stored), logits, anchors, greedy_with_q(anchors))
        return {**kept, **kept_proposal(proposal, stored)}


def visible_keys(
    context_positions: Tensor, is_there: Tensor, own_positions: Tensor, *, window: int | None, causal: bool
) -> Tensor:
    """Which keys the rows of one block per request may see.

    Args:
        context_positions: int64 [B, C].
        is_there: bool [B, C], false for padding.
        own_positions: int64 [B, Q].
        window: tokens visible to a row, itself included: |p - j| < window; None is all.
        causal: whether a row sees only itself and earlier rows of its block.
    Returns:
        bool [B, Q, C + Q].
    """
    keys = torch.cat((context_positions, own_positions), dim=1)
    distance = own_positions.unsqueeze(2) - keys.unsqueeze(1)
    visible = torch.cat((is_there, torch.ones_like(own_positions, dtype=torch.bool)), dim=1).unsqueeze(1)
    if causal:
        visible = visible & (distance >= 0)
    if window is not None:
        visible = visible & (distance.abs() < window)
    return visible.expand(distance.shape)


def head_dtype(vocabulary: DraftVocabulary, target: Target) -> torch.dtype:
    """Dtype of the head that scores drafts, the drafter's own or the target's."""
    return target.norm.weight.dtype if vocabulary.lm_head is None else vocabulary.lm_head.weight.dtype


def greedy_with_q(anchor_ids: Tensor) -> DraftSampling:
    """Draw at temperature 0, which takes the best candidate of each row and still reports what it was chosen from."""
    nobody = torch.zeros_like(anchor_ids)
    return DraftSampling("probabilistic", nobody.float(), nobody, nobody, nobody)


def kept_logits(logits: Tensor, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Logits of the stored ids, or of ids chosen now where none are stored."""
    ids = stored["logit_ids"].to(logits.device) if "logit_ids" in stored else scored_ids(logits)
    if ids.shape[:-1] != logits.shape[:-1] or int(ids.max()) >= logits.shape[-1]:
        return {"logit_values": logits[..., :1]}  # other rows or another vocabulary: a shape that cannot fit
    return {"logit_ids": ids, "logit_values": logits.float().gather(-1, ids)}


def kept_target_ids(vocabulary: DraftVocabulary, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Which target ids the stored draft ids stand for; exact, whatever the logits are."""
    ids = stored["logit_ids"]
    if int(ids.max()) >= vocabulary.contract.draft_vocab_size:
        return {"top_target_ids": ids[..., :1]}  # another vocabulary: a shape that cannot fit
    table = vocabulary.target_ids_V
    return {"top_target_ids": vocabulary.to_target_ids(ids if table is None else ids.to(table.device))}


def kept_proposal(proposal: Proposal, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drafts, the log-probabilities of the recorded candidates, and confidence, as far as they are comparable."""
    assert proposal.candidate_ids_BKC is not None and proposal.log_q_BKC is not None, "drawn with candidates"
    candidates, log_q = proposal.candidate_ids_BKC, proposal.log_q_BKC.float().clamp(min=-20.0)
    kept: dict[str, Tensor] = {}
    if "candidate_ids" not in stored:
        best = log_q.topk(min(_NUM_CANDIDATES, log_q.shape[-1]), dim=-1)
        kept |= {"draft_ids": proposal.ids_BK, "candidate_ids": candidates.gather(-1, best.indices)}
        kept["candidate_log_q"] = best.values
    else:
        there = stored["candidate_ids"].to(candidates.device)
        recorded, recorded_q = stored["draft_ids"].to(candidates.device), stored["candidate_log_q"].to(log_q.device)
        if recorded.shape != proposal.ids_BK.shape:
            return {"draft_ids": proposal.ids_BK}
        is_it = candidates.unsqueeze(-2) == there.unsqueeze(-1)
        found = torch.where(is_it, log_q.unsqueeze(-2), torch.full_like(log_q, -20.0).unsqueeze(-2)).amax(-1)
        # the last of a short list may give way to another where the target's head is quantised
        is_there = is_it.any(-1)
        are_most_there = is_there.float().mean(-1, keepdim=True) >= 0.5
        found = torch.where(~is_there & are_most_there, recorded_q, found)
        differs = proposal.ids_BK.ne(recorded)
        behind_first = differs.long().cumsum(-1) - differs.long() > 0
        kept["candidate_log_q"] = torch.where(behind_first.unsqueeze(-1), recorded_q, found)
        is_out = are_most_there.squeeze(-1) & (candidates != recorded.unsqueeze(-1)).all(-1)
        kept["draft_ids"] = settled(proposal.ids_BK, recorded, there, recorded_q, is_out)
    if proposal.confidence_BK is not None:
        kept["confidence"] = proposal.confidence_BK.float()
    return kept
