"""Makes `dflash_peer.safetensors`: what the public package `dflash` 0.1.0 drafts with a tiny random drafter.

    pip download --no-deps dflash==0.1.0 && unzip dflash-0.1.0-py3-none-any.whl -d peer
    PYTHONPATH=peer python tests/data/make_dflash_peer.py

Every drafter call of three short greedy generations is recorded, so caches, crops and positions are the package's own.
The package is no dependency of paceline; the stored file is what the test reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from dflash.model import DFlashDraftModel, dflash_generate
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE, BLOCK_SIZE, TAPS = 40, 4, [1, 3]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
# name: (config keys, keys set on the config object, keys of dflash_config)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}, {}),
    "window_causal": (SLIDING, {}, {}),
    "window_both": (
        SLIDING,
        {"is_causal": False},
        {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 2.0},
    ),
}


def config(num_layers: int, **keys: Any) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **keys,
    )


def randomise(model: nn.Module) -> None:
    """Random weights that bf16 holds exactly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            value = 1 + 0.2 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value.bfloat16())


def record(drafter: Any, target: nn.Module, prompt: Tensor) -> dict[str, Tensor]:
    features, hidden, proposals = [], [], []
    forward, compute_logits = drafter.forward, drafter.compute_logits

    def recording_forward(**arguments: Any) -> Tensor:
        features.append(arguments["target_hidden"][0])
        hidden.append(forward(**arguments))
        return hidden[-1]

    def recording_logits(states: Tensor, head: nn.Module) -> Tensor:
        logits: Tensor = compute_logits(states, head)
        proposals.append(logits.argmax(-1)[0])
        return logits

    drafter.forward, drafter.compute_logits = recording_forward, recording_logits
    output_ids = dflash_generate(drafter, target, prompt, max_new_tokens=9, stop_token_ids=None)
    whole = [index for index, states in enumerate(hidden) if states.shape[1] == BLOCK_SIZE]  # the end drafts less
    return {
        "output_ids": output_ids[0],
        "num_context": torch.tensor([features[index].shape[0] for index in whole]),
        "features": torch.cat([features[index] for index in whole]),
        "hidden": torch.stack([hidden[index][0] for index in whole]),
        "proposals": torch.stack([proposals[index] for index in whole]),
    }


def main() -> None:
    torch.manual_seed(20260101)
    target = Qwen3ForCausalLM(config(5, tie_word_embeddings=False)).eval()
    randomise(target)
    prompt = torch.randint(0, VOCAB_SIZE - 1, (1, 7))
    tensors = {
        "embedding": target.get_input_embeddings().weight.detach().bfloat16(),
        "head": target.lm_head.weight.detach().bfloat16(),
    }
    weights: dict[str, Tensor] = {}
    for name, (keys, attributes, dflash_keys) in VARIANTS.items():
        drafter_config = config(2, **keys)
        drafter_config.num_target_layers = 5
        drafter_config.dflash_config = {
            "target_layer_ids": TAPS,
            "mask_token_id": VOCAB_SIZE - 1,
            "block_size": BLOCK_SIZE,
            **dflash_keys,
        }
        for key, value in attributes.items():
            setattr(drafter_config, key, value)
        drafter = DFlashDraftModel(drafter_config).eval()
        if not weights:
            randomise(drafter)
            weights = {key: value.clone() for key, value in drafter.state_dict().items()}
        drafter.load_state_dict(weights)
        tensors |= {f"{name}.{key}": value for key, value in record(drafter, target, prompt).items()}
    tensors |= {f"drafter.{key}": value.bfloat16() for key, value in weights.items()}
    versions = f"dflash 0.1.0, transformers {transformers.__version__}, torch {torch.__version__}"
    path = Path(__file__).with_name("dflash_peer.safetensors")
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata={"made_with": versions})


if __name__ == "__main__":
    main()
