"""EAGLE-3: a small causal decoder that drafts one token per pass, from the target's taps and its own last state.

Row p reads the embedding of the token *after* it, token[p + 1], beside a hidden state, and predicts token[p + 2]. The
hidden state comes from the target's taps where the target has been; further on it is the drafter's own state of the row
before. So keys and values at p depend on token[p + 1], unlike those of the block drafters.

    layer 0   y = (norm(h) if norm_before_residual else h) + Attention([norm(e), norm(h)]);  y + MLP(norm(y))
    further   ordinary decoder layers, or the same doubled layer over e and the stream (`doubles_every_layer`)
    output    norm(y); the next pass gets norm(y) if norm_output, else y

Source: arXiv 2503.01840; switches as in published EAGLE-3 configs. B requests, T rows, D width, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import DrafterContract, Eagle3Settings
from paceline.errors import CheckpointError
from paceline.models.drafters.vocabulary import DraftVocabulary, Lender
from paceline.models.layers import (
    Attend,
    DecoderLayer,
    GatedMLP,
    Linear,
    LinearMode,
    RMSNorm,
    RotaryRows,
    SelfAttention,
    set_drafter_mode,
)
from paceline.models.positions import position_table
from paceline.ops.rotary import rotary_turns


class DoubledLayer(nn.Module):
    """A decoder layer whose attention reads [embedding, hidden state], each normed on its own, embeddings first.

    Args:
        contract: of the drafter.
        eagle3: its switches.
    """

    def __init__(self, contract: DrafterContract, eagle3: Eagle3Settings) -> None:
        super().__init__()
        width, eps = contract.hidden_size, contract.rms_norm_eps
        self.norm_before_residual = eagle3.norm_before_residual
        self.input_layernorm = RMSNorm(width, eps)  # of the embeddings
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = SelfAttention(
            width,
            contract.num_heads,
            contract.num_kv_heads,
            contract.head_size,
            eps=eps,
            bias=contract.attention_bias,
            qk_norm=contract.has_qk_norm,
            in_size=2 * width,
        )
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, contract.intermediate_size)

    def forward(
        self,
        embeddings_BTD: Tensor,
        hidden_BTD: Tensor,
        rows: RotaryRows,
        attend: Attend,
        layer: int,
        *,
        is_neox_style: bool,
    ) -> Tensor:
        """Return the residual stream after this layer."""
        normed_BTD: Tensor = self.hidden_norm(hidden_BTD)
        both = torch.cat((self.input_layernorm(embeddings_BTD), normed_BTD), dim=-1)
        attended: Tensor = self.self_attn(both, rows, attend, layer, is_neox_style=is_neox_style)
        x_BTD = (normed_BTD if self.norm_before_residual else hidden_BTD) + attended
        mixed: Tensor = self.mlp(self.post_attention_layernorm(x_BTD))
        return x_BTD + mixed


class Eagle3Drafter(nn.Module):
    """The network of one pass; who calls it keeps keys, values and states (`engine/sequential_proposal.py`).

    Args:
        contract: of family "eagle3".
        max_positions: rows of the position table.
    Raises:
        CheckpointError: the contract asks for what this network does not have.
    """

    def __init__(self, contract: DrafterContract, *, max_positions: int | None = None) -> None:
        super().__init__()
        self.contract = contract
        eagle3 = _checked_settings(contract)
        width, eps = contract.hidden_size, contract.rms_norm_eps
        self.norm_output = eagle3.norm_output
        taps_width = contract.num_taps * contract.target_hidden_size
        num_norms = contract.num_taps if contract.has_tap_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(contract.target_hidden_size, eps) for _ in range(num_norms))
        self.input_norm = RMSNorm(taps_width, eps) if eagle3.norm_before_fc else None
        self.fc = Linear(taps_width, width)
        self.layers = nn.ModuleList(
            DoubledLayer(contract, eagle3) if layer == 0 or eagle3.doubles_every_layer else _plain_layer(contract)
            for layer in range(contract.num_layers)
        )
        self.norm = RMSNorm(width, eps)
        self.vocabulary = DraftVocabulary(contract)
        self.position_table: Tensor
        table = position_table(contract.rope, contract.head_size, max_positions or contract.max_position_embeddings)
        self.register_buffer("position_table", table, persistent=False)

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(key/value heads, head size) of a cached row."""
        return self.contract.num_kv_heads, self.contract.head_size

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """The hidden state that a row starts from where the target has been.

        Args:
            taps: ascending by layer, each [..., target width]; float32 streams are cast to the drafter's dtype.
        Returns:
            [..., D]: fc(concatenation), with one norm per tap or one over the concatenation where the contract says so.
        """
        streams = [tap.to(self.fc.weight.dtype) for tap in taps]
        if self.contract.has_tap_norm:
            streams = [norm(stream) for norm, stream in zip(self.fc_norm, streams, strict=True)]
        joined = torch.cat(streams, dim=-1)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        features: Tensor = self.fc(joined)
        return features

    def embed(self, token_ids: Tensor, target: Lender) -> Tensor:
        """Embedding rows in the drafter's dtype, [...] to [..., D]."""
        return self.vocabulary.embed(token_ids, target).to(self.fc.weight.dtype)

    def forward(
        self, embeddings_BTD: Tensor, hidden_BTD: Tensor, positions_BT: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Run rows through every layer.

        Args:
            embeddings_BTD: of the token after each row.
            hidden_BTD: `features` of the row, or what the row before gave to be recycled.
            positions_BT: int64, the rows' own positions, below the table's length.
            attend: causal attention over everything before and the rows themselves.
        Returns:
            What the head reads, and what the next row starts from, each [B, T, D].
        """
        neox = self.contract.is_neox_style
        rows = rotary_turns(self.position_table, positions_BT, embeddings_BTD.dtype, is_neox_style=neox)
        x = hidden_BTD
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DoubledLayer):
                x = layer(embeddings_BTD, x, rows, attend, index, is_neox_style=neox)
            else:
                x = layer(x, rows, attend, index, is_neox_style=neox)
        out: Tensor = self.norm(x)
        return out, out if self.norm_output else x

    def logits(self, out: Tensor, target: Lender) -> Tensor:
        """Draft scores, [..., D] to [..., V]."""
        return self.vocabulary.logits(out, target)

    def prepare_for_serving(self, mode: LinearMode) -> None:
        """Set the arithmetic of every linear."""
        set_drafter_mode(self, mode)

    def checkpoint_parameters(self) -> dict[str, Tensor]:
        """Parameters by the names that `checkpoint/names.py` maps to files."""
        return {name.removeprefix("vocabulary."): parameter for name, parameter in self.named_parameters()}


def _plain_layer(contract: DrafterContract) -> DecoderLayer:
    return DecoderLayer(
        hidden_size=contract.hidden_size,
        intermediate_size=contract.intermediate_size,
        num_heads=contract.num_heads,
        num_kv_heads=contract.num_kv_heads,
        head_size=contract.head_size,
        eps=contract.rms_norm_eps,
        attention_bias=contract.attention_bias,
        mlp_bias=False,
        qk_norm=contract.has_qk_norm,
    )


def _checked_settings(contract: DrafterContract) -> Eagle3Settings:
    """The switches, unless the contract describes another kind of drafter."""
    found = None
    if contract.eagle3 is None:
        found = "no EAGLE-3 switches (norm_before_residual, norm_before_fc, norm_output)"
    elif contract.layout != "autoregressive":
        found = f"the block layout {contract.layout!r}; EAGLE-3 drafts row by row, layout 'autoregressive'"
    elif not all(contract.layer_causal):
        found = f"causal layers {list(contract.layer_causal)}; rows that are drafted one by one cannot see later ones"
    elif contract.latent is not None or contract.has_attention_sink or contract.attention_value_scale != 1.0:
        found = "latent attention, attention sinks or a value scale, which an EAGLE-3 drafter cannot be served with"
    if contract.eagle3 is None or found is not None:
        raise CheckpointError(f"the drafter's contract has {found}", origin={"drafter": contract.origin})
    return contract.eagle3
