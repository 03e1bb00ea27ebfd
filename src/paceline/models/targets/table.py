"""Architecture name to target class; adding a row is the whole registration."""

from __future__ import annotations

from paceline.models.targets.dense import DenseTarget

TARGETS: dict[str, type[DenseTarget]] = {
    "LlamaForCausalLM": DenseTarget,
    "Qwen3ForCausalLM": DenseTarget,
}
