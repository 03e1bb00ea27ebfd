"""Seeded random models of a few thousand parameters: real modules, clear margins, a second of CPU time.

`tiny_target_contract(family)`, `tiny_target(family, seed)`, `tiny_drafter(target_contract, seed)` make the parts;
`loaded(...)` wraps them as the engine takes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tests.fakes import ByteTokenizer
from torch import nn

from paceline.checkpoint.contract import (
    ConvolutionSettings,
    DrafterContract,
    DrafterFamily,
    Eagle3Settings,
    MarkovSettings,
    RopeSettings,
    SelectorSettings,
    TargetContract,
    TargetLayerId,
)
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.table import DRAFTERS, Drafter
from paceline.models.layers import LinearMode, set_linear_mode
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.models.targets.dense import DenseTarget

Family = Literal["llama", "qwen3"]
VOCAB_SIZE = 512
EOS_ID = 2
PARTS_OF_FAMILY: dict[str, dict[str, Any]] = {
    "dflash2": {
        "convolution": ConvolutionSettings(num_taps=2, group_size=8),
        "selector": SelectorSettings(rank=8, top_k=6),
    },
    "dspark": {"layout": "anchor_sampling", "markov": MarkovSettings(rank=8, kind="vanilla")},
    "eagle3": {
        "layout": "autoregressive",
        "num_layers": 1,
        "has_tap_norm": False,
        "has_qk_norm": False,
        "eagle3": Eagle3Settings(
            norm_before_residual=True, norm_before_fc=False, norm_output=False, doubles_every_layer=False
        ),
    },
}


def tiny_target_contract(family: Family = "llama", **changes: Any) -> TargetContract:
    """4 layers of width 64, 4 query and 2 key heads, vocabulary 512, float32; `changes` replace fields."""
    fields: dict[str, Any] = {
        "architecture": {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family],
        "name": f"tiny-{family}",
        "origin": f"tests/tiny-{family}",
        "num_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16 if family == "llama" else 32,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "rope": RopeSettings(theta=10_000.0),
        "max_position_embeddings": 512,
        "has_qk_norm": family == "qwen3",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": family == "llama",
        "stop_token_ids": (EOS_ID,),
        "bos_token_id": 1,
        "dtype": "float32",
    }
    return TargetContract(**(fields | changes))


def tiny_target(family: Family = "llama", seed: int = 0, **changes: Any) -> DenseTarget:
    """A random target whose greedy text wanders and whose best two logits lie well apart."""
    contract = tiny_target_contract(family, **changes)
    model = DenseTarget(contract)
    _fill(model, seed)
    return model.requires_grad_(False).eval()


def tiny_drafter_contract(target: TargetContract, **changes: Any) -> DrafterContract:
    """2 layers of the target's width, taps after layers 0, 1 and 2, block of 8, mask id 3; `changes` replace fields."""
    fields: dict[str, Any] = {
        "family": "dflash",
        "origin": "tests/tiny-drafter",
        "target_name": target.name,
        "target_num_layers": target.num_layers,
        "target_hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "target_layer_ids": tuple(TargetLayerId(layer) for layer in range(min(3, target.num_layers - 1))),
        "aux_hidden_stream": "prefix",
        "has_tap_norm": True,
        "block_size": 8,
        "layout": "fill_in",
        "mask_token_id": 3,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "num_layers": 2,
        "hidden_size": target.hidden_size,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "rope": RopeSettings(theta=10_000.0),
        "is_neox_style": True,
        "max_position_embeddings": target.max_position_embeddings,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "draft_sample_method": "greedy",
        "dtype": "float32",
    }
    fields |= PARTS_OF_FAMILY.get(changes.get("family", "dflash"), {}) | changes
    num_layers = fields["num_layers"]
    fields.setdefault("layer_windows", (None,) * num_layers)
    fields.setdefault("layer_causal", (fields["layout"] == "autoregressive",) * num_layers)
    return DrafterContract(**fields)


def tiny_drafter(target: TargetContract, seed: int = 0, **changes: Any) -> Drafter:
    """A random drafter for a target; its acceptance is next to nothing."""
    contract = tiny_drafter_contract(target, **changes)
    drafter = DRAFTERS[contract.family](contract)
    _fill(drafter, seed + 1_000)
    if contract.has_vocabulary_map:
        generator = torch.Generator().manual_seed(seed)
        kept = torch.randperm(target.vocab_size, generator=generator)[: contract.draft_vocab_size]
        drafter.vocabulary.target_ids_V = kept.sort().values
    return drafter.requires_grad_(False).eval()


def loaded(
    family: Family = "llama",
    seed: int = 0,
    *,
    linear_mode: LinearMode = "row_invariant",
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
    target_changes: dict[str, Any] | None = None,
    drafter_family: DrafterFamily = "dflash",
    **drafter_changes: Any,
) -> tuple[LoadedTarget, LoadedDrafter]:
    """A target and a drafter as `models/loading.py` would return them.

    Args:
        family: of the target.
        seed: of both.
        linear_mode: arithmetic of both; row-invariant by default, so that ids can be compared bit for bit.
        dtype: of both.
        tokenizer: a `ByteTokenizer` if None.
        target_changes: fields of the target's contract.
        drafter_family: of the drafter.
        drafter_changes: fields of the drafter's contract.
    """
    target = tiny_target(family, seed, **(target_changes or {})).to(dtype)
    drafter = tiny_drafter(target.contract, seed, family=drafter_family, **drafter_changes).to(dtype)
    return wrap_target(target, linear_mode, tokenizer), wrap_drafter(drafter, linear_mode)


def wrap_target(target: DenseTarget, linear_mode: LinearMode = "row_invariant", tokenizer: Any = None) -> LoadedTarget:
    """Set a target's arithmetic and put it beside a tokenizer."""
    target.position_table = target.position_table.float()  # `.to(bfloat16)` takes buffers along
    set_linear_mode(target, linear_mode)
    return LoadedTarget(target, target.contract, tokenizer or ByteTokenizer(), linear_mode)


def wrap_drafter(
    drafter: Drafter, linear_mode: LinearMode = "row_invariant", num_draft_tokens: int | None = None
) -> LoadedDrafter:
    """Prepare a drafter for serving."""
    holder = drafter.backbone if isinstance(drafter, BlockDrafter) else drafter
    holder.position_table = holder.position_table.float()
    drafter.prepare_for_serving(linear_mode)
    return LoadedDrafter(drafter, drafter.contract, num_draft_tokens or drafter.contract.num_draft_tokens)


def tiny_prompts(lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Random prompts without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def _fill(model: nn.Module, seed: int) -> None:
    """Matrices scaled to keep the stream's size, embeddings of size 1, gains near 1, all from one seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.8, 1.2, generator=generator)
            else:
                # Small embeddings let the layers decide; else a tied head repeats the last token for ever.
                vocabulary_scale = 0.2 if "embed" in name else 1.0
                is_vocabulary = "embed" in name or "lm_head" in name
                scale = vocabulary_scale if is_vocabulary else 1.5 * parameter.shape[1] ** -0.5
                parameter.normal_(0.0, scale, generator=generator)
