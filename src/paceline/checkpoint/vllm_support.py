"""What of a drafter vLLM 0.32 and 0.33 serve as it was trained, and what they would misread without a word.

Source: vLLM's documentation and code; `docs/peers.md` says what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.checkpoint.contract import DrafterContract
from paceline.checkpoint.dialects import Dialect

METHODS: Mapping[str, str] = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark", "eagle3": "eagle3"}
STREAM_VARIABLE = "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"  # of builds that tap the mixture of Kimi-K3
_DIALECTS: frozenset[Dialect] = frozenset({"zlab", "speculators", "deepspec", "kimi"})


def obstacles_for_vllm(
    contract: DrafterContract, dialect: Dialect, folder: Path, environment: Mapping[str, str]
) -> list[str]:
    """Why vLLM cannot serve a drafter, or would serve another one than was trained; empty if nothing is known.

    Args:
        contract: of the drafter.
        dialect: of its folder.
        folder: of the drafter.
        environment: variables that vLLM will see.
    """
    found = []
    if dialect not in _DIALECTS:
        found.append(f"the layout of the folder, {dialect}; `paceline convert --to zlab` writes one that it reads")
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(weights) > 1 and not (folder / "model.safetensors.index.json").is_file():
        found.append(
            f"it reads every .safetensors file of a folder without an index, here {', '.join(weights)}; `paceline "
            "convert` writes an index"
        )
    is_plain = contract.family == "dflash"
    if contract.has_tap_norm and contract.family in ("dflash", "dflash2"):
        found.append("norms of the taps, which it knows for EAGLE-3 and Kimi's DSpark alone (drafter.tap_norm=false)")
    if contract.layout == "anchor_sampling" and contract.family in ("dflash", "dflash2"):
        found.append("blocks whose anchor row drafts, which it knows for DSpark alone")
    if is_plain and contract.input_embedding_scale != 1.0:
        found.append(f"input_embedding_scale {contract.input_embedding_scale}, which it does not read")
    if is_plain and contract.output_multiplier != 1.0:
        found.append(f"output_multiplier {contract.output_multiplier}, which it does not read")
    if is_plain and contract.final_logit_softcapping is not None:
        found.append(f"final_logit_softcapping {contract.final_logit_softcapping}, which it does not read")
    if contract.markov is not None and contract.markov.kind != "vanilla":
        found.append(f"a Markov head of kind {contract.markov.kind}; it has a place for vanilla ones alone")
    if contract.aux_hidden_stream == "attn_res" and environment.get(STREAM_VARIABLE) != "1":
        found.append(
            f"taps of the stream attn_res; it feeds the stream prefix, unless its build knows {STREAM_VARIABLE}=1 and "
            "the environment has that"
        )
    return found
