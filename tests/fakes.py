"""Stand-ins with exactly known behaviour: table targets, table and scripted proposers, a byte tokenizer.

A table target is a real `DenseTarget` with one-hot embeddings, no attention, no MLP, and a head that holds chosen
log-probabilities: the next token depends on the last one alone, and its distribution is known exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.contract import (
    AuxHiddenStream,
    DrafterContract,
    DraftSampleMethod,
    RopeSettings,
    TargetContract,
)
from paceline.engine.canary import ReplayProposer
from paceline.engine.proposal import Rows
from paceline.engine.slots import SlotState
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.drafters.proposal import MAX_CANDIDATES, DraftSampling, Proposal
from paceline.models.layers import set_linear_mode
from paceline.models.loading import LoadedTarget
from paceline.models.targets.dense import DenseTarget

__all__ = ["ByteTokenizer", "ReplayProposer", "TableProposer", "scripted_target", "table_target"]


class ByteTokenizer:
    """Ids 0 to 255 are bytes, ids in `pieces` are longer byte strings, everything else is special and has no text.

    Args:
        pieces: id to bytes, for tokens that cut characters anywhere.
    """

    has_chat_template = False

    def __init__(self, pieces: Mapping[int, bytes] | None = None) -> None:
        self.pieces = {index: bytes([index]) for index in range(256)} | dict(pieces or {})

    def encode(self, text: str) -> list[int]:
        """One id per byte."""
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that form no character become U+FFFD."""
        return b"".join(self.pieces.get(index, b"") for index in ids).decode(errors="replace")


def table_target_contract(
    vocab_size: int, *, max_positions: int = 4096, stop_token_ids: Sequence[int] = ()
) -> TargetContract:
    """Sizes of a table target."""
    return TargetContract(
        architecture="LlamaForCausalLM",
        name="table",
        origin="tests/table",
        num_layers=1,
        hidden_size=vocab_size,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=2,
        vocab_size=vocab_size,
        rms_norm_eps=0.0,
        rope=RopeSettings(theta=10_000.0),
        max_position_embeddings=max_positions,
        has_qk_norm=False,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        stop_token_ids=tuple(stop_token_ids),
        bos_token_id=None,
        dtype="float32",
    )


def table_target(
    log_p_VV: Tensor, *, tokenizer: Any = None, max_positions: int = 4096, stop_token_ids: Sequence[int] = ()
) -> LoadedTarget:
    """A target whose logits after token v are row v of a table.

    Args:
        log_p_VV: float [V, V].
        tokenizer: a `ByteTokenizer` if None.
        max_positions: context limit.
        stop_token_ids: of the contract.
    """
    vocab_size = log_p_VV.shape[0]
    contract = table_target_contract(vocab_size, max_positions=max_positions, stop_token_ids=stop_token_ids)
    model = DenseTarget(contract).requires_grad_(False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.dim() == 1 else 0.0)
        model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        model.lm_head.weight.copy_(log_p_VV.T / vocab_size**0.5)  # the final norm makes a one-hot row sqrt(V) long
    set_linear_mode(model, "plain")
    return LoadedTarget(model, contract, tokenizer or ByteTokenizer(), "plain")


def scripted_target(script: Sequence[int], *, vocab_size: int, **options: Any) -> LoadedTarget:
    """A table target that, greedily, says `script` after token script[0]; its tokens have to be distinct."""
    assert len(set(script)) == len(script), "the next token depends on the last alone"
    table = torch.zeros(vocab_size, vocab_size)
    for before, after in itertools.pairwise(script):
        table[before, after] = 10.0
    return table_target(table, **options)


@dataclass(frozen=True)
class Lending:
    """The two ends of a target: embedding rows and an output head, each [V, D]."""

    embedding_VD: Tensor
    head_VD: Tensor

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows of the table."""
        return self.embedding_VD[token_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every id."""
        return hidden @ self.head_VD.T


class TableProposer:
    """Drafts every position of a block from one table, given the anchor; drawn and reported as DFlash drafters do.

    Args:
        logits_VKV: float [V, K, V], drafter logits of position k after anchor v.
        contract: of any DFlash drafter; only its drawing code is used.
        method: "greedy" or "probabilistic".
        corrupt: changes a proposal before it is stored; for planted faults.
        is_coupled: draw with the target's own noise.
    """

    max_positions = 2**31
    target_layer_ids = ()
    aux_hidden_stream: AuxHiddenStream = "prefix"
    is_capturable = True
    is_parallel = True
    cache = None

    def __init__(
        self,
        logits_VKV: Tensor,
        contract: DrafterContract,
        *,
        method: DraftSampleMethod,
        corrupt: Callable[[Proposal], Proposal] | None = None,
        is_coupled: bool = False,
    ) -> None:
        self.name = f"table/{method}"
        self._is_coupled = is_coupled
        self._logits_VKV, self._method, self._corrupt = logits_VKV, method, corrupt
        self._drafter = DFlashDrafter(contract)
        self.num_draft_tokens = logits_VKV.shape[1]
        self.num_candidates = min(MAX_CANDIDATES, logits_VKV.shape[2]) if method == "probabilistic" else 0

    def write_context(self, rows: Rows, taps: Sequence[Tensor], positions_BT: Tensor) -> None:
        """A table needs no context."""

    def settle(self, rows: Rows, token_ids_BT: Tensor, ends_B: Tensor, next_ids_B: Tensor) -> None:
        """Nothing depends on it."""

    def propose(self, rows: Rows, state: SlotState, *, all_greedy: bool, num_drafts: int | None = None) -> Proposal:
        """Draw K drafts per request, or the first `num_drafts` of them."""
        settings = state.sampling_rows(rows.slots_B)
        anchors_B = state.anchors[rows.slots_B].clamp(min=0)
        sampling = DraftSampling(
            method="greedy" if all_greedy else self._method,
            temperature_B=settings.temperature_B,
            seed_B=settings.seed_B,
            position_B=state.lengths[rows.slots_B],
            step_B=state.steps[rows.slots_B],
            is_coupled=self._is_coupled,
        )
        logits_BKV = self._logits_VKV[anchors_B, :num_drafts]
        proposal = self._drafter.propose(logits_BKV[..., :0], logits_BKV, anchors_B, sampling)
        return self._corrupt(proposal) if self._corrupt is not None else proposal
