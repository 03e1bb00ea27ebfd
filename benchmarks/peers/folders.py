"""The folders that both sides of a comparison load: Hugging Face targets, and drafters in the layouts of the peers.

Everything is float32: in bf16 the two sides round in different places, and near-ties then decide what is proposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.checkpoint.contract import (
    ConvolutionSettings,
    DrafterContract,
    RopeSettings,
    SelectorSettings,
    TargetContract,
    TargetLayerId,
)

if TYPE_CHECKING:
    from paceline.models.loading import LoadedTarget

TINY = "tiny"
TINY_VOCAB_SIZE = 32  # few, so that even a random drafter is right at times


def export_target(name: str, folder: Path) -> None:
    """Write a target as a Hugging Face folder in float32, whatever it is stored as.

    Args:
        name: anything that `load_target` takes, or `TINY` for a random Llama of four layers.
        folder: where; made if missing.
    """
    from benchmarks.transformers_models import load_in_transformers

    from paceline.checkpoint.locate import locate_target
    from paceline.checkpoint.target_config import read_target_contract
    from paceline.checkpoint.tokenizer import open_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    if name == TINY:
        model, tokenizer = _tiny_model(), _tiny_tokenizer()
    else:
        path = locate_target(name)
        model = load_in_transformers(name, read_target_contract(path, name), torch.float32)
        tokenizer = open_tokenizer(path).backend
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def random_dflash(target: TargetContract, **changes: Any) -> DrafterContract:
    """Contract of a small DFlash drafter without tap norms for a target; `changes` replace fields."""
    num_layers = 2
    depth = target.num_layers
    fields: dict[str, Any] = {
        "family": "dflash",
        "origin": "random weights",
        "target_name": target.name,
        "target_num_layers": depth,
        "target_hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "target_layer_ids": tuple(TargetLayerId(layer) for layer in (0, depth // 2 - 1, depth - 2)),
        "aux_hidden_stream": "prefix",
        "has_tap_norm": False,
        "block_size": 6,
        "layout": "fill_in",
        "mask_token_id": 3,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "num_layers": num_layers,
        "hidden_size": target.hidden_size,
        "intermediate_size": 3 * target.hidden_size // 2,
        "num_heads": target.num_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_size": target.head_size,
        "rms_norm_eps": target.rms_norm_eps,
        "attention_bias": False,
        "rope": RopeSettings(theta=target.rope.theta),
        "is_neox_style": True,
        "max_position_embeddings": min(2048, target.max_position_embeddings),
        "layer_windows": (None,) * num_layers,
        "layer_causal": (False,) * num_layers,
        "input_embedding_scale": 1.0,
        "output_multiplier": 1.0,
        "final_logit_softcapping": None,
        "draft_sample_method": "greedy",
        "dtype": "float32",
    }
    return DrafterContract(**(fields | changes))


def dflash2_changes(num_taps: int = 2, *, group_size: int = 8, rank: int = 8, top_k: int = 4) -> dict[str, Any]:
    """The fields that make a DFlash contract one of DFlash2."""
    return {
        "family": "dflash2",
        "convolution": ConvolutionSettings(num_taps, group_size),
        "selector": SelectorSettings(rank, top_k),
    }


def random_tensors(contract: DrafterContract, *, seed: int) -> dict[str, Tensor]:
    """Weights that keep the stream's size; those of DFlash2 change what is drafted without drowning the rest."""
    from paceline.checkpoint.names import drafter_slots

    generator = torch.Generator().manual_seed(seed)
    return {slot.name: _random(slot.name, slot.shape, generator) for slot in drafter_slots(contract)}


def add_dflash2_parts(
    contract: DrafterContract, tensors: Mapping[str, Tensor], *, seed: int, **sizes: int
) -> tuple[DrafterContract, dict[str, Tensor]]:
    """A DFlash drafter with random convolutions and codebooks around it: a DFlash2 drafter that is still any good."""
    wider = dataclasses.replace(contract, **dflash2_changes(**sizes))
    return wider, random_tensors(wider, seed=seed) | dict(tensors)


def write_folder(folder: Path, contract: DrafterContract, tensors: Mapping[str, Tensor], **layout: Any) -> Path:
    """Write a drafter folder; `layout` is `dialect=`, the public layout by default."""
    from paceline.checkpoint.export import write_drafter_folder

    write_drafter_folder(folder, contract, tensors, None, {"made_by": "benchmarks.peers"}, **layout)
    return folder


def read_tensors(folder: Path) -> tuple[DrafterContract, dict[str, Tensor]]:
    """Contract and stored tensors of a drafter folder, by canonical name."""
    from paceline.checkpoint.dialects import read_drafter_contract
    from paceline.checkpoint.weights import open_safetensors

    source = open_safetensors(folder)
    return read_drafter_contract(folder), {name: source.load(name) for name in source.names()}


def load_exact(folder: Path) -> LoadedTarget:
    """Our target from an exported folder, in the arithmetic that is closest to the peers'."""
    from paceline.models.loading import load_target

    return load_target(str(folder), dtype="float32", device="cpu", linear_mode="plain")


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("base_kernel"):  # [2, taps, D]: near the identity, which is 1 on the row itself and 0 before it
        identity = torch.zeros(shape)
        identity[:, 0] = 1
        return identity + 0.2 * noise
    if "kernel_projection" in name:
        return 0.1 * noise * shape[-1] ** -0.5
    if name.endswith("codebook"):
        return noise * shape[-1] ** -0.25  # the product of two rows and a hidden row of size 1 is of size 1 then
    if len(shape) == 1:
        return 1 + 0.2 * noise
    return 1.5 * noise * shape[-1] ** -0.5


def _tiny_model() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=TINY_VOCAB_SIZE,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, tuple(parameter.shape), generator))
    return model.eval()


def _tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"<{token}>": token for token in range(TINY_VOCAB_SIZE)}, unk_token="<0>"))
