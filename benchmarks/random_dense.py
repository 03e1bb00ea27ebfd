"""Random dense targets and DFlash drafters of published shapes, made on the device: no file is written or read.

All drafts of a random drafter are refused, so it shows what a step costs where drafting earns nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from benchmarks.random_weights import Weights, fill

from paceline.checkpoint.contract import DrafterContract, RopeSettings, TargetContract, TargetLayerId

if TYPE_CHECKING:
    import torch

    from paceline.checkpoint.tokenizer import TextTokenizer
    from paceline.models.layers import LinearMode
    from paceline.models.loading import LoadedDrafter, LoadedTarget
    from paceline.models.targets.target import Target

SMOLLM2_135M = TargetContract(
    architecture="LlamaForCausalLM",
    name="smollm2-135m",
    origin="random",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    vocab_size=49_152,
    rms_norm_eps=1e-5,
    rope=RopeSettings(theta=100_000.0),
    max_position_embeddings=8192,
    has_qk_norm=False,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    stop_token_ids=(2,),
    bos_token_id=1,
    dtype="bfloat16",
)
QWEN3_8B = TargetContract(
    architecture="Qwen3ForCausalLM",
    name="qwen3-8b",
    origin="random",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12_288,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    vocab_size=151_936,
    rms_norm_eps=1e-6,
    rope=RopeSettings(theta=1_000_000.0),
    max_position_embeddings=40_960,
    has_qk_norm=True,
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
    stop_token_ids=(2,),
    bos_token_id=1,
    dtype="bfloat16",
)
# Small enough to be written to a file, and evenly shared by two, four or eight ranks.
SLIM_QWEN3 = replace(
    QWEN3_8B,
    name="slim-qwen3",
    num_layers=8,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    vocab_size=16_384,
    max_position_embeddings=4096,
)
# For trials on a CPU: every switch as above, a few thousand parameters.
TINY_SMOLLM2 = replace(
    SMOLLM2_135M,
    name="tiny-smollm2",
    num_layers=6,
    hidden_size=48,
    intermediate_size=96,
    num_heads=3,
    num_kv_heads=1,
    head_size=16,
    vocab_size=512,
    max_position_embeddings=512,
)
TINY_QWEN3 = replace(
    QWEN3_8B,
    name="tiny-qwen3",
    num_layers=6,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    vocab_size=512,
    max_position_embeddings=512,
)
DENSE_SHAPES = {shape.name: shape for shape in (SMOLLM2_135M, QWEN3_8B, SLIM_QWEN3, TINY_SMOLLM2, TINY_QWEN3)}

LINEAR_MODES = ("auto", "plain", "packed", "native", "quantized", "int8", "row_invariant", "fused")
_MASK_ID = 5


def tapped_layers(num_layers: int) -> tuple[TargetLayerId, ...]:
    """An early layer, the quarters, and one near the end: 1, L/4, L/2, 3L/4, L - 3."""
    chosen = (1, num_layers // 4, num_layers // 2, 3 * num_layers // 4, num_layers - 3)
    return tuple(TargetLayerId(layer) for layer in sorted(set(chosen)))


def dflash_contract(target: TargetContract, *, num_layers: int = 5, block_size: int = 16) -> DrafterContract:
    """A DFlash drafter of the target's own width, that borrows its embedding and head.

    Args:
        target: what it rides on. Of a Kimi target, heads and MLP are those of its attention and its dense layers.
        num_layers: of the drafter.
        block_size: rows of a pass, the anchor's included; one draft fewer.
    """
    return DrafterContract(
        family="dflash",
        origin="random",
        target_name=target.name,
        target_num_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        target_layer_ids=tapped_layers(target.num_layers),
        aux_hidden_stream="prefix",
        has_tap_norm=False,
        block_size=block_size,
        layout="fill_in",
        mask_token_id=_MASK_ID,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        num_layers=num_layers,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_size=target.head_size,
        rms_norm_eps=1e-6,
        attention_bias=False,
        rope=RopeSettings(theta=1_000_000.0),
        is_neox_style=True,
        max_position_embeddings=target.max_position_embeddings,
        layer_windows=(None,) * num_layers,
        layer_causal=(False,) * num_layers,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
        draft_sample_method="greedy",
        dtype=target.dtype,
    )


def random_target(
    contract: TargetContract,
    device: torch.device,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    linear_mode: LinearMode | Literal["auto"] = "auto",
    weights: Weights = "normal",
) -> LoadedTarget:
    """A random dense target as the engine takes it."""
    from paceline.models.building import empty_target

    model = empty_target(contract, dtype, device)
    fill(model, seed, weights)
    return wrap_target(model, linear_mode)


def wrap_target(model: Target, linear_mode: LinearMode | Literal["auto"]) -> LoadedTarget:
    """A model that was made here, as if it had been loaded."""
    from paceline.models.layers import set_linear_mode
    from paceline.models.loading import LoadedTarget, resolve_linear_mode

    mode = resolve_linear_mode(linear_mode, model.norm.weight, model.contract)
    set_linear_mode(model, mode)
    return LoadedTarget(model, model.contract, numbering_tokenizer(model.contract.vocab_size), mode)


def plain_copy(target: LoadedTarget, dtype: torch.dtype) -> LoadedTarget:
    """The same dense weights in another dtype and plain arithmetic: what a target is held against."""
    import torch

    from paceline.models.building import empty_target

    model = empty_target(target.contract, dtype, target.model.norm.weight.device)
    sources = dict(target.model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(sources[name])
    return wrap_target(model, "plain")


def random_drafter(
    target: LoadedTarget, *, seed: int = 0, num_layers: int = 5, block_size: int = 16, weights: Weights = "normal"
) -> LoadedDrafter:
    """A random DFlash drafter for a target, in its dtype, on its device and in its arithmetic."""
    from paceline.models.building import empty_drafter
    from paceline.models.loading import LoadedDrafter

    contract = dflash_contract(target.contract, num_layers=num_layers, block_size=block_size)
    weight = target.model.norm.weight
    model = empty_drafter(contract, weight.dtype, weight.device)
    fill(model, seed + 1, weights)
    model.prepare_for_serving(target.linear_mode)
    return LoadedDrafter(model, contract, contract.num_draft_tokens, target.model)


def numbering_tokenizer(vocab_size: int) -> TextTokenizer:
    """A word per id, so that text can be made of any."""
    from tokenizers import Tokenizer, models

    from paceline.checkpoint.tokenizer import TextTokenizer

    words = models.WordLevel({f"w{index}": index for index in range(vocab_size)}, unk_token="w0")
    return TextTokenizer(Tokenizer(words), chat_template=None, special_tokens={}, origin="random")


def random_prompts(count: int, num_tokens: int, vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Independent ids, none of the lowest ones, which stop texts or stand for masks."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocab_size, (count, num_tokens), generator=generator).tolist()
