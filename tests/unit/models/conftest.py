"""Contracts and seeded random networks of a few thousand parameters, for the tests of models and training."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import DrafterContract, RopeSettings, TargetContract, TargetLayerId
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.targets.dense import DenseTarget
from paceline.ops.attention import attention_reference


def target_contract(**changes: Any) -> TargetContract:
    """A Llama-like target of 4 layers; `changes` replace fields."""
    contract = TargetContract(
        architecture="LlamaForCausalLM",
        name="tiny",
        origin="memory",
        num_layers=4,
        hidden_size=24,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        vocab_size=61,
        rms_norm_eps=1e-5,
        rope=RopeSettings(theta=10000.0),
        max_position_embeddings=128,
        has_qk_norm=False,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        stop_token_ids=(2,),
        bos_token_id=None,
        dtype="float32",
    )
    return dataclasses.replace(contract, **changes)


def drafter_contract(**changes: Any) -> DrafterContract:
    """A two-layer DFlash drafter for `target_contract()`; `changes` replace fields."""
    contract = DrafterContract(
        family="dflash",
        origin="memory",
        target_name="tiny",
        target_num_layers=4,
        target_hidden_size=24,
        target_vocab_size=61,
        target_layer_ids=(TargetLayerId(0), TargetLayerId(2)),
        aux_hidden_stream="prefix",
        has_tap_norm=False,
        block_size=4,
        layout="fill_in",
        mask_token_id=60,
        vocab_size=61,
        draft_vocab_size=61,
        num_layers=2,
        hidden_size=24,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        rms_norm_eps=1e-5,
        attention_bias=False,
        rope=RopeSettings(theta=10000.0),
        is_neox_style=True,
        max_position_embeddings=128,
        layer_windows=(None, None),
        layer_causal=(False, False),
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        draft_sample_method="greedy",
        dtype="float32",
    )
    return dataclasses.replace(contract, **changes)


def randomise(model: nn.Module, seed: int) -> None:
    """Fill parameters: gains around 1, all else normal with a scale that keeps layers from saturating."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and parameter.dim() == 1:
                parameter.copy_(1.0 + 0.2 * noise)
            else:
                parameter.copy_(noise * (0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))


def tiny_target(seed: int = 0, **changes: Any) -> DenseTarget:
    """A frozen random target in float32."""
    target = DenseTarget(target_contract(**changes))
    randomise(target, seed)
    return target.requires_grad_(False).eval()


def tiny_drafter(seed: int = 1, **changes: Any) -> DFlashDrafter:
    """A random drafter in float32, trainable."""
    drafter = DFlashDrafter(drafter_contract(**changes))
    randomise(drafter, seed)
    return drafter


def positions_of(token_ids_BT: Tensor) -> Tensor:
    """0, 1, 2, ... for every row."""
    return torch.arange(token_ids_BT.shape[1]).expand(token_ids_BT.shape)


class CachedContext:
    """Attention as serving does it, for one request: context keys grow by what was accepted, blocks are thrown away."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        self._drafter = drafter
        self._keys: list[list[Tensor]] = [[] for _ in range(drafter.contract.num_layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(drafter.contract.num_layers)]
        self.length = 0

    def extend(self, taps: list[Tensor]) -> None:
        """Commit positions, [n, target width] per tap."""
        features = self._drafter.backbone.context_features(taps)
        positions = torch.arange(self.length, self.length + features.shape[0])
        for layer, (k, v) in enumerate(self._drafter.backbone.context_kv(features, positions)):
            self._keys[layer].append(k)
            self._values[layer].append(v)
        self.length += features.shape[0]

    def draft(self, embeddings_QD: Tensor) -> Tensor:
        """Run a block of embedded rows whose anchor stands right after the context; [Q, D]."""
        positions = self.length + torch.arange(embeddings_QD.shape[0])
        hidden: Tensor = self._drafter.backbone(embeddings_QD[None], positions[None], self)
        return hidden[0]

    def __call__(
        self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor, *, sink_N: Tensor | None = None
    ) -> Tensor:
        """Attend over the cached context and the block's own rows."""
        contract = self._drafter.contract
        k = torch.cat([*self._keys[layer], k_BTMH[0]])[None].transpose(1, 2)
        v = torch.cat([*self._values[layer], v_BTMH[0]])[None].transpose(1, 2)
        query = torch.arange(self.length, self.length + q_BTNH.shape[1])[:, None]
        key = torch.arange(k.shape[2])[None, :]
        window, causal = contract.layer_windows[layer], contract.layer_causal[layer]
        visible = torch.ones(query.shape[0], key.shape[1], dtype=torch.bool)
        if causal:
            visible &= key <= query
        if window is not None:
            visible &= (query - key).abs() < window
        return attention_reference(q_BTNH.transpose(1, 2), k, v, visible).transpose(1, 2)
