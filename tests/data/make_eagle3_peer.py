"""Makes `eagle3_peer.safetensors`: what the public package `speculators` 0.9.0 computes with tiny EAGLE-3 drafters.

    pip install --no-deps --target peer speculators==0.9.0
    HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 PYTHONPATH=peer python tests/data/make_eagle3_peer.py

As `make_dspark_peer.py`: folders are saved by the package itself. Recorded are the logits of its unrolled training
steps, in which step s of the row at p reads the text's own token at p + 1 + s: drafts one by one, at every place.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from make_dspark_peer import VOCAB_SIZE, WIDTH, randomise
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

LENGTH, NUM_STEPS = 10, 3
CAPTURE_IDS = [2, 3, 5]
# name: class of the layers, and fields of the config
VARIANTS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3_all_switches": (Qwen3Config, {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}),
    "qwen3_tap_norms": (Qwen3Config, {"fc_norm": True}),
}


def make_drafter(layers: type, fields: dict[str, Any]) -> Any:
    layer = layers(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        dtype="float32",
    )
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=VOCAB_SIZE,
        eagle_aux_hidden_state_layer_ids=CAPTURE_IDS,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="tiny/target", architectures=["LlamaForCausalLM"]),
        ),
        **fields,
    )
    drafter = Eagle3DraftModel(config).eval()
    randomise(drafter)
    return drafter


@torch.no_grad()
def record(drafter: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn(1, LENGTH, len(CAPTURE_IDS) * WIDTH, generator=generator)
    following = torch.randint(0, VOCAB_SIZE, (1, LENGTH), generator=generator)  # the token after each row
    logits: list[Tensor] = []
    hook = drafter.lm_head.register_forward_hook(lambda *found: logits.append(found[2][0]))
    drafter(taps, following, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=NUM_STEPS)
    hook.remove()
    return {"taps": taps[0], "following": following[0], "logits": torch.stack(logits)}


def main() -> None:
    stored: dict[str, Tensor] = {}
    for name, (layers, fields) in VARIANTS.items():
        drafter = make_drafter(layers, fields)
        with tempfile.TemporaryDirectory() as folder:
            drafter.save_pretrained(folder)
            config = Path(folder, "config.json").read_bytes()
            stored[f"{name}.config"] = torch.frombuffer(bytearray(config), dtype=torch.uint8)
            weights = load_file(Path(folder, "model.safetensors"))
        found = {f"weights.{key}": tensor for key, tensor in weights.items()} | record(drafter)
        stored |= {f"{name}.{key}": tensor.clone().contiguous() for key, tensor in found.items()}
    save_file(stored, Path(__file__).with_name("eagle3_peer.safetensors"))


if __name__ == "__main__":
    main()
