"""Architecture name to target class; adding a row is the whole registration."""

from __future__ import annotations

from paceline.models.targets.dense import DenseTarget
from paceline.models.targets.kimi import KimiTarget
from paceline.models.targets.kimi_multimodal import KimiMultimodalTarget

TARGETS: dict[str, type[DenseTarget] | type[KimiTarget] | type[KimiMultimodalTarget]] = {
    "LlamaForCausalLM": DenseTarget,
    "Qwen3ForCausalLM": DenseTarget,
    "KimiLinearForCausalLM": KimiTarget,
    "KimiK3ForConditionalGeneration": KimiMultimodalTarget,
}
