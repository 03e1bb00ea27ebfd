"""Makes `dflash2_peer.safetensors`: what the public package `dflash` 0.1.0 drafts with tiny random DFlash2 drafters.

    pip install --no-deps --target peer dflash==0.1.0
    PYTHONPATH=peer python tests/data/make_dflash2_peer.py

Like `make_dflash_peer.py`, whose target and configs it shares; proposals are what the candidate selector walks to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from dflash.model import DFlash2DraftModel, _sampling_probs, dflash_generate
from make_dflash_peer import BLOCK_SIZE, SLIDING, TAPS, VOCAB_SIZE, config, randomise
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

ALL_SLIDING = {**SLIDING, "layer_types": ["sliding_attention"] * 2}
TEMPERATURE = 0.7
SCALED = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 2.0}
# name: (taps of the convolution, config keys, keys of dflash_config)
VARIANTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two_taps": (2, {}, {}),
    "three_taps_scaled": (3, {}, SCALED),
    "window_causal": (2, ALL_SLIDING, {}),
}


def record(drafter: Any, target: nn.Module, prompt: Tensor) -> dict[str, Tensor]:
    features, hidden, proposals, candidates = [], [], [], []
    forward, propose = drafter.forward, drafter.propose

    def recording_forward(**arguments: Any) -> Tensor:
        features.append(arguments["target_hidden"][0])
        hidden.append(forward(**arguments))
        return hidden[-1]

    def recording_proposal(*arguments: Any) -> Any:
        found = propose(*arguments)
        proposals.append(found[0][0])
        candidates.append(found[1][0].sort(-1).values)
        return found

    drafter.forward, drafter.propose = recording_forward, recording_proposal
    output_ids = dflash_generate(drafter, target, prompt, max_new_tokens=9, stop_token_ids=None)
    whole = [index for index, states in enumerate(hidden) if states.shape[1] == BLOCK_SIZE]
    short = len(whole)  # the end of the budget drafts less
    return {
        "short.features": features[short],
        "short.hidden": hidden[short][0],
        "output_ids": output_ids[0],
        "num_context": torch.tensor([features[index].shape[0] for index in whole]),
        "features": torch.cat([features[index] for index in whole]),
        "hidden": torch.stack([hidden[index][0] for index in whole]),
        "proposals": torch.stack([proposals[index] for index in whole]),
        "candidates": torch.stack([candidates[index] for index in whole]),
    }


def make_drafter(num_taps: int, keys: dict[str, Any], dflash_keys: dict[str, Any]) -> Any:
    drafter_config = config(2, **keys)
    drafter_config.num_target_layers = 5
    drafter_config.dflash_config = {
        "target_layer_ids": TAPS,
        "mask_token_id": VOCAB_SIZE - 1,
        "block_size": BLOCK_SIZE,
        "conv_kernel_size": num_taps,
        "conv_group_size": 4,
        "selector_rank": 6,
        "selector_top_k": 5,
        **dflash_keys,
    }
    drafter = DFlash2DraftModel(drafter_config).eval()
    randomise(drafter)
    return drafter


def record_distributions(drafter: Any, head: nn.Module) -> dict[str, Tensor]:
    """What sampled drafts are drawn from: the selector's rows along one path, and DFlash's with and without cuts."""
    hidden, anchor = torch.randn(1, BLOCK_SIZE - 1, 16), torch.tensor([5])
    logits = drafter.compute_logits(hidden, head)
    path, candidates, rows = drafter.candidate_selector.select(hidden, logits, anchor, TEMPERATURE)
    wide = torch.randn(2, 60)
    return {
        "selector.hidden": hidden[0],
        "selector.logits": logits[0],
        "selector.anchor": anchor,
        "selector.path": path[0],
        "selector.candidates": candidates[0],
        "selector.q": rows[0],
        "dflash.logits": wide,
        "dflash.q": _sampling_probs(wide, TEMPERATURE),
        "dflash.q_cut": _sampling_probs(wide, TEMPERATURE, top_p=0.8, top_k=10),
    }


@torch.no_grad()
def main() -> None:
    torch.manual_seed(20260122)
    target = Qwen3ForCausalLM(config(5, tie_word_embeddings=False)).eval()
    randomise(target)
    prompt = torch.randint(0, VOCAB_SIZE - 1, (1, 7))
    tensors = {
        "embedding": target.get_input_embeddings().weight.detach().bfloat16(),
        "head": target.lm_head.weight.detach().bfloat16(),
    }
    drafters = {}
    for name, variant in VARIANTS.items():
        drafter = make_drafter(*variant)
        tensors |= {f"{name}.{key}": value for key, value in record(drafter, target, prompt).items()}
        # on disk the codebooks are called without `.weight`
        weights = {key.replace("codebook.weight", "codebook"): value for key, value in drafter.state_dict().items()}
        tensors |= {f"{name}.drafter.{key}": value.bfloat16() for key, value in weights.items()}
        drafters[name] = drafter
    distributions = record_distributions(drafters["two_taps"], target.lm_head)
    tensors |= {f"q.{key}": value for key, value in distributions.items()}
    versions = f"dflash 0.1.0, transformers {transformers.__version__}, torch {torch.__version__}"
    path = Path(__file__).with_name("dflash2_peer.safetensors")
    save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata={"made_with": versions})


if __name__ == "__main__":
    main()
