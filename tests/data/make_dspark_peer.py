"""Makes `dspark_peer.safetensors`: what the public package `speculators` 0.9.0 computes with tiny DSpark drafters.

    pip install --no-deps --target peer speculators==0.9.0
    HF_HUB_OFFLINE=1 PYTHONPATH=peer python tests/data/make_dspark_peer.py

Each drafter is saved by the package itself, config and all, so that its folder is read here as any user's is. The
package trains and does not draft: recorded are the backbone's rows behind several anchors, base logits, the heads on
the true tokens, and a greedy walk that applies its Markov head to one row after the other.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


class _Unused(ModuleType):
    """Stands in for its reading of data sets, which wants packages that nothing here needs."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return dict


sys.modules["speculators.train.data"] = _Unused("speculators.train.data")

from speculators.config import SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.models.dspark.config import DSparkSpeculatorConfig  # noqa: E402
from speculators.models.dspark.core import DSparkDraftModel  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402
from transformers import Qwen3Config  # noqa: E402

WIDTH, VOCAB_SIZE, BLOCK_SIZE, LENGTH, NUM_ANCHORS = 16, 40, 4, 14, 3
CAPTURE_IDS = [2, 4]
# name: fields of the config
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {"markov_head_type": "vanilla", "confidence_head_with_markov": True},
    "gated": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": True},
    "fill_in": {"markov_head_type": "vanilla", "confidence_head_with_markov": True, "sample_from_anchor": False},
    "rank_0": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
}


def randomise(drafter: Any) -> None:
    """Give every parameter numbers that show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.4 if parameter.dim() > 1 else 0.3))
            if parameter.dim() == 1:
                parameter.add_(1.0)


def make_drafter(fields: dict[str, Any]) -> Any:
    """A random drafter in which every part shows."""
    num_drafts = BLOCK_SIZE if fields.get("sample_from_anchor", True) else BLOCK_SIZE - 1
    layer = Qwen3Config(
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
    method = SpeculatorsConfig(
        algorithm="dspark",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_drafts)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path="tiny/target", architectures=["Qwen3ForCausalLM"]),
    )
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        aux_hidden_state_layer_ids=CAPTURE_IDS,
        mask_token_id=VOCAB_SIZE - 1,
        speculators_config=method,
        **{"markov_rank": 6, "enable_confidence_head": True, **fields},
    )
    drafter = DSparkDraftModel(config).eval()
    randomise(drafter)
    return drafter


@torch.no_grad()
def record(drafter: Any) -> dict[str, Tensor]:
    """The rows behind some anchors of a random text, and what the heads make of them."""
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn(1, LENGTH, len(CAPTURE_IDS) * WIDTH, generator=generator)
    ids = torch.randint(0, VOCAB_SIZE - 1, (1, LENGTH), generator=generator)
    torch.manual_seed(3)  # anchors are drawn
    hidden, logits, _, _, places = drafter._backbone_forward(
        taps,
        ids,
        torch.ones(1, LENGTH),
        torch.zeros(1, LENGTH, WIDTH),
        torch.zeros(1, LENGTH, dtype=torch.long),
        max_anchors=NUM_ANCHORS,
    )
    blocks = places.view(NUM_ANCHORS, BLOCK_SIZE)
    hidden, logits = hidden.view(NUM_ANCHORS, BLOCK_SIZE, -1), logits.view(NUM_ANCHORS, BLOCK_SIZE, -1)
    tokens = ids[0, blocks]
    from_anchor = drafter.config.sample_from_anchor
    previous = tokens if from_anchor else torch.cat((tokens[:, :1], tokens[:, :-1]), dim=1)
    found = {"taps": taps[0], "ids": ids[0], "anchors": blocks[:, 0].clone(), "hidden": hidden, "logits": logits}
    found["previous"] = previous
    head = drafter.markov_head
    if head is not None:
        found["bias"] = head.block_bias(prev_token_ids=previous, hidden_states=hidden)
    if drafter.confidence_head is not None:
        rows = [hidden, *([head.prev_embeddings(previous)] if drafter.config.confidence_head_with_markov else [])]
        found["confidence"] = drafter.confidence_head(torch.cat(rows, dim=-1)).sigmoid()
    first = 0 if from_anchor else 1
    walked = tokens[:, :1]
    for row in range(first, BLOCK_SIZE):
        scores = logits[:, row]
        if head is not None:
            bias = head.block_bias(prev_token_ids=walked, hidden_states=hidden[:, first : row + 1])
            scores = scores + bias[:, -1]
        walked = torch.cat((walked, scores.argmax(dim=-1, keepdim=True)), dim=1)
    found["proposals"] = walked[:, 1:]
    return found


def main() -> None:
    stored: dict[str, Tensor] = {}
    for name, fields in VARIANTS.items():
        drafter = make_drafter(fields)
        with tempfile.TemporaryDirectory() as folder:
            drafter.save_pretrained(folder)
            config = Path(folder, "config.json").read_bytes()
            stored[f"{name}.config"] = torch.frombuffer(bytearray(config), dtype=torch.uint8)
            weights = load_file(Path(folder, "model.safetensors"))
        found = {f"weights.{key}": tensor for key, tensor in weights.items()} | record(drafter)
        found |= {"embedding": drafter.embed_tokens.weight.detach(), "head": drafter.lm_head.weight.detach()}
        stored |= {f"{name}.{key}": tensor.clone().contiguous() for key, tensor in found.items()}
    save_file(stored, Path(__file__).with_name("dspark_peer.safetensors"))


if __name__ == "__main__":
    main()
