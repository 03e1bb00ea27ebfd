"""Kimi targets once more, slowly: token by token and head by head in float64, from a config and tensors as files have
them. Written from the formulas alone, it shares neither code nor fused layouts with the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class SlowPass:
    """What one pass over a sequence of T tokens gives; all [T, D] but the logits."""

    logits: Tensor
    before_norm: Tensor
    prefix: list[Tensor] = field(default_factory=list)  # taps 0..L of the running sum
    mixed: list[Tensor] = field(default_factory=list)  # taps 0..L of the mixtures, with attention residuals


def slow_kimi(config: dict[str, Any], tensors: dict[str, Tensor], ids: list[int], latent_eps: float) -> SlowPass:
    """Run a whole sequence."""
    return _Slow(config, {name: tensor.double() for name, tensor in tensors.items()}, latent_eps).run(ids)


class _Slow:
    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], latent_eps: float) -> None:
        self.c, self.w, self.latent_eps = config, tensors, latent_eps
        self.eps = config["rms_norm_eps"]

    def run(self, ids: list[int]) -> SlowPass:
        w, depth, block = self.w, self.c["num_hidden_layers"], self.c["attn_res_block_size"]
        p = w["model.embed_tokens.weight"][ids]
        bank: list[Tensor] = []
        prefix, mixed = [p], [p]
        for layer in range(depth):
            name = f"model.layers.{layer}."
            if block is None:
                p = p + self.attention(layer, self.norm(p, name + "input_layernorm"))
                p = p + self.feed_forward(layer, self.norm(p, name + "post_attention_layernorm"))
                prefix.append(p)
                continue
            x = self.norm(self.mix(bank, p, name + "self_attention_res"), name + "input_layernorm")
            if layer % block == 0:
                bank.append(p)
            a = self.attention(layer, x)
            p = a if layer % block == 0 else p + a
            y = self.norm(self.mix(bank, p, name + "mlp_res"), name + "post_attention_layernorm")
            p = p + self.feed_forward(layer, y)
            prefix.append(p)
            is_last = layer == depth - 1
            consumer = "model.output_attn_res" if is_last else f"model.layers.{layer + 1}.self_attention_res"
            mixed.append(self.mix(bank, p, consumer))
        hidden = p if block is None else mixed[-1]
        logits = self.norm(hidden, "model.norm") @ w["lm_head.weight"].t() * self.c.get("logit_scale", 1.0)
        return SlowPass(logits, hidden, prefix, [] if block is None else mixed)

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + (self.eps if eps is None else eps)) ** -0.5
        return x * scale * self.w[f"{name}.weight"]

    def mix(self, bank: list[Tensor], p: Tensor, name: str) -> Tensor:
        vector = self.w[f"{name}_norm.weight"] * self.w[f"{name}_proj.weight"][0]
        rows = []
        for t in range(len(p)):
            sources = [row[t] for row in bank] + [p[t]]
            scores = [float((v * vector).sum() * (v.square().mean() + self.eps) ** -0.5) for v in sources]
            weights = [math.exp(score - max(scores)) for score in scores]
            rows.append(sum(weight / sum(weights) * v for weight, v in zip(weights, sources, strict=True)))
        return torch.stack([torch.as_tensor(row) for row in rows])

    def attention(self, layer: int, x: Tensor) -> Tensor:
        linear = self.c["linear_attn_config"]
        is_delta = layer + 1 in linear["kda_layers"]
        name = f"model.layers.{layer}.self_attn."
        return self.delta(name, x, linear) if is_delta else self.latent(name, x)

    def delta(self, name: str, x: Tensor, linear: dict[str, Any]) -> Tensor:
        w, heads, size = self.w, linear["num_heads"], linear["head_dim"]
        q, k, v = (self.convolved(x @ w[f"{name}{part}_proj.weight"].t(), f"{name}{part}_conv1d") for part in "qkv")
        f = x @ w[f"{name}f_a_proj.weight"].t() @ w[f"{name}f_b_proj.weight"].t() + w[f"{name}dt_bias"]
        beta = torch.sigmoid(x @ w[f"{name}b_proj.weight"].t())
        if linear["use_full_rank_gate"]:
            z = x @ w[f"{name}g_proj.weight"].t()
        else:
            z = x @ w[f"{name}g_a_proj.weight"].t() @ w[f"{name}g_b_proj.weight"].t()
        rates, out = w[f"{name}A_log"].flatten()[:heads].exp(), torch.zeros_like(q)
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            state = torch.zeros(size, size, dtype=torch.float64)
            for t in range(len(x)):
                bound = linear["gate_lower_bound"]
                if bound is None:
                    g = -rates[head] * torch.log1p(f[t, part].exp())
                else:
                    g = bound * torch.sigmoid(rates[head] * f[t, part])
                query, key = (row[t, part] / (row[t, part].square().sum() + 1e-6).sqrt() for row in (q, k))
                state = g.exp()[:, None] * state
                state = state + torch.outer(key, beta[t, head] * (v[t, part] - state.t() @ key))
                out[t, part] = state.t() @ query * size**-0.5
            normed = self.norm(out[:, part], f"{name}o_norm")
            out[:, part] = normed * torch.sigmoid(z[:, part])
        return out @ w[f"{name}o_proj.weight"].t()

    def convolved(self, x: Tensor, name: str) -> Tensor:
        taps = self.w[f"{name}.weight"].reshape(x.shape[1], -1)
        padded = torch.cat((torch.zeros(taps.shape[1] - 1, x.shape[1], dtype=x.dtype), x))
        y = torch.stack([(padded[t : t + taps.shape[1]].t() * taps).sum(1) for t in range(len(x))])
        return y * torch.sigmoid(y)

    def latent(self, name: str, x: Tensor) -> Tensor:
        w, c = self.w, self.c
        heads, nope, rope, size = (
            c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        if c["q_lora_rank"] is None:
            q = x @ w[f"{name}q_proj.weight"].t()
        else:
            low = self.norm(x @ w[f"{name}q_a_proj.weight"].t(), f"{name}q_a_layernorm", self.latent_eps)
            q = low @ w[f"{name}q_b_proj.weight"].t()
        row = x @ w[f"{name}kv_a_proj_with_mqa.weight"].t()
        latent = self.norm(row[:, : c["kv_lora_rank"]], f"{name}kv_a_layernorm", self.latent_eps)
        shared = row[:, c["kv_lora_rank"] :]
        expanded = (latent @ w[f"{name}kv_b_proj.weight"].t()).view(len(x), heads, nope + size)
        out = []
        for head in range(heads):
            query = q.view(len(x), heads, nope + rope)[:, head]
            key = torch.cat((expanded[:, head, :nope], shared), dim=1)
            scores = query @ key.t() * (nope + rope) ** -0.5
            scores = scores.masked_fill(~torch.ones_like(scores).bool().tril(), -math.inf)
            out.append(scores.softmax(-1) @ expanded[:, head, nope:])
        mixed = torch.cat(out, dim=1)
        if c["mla_use_output_gate"]:
            mixed = mixed * torch.sigmoid(x @ w[f"{name}g_proj.weight"].t())
        return mixed @ w[f"{name}o_proj.weight"].t()

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.c["hidden_act"] == "silu":
            return gate * torch.sigmoid(gate) * up
        beta, bound = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        bounded = up if bound is None else bound * torch.tanh(up / bound)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded

    def mlp(self, name: str, x: Tensor, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Tensor:
        gate, up, down = (self.w[f"{name}.{part}.weight"] for part in parts)
        return self.activate(x @ gate.t(), x @ up.t()) @ down.t()

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        c, name = self.c, f"model.layers.{layer}."
        num_experts = c["num_experts"]
        if not num_experts or layer < c["first_k_dense_replace"] or layer % c["moe_layer_freq"]:
            return self.mlp(f"{name}mlp", x)
        name += "block_sparse_moe."
        logits = x @ self.w[f"{name}gate.weight"].t()
        scores = torch.sigmoid(logits) if c["moe_router_activation_func"] == "sigmoid" else logits.softmax(-1)
        chosen_by = scores + self.w[f"{name}gate.e_score_correction_bias"]
        width, groups = num_experts // c["num_expert_group"], c["num_expert_group"]
        inner = x
        if c["routed_expert_hidden_size"]:
            inner = x @ self.w[f"{name}routed_expert_down_proj.weight"].t()
        y = torch.zeros_like(inner)
        for t in range(len(x)):
            best = sorted(range(groups), key=lambda g: -sum(sorted(chosen_by[t, g * width : (g + 1) * width])[-2:]))
            allowed = [e for g in best[: c["topk_group"]] for e in range(g * width, (g + 1) * width)]
            ids = sorted(allowed, key=lambda e: -float(chosen_by[t, e]))[: c["num_experts_per_token"]]
            weights = scores[t, ids]
            if c["moe_renormalize"]:
                weights = weights / weights.sum()
            for expert, weight in zip(ids, weights * c["routed_scaling_factor"], strict=True):
                y[t] += weight * self.mlp(f"{name}experts.{expert}", inner[t], ("w1", "w3", "w2"))
        if c["latent_moe_use_norm"]:
            y = self.norm(y, f"{name}routed_expert_norm")
        if c["routed_expert_hidden_size"]:
            y = y @ self.w[f"{name}routed_expert_up_proj.weight"].t()
        return y + self.mlp(f"{name}shared_experts", x) if c["num_shared_experts"] else y
