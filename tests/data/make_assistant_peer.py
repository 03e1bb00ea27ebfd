"""Makes `assistant_peer.safetensors`: what assisted generation of transformers drafts with tiny random assistants.

    pip install transformers==5.24.0
    python tests/data/make_assistant_peer.py

The class is `MuseGlimmerAssistantModel`, run by `generate(speculation_type="dflash")`, with full attention and with
windows. The target and its config are those of `make_dflash_peer.py`, without that script's package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import DFlashTokenCandidateGenerator

VOCAB_SIZE, BLOCK_SIZE, TAPS, WINDOW = 40, 4, [1, 3], 6
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
VARIANTS = {"full": ["full_attention"] * 2, "window": ["sliding_attention", "full_attention"]}


def randomise(model: nn.Module) -> None:
    """Random weights that bf16 holds exactly."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            value = 1 + 0.2 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value.bfloat16())


def record(assistant: Any, target: Any, prompt: Tensor) -> dict[str, Tensor]:
    features, hidden, proposals = [], [], []
    propose = DFlashTokenCandidateGenerator.get_candidates

    def note_states(_module: Any, _arguments: Any, named: dict[str, Any], output: Any) -> None:
        features.append(named["context_hidden_states"][0])
        hidden.append(output.last_hidden_state[0])

    def note_drafts(generator: Any, input_ids: Tensor, *arguments: Any, **named: Any) -> Any:
        found = propose(generator, input_ids, *arguments, **named)
        if found[0].shape[1] > input_ids.shape[1]:
            proposals.append(found[0][0, input_ids.shape[1] :])
        return found

    hook = assistant.register_forward_hook(note_states, with_kwargs=True)
    with patch.object(DFlashTokenCandidateGenerator, "get_candidates", note_drafts), torch.inference_mode():
        output_ids = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=assistant,
            speculation_type="dflash",
            do_sample=False,
            max_new_tokens=10,
        )
    hook.remove()
    return {
        "output_ids": output_ids[0],
        "num_context": torch.tensor([feature.shape[0] for feature in features]),
        "features": torch.cat(features),
        "hidden": torch.stack(hidden),
        "proposals": torch.stack(proposals),
    }


def main() -> None:
    torch.manual_seed(20260119)
    target_config = Qwen3Config(num_hidden_layers=5, vocab_size=VOCAB_SIZE, tie_word_embeddings=False, **SIZES)
    target = Qwen3ForCausalLM(target_config).eval()
    randomise(target)
    prompt = torch.randint(0, VOCAB_SIZE - 1, (1, 7))
    tensors = {
        "embedding": target.get_input_embeddings().weight.detach().bfloat16(),
        "head": target.lm_head.weight.detach().bfloat16(),
    }
    weights: dict[str, Tensor] = {}
    for name, layer_types in VARIANTS.items():
        config = MuseGlimmerAssistantConfig(
            num_hidden_layers=2,
            layer_types=layer_types,
            sliding_window=WINDOW,
            block_size=BLOCK_SIZE,
            mask_token_id=VOCAB_SIZE - 1,
            target_layer_ids=TAPS,
            **SIZES,
        )
        assistant = MuseGlimmerAssistantModel(config).eval()
        if not weights:
            randomise(assistant)
            weights = {key: value.clone() for key, value in assistant.state_dict().items()}
        assistant.load_state_dict(weights)
        tensors |= {f"{name}.{key}": value for key, value in record(assistant, target, prompt).items()}
    tensors |= {f"drafter.{key}": value.bfloat16() for key, value in weights.items()}
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    path = Path(__file__).with_name("assistant_peer.safetensors")
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata={"made_with": versions})


if __name__ == "__main__":
    main()
