"""One rank's part of a stage: heads, experts and vocabulary are shared out, all else is on every rank.

    by rows       q, k and v, their convolution, forget, beta and output gates, decay rates and offsets of the rank's
                  heads; kv_b_proj of its heads; gate and up of its share of an MLP's width; its experts; its ids
    by columns    o_proj and down_proj, whose products are partial sums; their biases are added to the sum
    whole         norms, score vectors, the router, the projections to and from latents, f_a_proj

In dense targets a rank has whole groups of query heads with their key/value heads. A tied head is the rank's rows of
the embedding table.

Partial sums are added before anything reads them: the stream, and so every mixture and tap, is whole on every rank.
The experts' sum is complete before its norm. Decay rates are narrowed to the heads before they are cut, whatever pads
them in the file.

B requests, T rows, D width, X width of an expert's input, I rows of the vocabulary's part.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.kimi_contract import ExpertSettings
from paceline.distributed.choosing import Truncation, choose_ids, gathered_scores
from paceline.distributed.mesh import TensorGroup
from paceline.engine.slots import SamplingRows
from paceline.errors import ConfigError
from paceline.models.layers import DecoderLayer, Linear
from paceline.models.targets.dense import DenseTarget
from paceline.models.targets.dense_stage import DenseStage
from paceline.models.targets.kimi import KimiTarget
from paceline.models.targets.kimi_experts import Experts, KimiMLP, MixtureOfExperts
from paceline.models.targets.kimi_layer import KimiLayer
from paceline.models.targets.kimi_stage import KimiStage
from paceline.models.targets.stage import logit_scale
from paceline.ops.gated_activation import Activation
from paceline.ops.mixture_of_experts import Routing, mix_experts
from paceline.ops.sharded_top_k import LogitTransform, VocabularyShard, sharded_top_k, split_vocabulary

_AS_THEY_ARE = LogitTransform("softcap_then_scale")


class ReducedLinear(Linear):
    """A product over a part of the inputs, summed over all ranks.

    Args:
        in_size: of this rank's part.
        out_size: of the whole.
        tensor: the ranks.
        bias: of the whole, on every rank; added once.
    """

    def __init__(self, in_size: int, out_size: int, tensor: TensorGroup, *, bias: bool = False) -> None:
        super().__init__(in_size, out_size, bias=bias)
        self._tensor = tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_size] to [..., out_size]."""
        total = self.total(self.product(x, None))
        return total if self.bias is None else total + self.bias

    def total(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' parts; this one's may be written over."""
        return self._tensor.total(partial, in_order=self.mode == "row_invariant")


class ShardedExperts(Experts):
    """A rank's experts; the sum over all ranks is that over all experts.

    Args:
        width: of an expert's input.
        settings: of the whole mixture.
        activation: inside every expert.
        tensor: the ranks.
    """

    def __init__(self, width: int, settings: ExpertSettings, activation: Activation, tensor: TensorGroup) -> None:
        num_own = settings.num_experts // tensor.size
        super().__init__(width, dataclasses.replace(settings, num_experts=num_own), activation)
        self.first_expert, self._tensor = tensor.index * num_own, tensor

    def forward(self, x_TX: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of each row's experts, [T, X]."""
        weights = self._prepared if self._prepared is not None else self._weights()
        partial_TX = mix_experts(
            x_TX, routing, weights, self.activation, first_expert=self.first_expert, mode=self.mode
        )
        return self._tensor.total(partial_TX, in_order=self.mode == "row_invariant")


class ShardedEmbedding(nn.Embedding):
    """A rank's rows of the embedding table; one rank has the row, and adding zeros to it changes nothing.

    Args:
        shard: the rank's ids.
        width: of a row.
        tensor: the ranks.
    """

    def __init__(self, shard: VocabularyShard, width: int, tensor: TensorGroup) -> None:
        super().__init__(shard.num_rows, width)
        self._first_id, self._tensor = shard.ranges[0].first_id, tensor

    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Rows of ids of the whole vocabulary, [B, T, D]."""
        own_ids_BT = token_ids_BT - self._first_id
        is_own_BT = (own_ids_BT >= 0) & (own_ids_BT < self.num_embeddings)
        rows_BTD = functional.embedding(own_ids_BT.clamp(0, self.num_embeddings - 1), self.weight)
        return self._tensor.total(rows_BTD.masked_fill(~is_own_BT.unsqueeze(-1), 0.0), in_order=False)


class ShardedHead(Linear):
    """A rank's rows of the output head: scores of its own ids, or of all of them, put together from every rank.

    Args:
        contract: of the whole target.
        tensor: the ranks.
    """

    def __init__(self, contract: TargetContract, tensor: TensorGroup) -> None:
        shard = vocabulary_shard(contract, tensor)
        super().__init__(contract.hidden_size, shard.num_rows)
        self.shard = shard
        self._vocab_size, self._scale, self._tensor = contract.vocab_size, logit_scale(contract), tensor

    def own(self, hidden: Tensor) -> Tensor:
        """Scores of the rank's ids, [..., D] to [..., I]."""
        return super().forward(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """Scores of every id on every rank, [..., D] to [..., V]: as many numbers cross as there are."""
        return gathered_scores(self.own(hidden), self._vocab_size, self._tensor)

    def best_scores(self, hidden: Tensor, num_best: int) -> Tensor:
        """The best scores of all ids on every rank, those of others as -inf, [..., D] to [..., V]."""
        scores_RI = self._scaled(self.own(hidden)).flatten(0, -2)
        best_RC, ids_RC = sharded_top_k(
            scores_RI, num_best, self.shard, transform=_AS_THEY_ARE, group=self._tensor.group
        )
        whole_RV = scores_RI.new_full((scores_RI.shape[0], self._vocab_size), -torch.inf)
        return whole_RV.scatter_(1, ids_RC, best_RC.to(whole_RV.dtype)).view(*hidden.shape[:-1], self._vocab_size)

    def _scaled(self, scores: Tensor) -> Tensor:
        return scores if self._scale == 1.0 else scores * self._scale

    def choose(
        self,
        hidden_RD: Tensor,
        sampling: SamplingRows,
        position_R: Tensor,
        *,
        all_greedy: bool,
        max_top_k: int,
        any_top_p: bool,
        any_min_p: bool,
    ) -> tuple[Tensor, Tensor]:
        """Each row's own token and its score, from what the ranks know of their ids: see `choose_ids`."""
        scores_RI = self._scaled(self.own(hidden_RD))
        return choose_ids(
            scores_RI,
            self.shard,
            self._tensor,
            sampling=sampling,
            position_R=position_R,
            all_greedy=all_greedy,
            vocab_size=self._vocab_size,
            truncation=Truncation(max_top_k, any_top_p, any_min_p),
        )


def vocabulary_shard(contract: TargetContract, tensor: TensorGroup) -> VocabularyShard:
    """A rank's ids: rows without padding, so that the last rank may have fewer."""
    padded = split_vocabulary(contract.vocab_size, 0, rank=tensor.index, num_ranks=tensor.size, multiple=1)
    return VocabularyShard(padded.num_ids, padded.ranges)


def require_shares(contract: TargetContract, size: int) -> None:
    """Refuse a number of ranks that a target's layers cannot be shared among.

    Raises:
        ConfigError: names what does not come out even.
    """
    kimi = contract.kimi
    counts = {"num_attention_heads": contract.num_heads, "intermediate_size": contract.intermediate_size}
    if kimi is None:
        counts["num_key_value_heads"] = contract.num_kv_heads
    if kimi is not None and kimi.delta is not None:
        counts["linear_attn_config.num_heads"] = kimi.delta.num_heads
    if kimi is not None and kimi.experts is not None:
        counts["num_experts"] = kimi.experts.num_experts
        counts["width of the shared experts"] = kimi.experts.num_shared_experts * kimi.experts.intermediate_size
    uneven = [f"{name} {count}" for name, count in counts.items() if count % size]
    if contract.vocab_size <= (size - 1) * -(-contract.vocab_size // size):
        uneven.append(f"vocab_size {contract.vocab_size}")
    if uneven:
        raise ConfigError(
            f"{size} ranks per stage cannot share {' and '.join(uneven)} evenly",
            origin={"target": contract.origin},
            hint="a number of ranks that divides them, and more stages instead",
        )


def share_of(contract: TargetContract, size: int) -> TargetContract:
    """The contract of one rank's part: sizes of what it has of each layer; experts and vocabulary are not in it."""
    kimi = contract.kimi
    if kimi is not None and kimi.delta is not None:
        delta = dataclasses.replace(kimi.delta, num_heads=kimi.delta.num_heads // size)
        kimi = dataclasses.replace(kimi, delta=delta)
    return dataclasses.replace(
        contract,
        num_heads=contract.num_heads // size,
        # of a Kimi target this says nothing: latents are every head's
        num_kv_heads=contract.num_kv_heads // size if kimi is None else contract.num_kv_heads,
        intermediate_size=contract.intermediate_size // size,
        kimi=kimi,
    )


def sharded_stage(contract: TargetContract, start: int, end: int, tensor: TensorGroup) -> KimiStage | DenseStage:
    """A stage of which this rank has a part; its weights are not set. With all layers it is a whole target.

    Args:
        contract: of the whole target.
        start: first layer.
        end: behind the last layer.
        tensor: the ranks of the stage.
    Raises:
        ConfigError: there are no such layers, or they cannot be shared out.
    """
    require_shares(contract, tensor.size)
    share = share_of(contract, tensor.size)
    stage: KimiStage | DenseStage
    if (start, end) == (0, contract.num_layers):
        stage = DenseTarget(share) if contract.kimi is None else KimiTarget(share)
    else:
        stage = DenseStage(share, start, end) if contract.kimi is None else KimiStage(share, start, end)
    if tensor.size == 1:
        return stage
    shard = vocabulary_shard(contract, tensor)
    if stage.embed_tokens is not None:
        stage.embed_tokens = ShardedEmbedding(shard, contract.hidden_size, tensor)
    if stage.lm_head is not None:
        stage.lm_head = ShardedHead(contract, tensor)
    if isinstance(stage, DenseStage):
        stage.tie()
    for layer in stage.layers[start:end]:
        assert isinstance(layer, (KimiLayer, DecoderLayer))
        layer.self_attn.o_proj = _reduced(layer.self_attn.o_proj, tensor)
        if isinstance(layer.mlp, MixtureOfExperts):
            _share_mixture(layer.mlp, contract, tensor)
        else:
            layer.mlp.down_proj = _reduced(layer.mlp.down_proj, tensor)
    return stage


def _share_mixture(mixture: MixtureOfExperts, contract: TargetContract, tensor: TensorGroup) -> None:
    assert contract.kimi is not None and contract.kimi.experts is not None
    settings, activation = contract.kimi.experts, mixture.experts.activation
    mixture.experts = ShardedExperts(settings.latent_size or contract.hidden_size, settings, activation, tensor)
    if mixture.shared_experts is not None:
        share = mixture.shared_experts.intermediate_size // tensor.size
        shared = KimiMLP(contract.hidden_size, share, activation)
        shared.down_proj = _reduced(shared.down_proj, tensor)
        mixture.shared_experts = shared


def _reduced(linear: Linear, tensor: TensorGroup) -> ReducedLinear:
    out_size, in_size = linear.weight.shape
    with torch.device(linear.weight.device):
        return ReducedLinear(in_size, out_size, tensor, bias=linear.bias is not None)
