"""Drafters of tiny Kimi targets that were trained, in seconds: they know the beginnings of some texts by heart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tiny import wrap_target
from tests.tiny_run import ChatByteTokenizer, tiny_settings, write_token_file

from paceline.models.layers import set_linear_mode
from paceline.models.loading import LoadedTarget
from paceline.training.loop import train

LATENT: dict[str, Any] = {
    "drafter_family": "dspark",
    "drafter_layout": "anchor_sampling",
    "drafter_markov_rank": 8,
    "drafter_kv_lora_rank": 16,
    "drafter_q_lora_rank": 24,
    "drafter_qk_nope_head_size": 8,
    "drafter_qk_rope_head_size": 8,
    "drafter_v_head_size": 12,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "dflash": {"drafter_family": "dflash"},
    "dflash2": {
        "drafter_family": "dflash2",
        "drafter_selector_rank": 8,
        "drafter_selector_top_k": 4,
        "drafter_conv_group_size": 8,
    },
    "dspark": {"drafter_family": "dspark", "drafter_markov_rank": 8},
    "dspark-latent": LATENT,
    "eagle3": {"drafter_family": "eagle3", "drafter_mask_token_id": None},
}


def train_by_heart(
    folder: Path, family: str, target: LoadedTarget, texts: Sequence[Sequence[int]], **changes: Any
) -> Path:
    """Train on a few texts, again and again, on the mixtures of the target's residual stream.

    Args:
        folder: for the run; its drafter's folder is returned.
        family: a key of `FAMILIES`.
        target: a Kimi one; it is run in plain arithmetic, which is faster.
        texts: to learn, of at least 6 tokens each.
        changes: of the settings, as for `tiny_settings`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = write_token_file(folder / "texts.npz", [*texts, texts[0]], num_prompt_tokens=2)
    longest = max(map(len, texts))
    settings: dict[str, Any] = {
        "drafter_aux_hidden_stream": "attn_res",
        "drafter_target_layer_ids": [1, 3, 4],
        "drafter_intermediate_size": 64,
        "data_hold_out": 1,
        "data_max_length": longest,
        "evaluate_num_conversations": 0,
        "schedule_num_steps": 40,
        "schedule_batch_size": len(texts),
        "schedule_num_anchors": longest,
        "optimizer_learning_rate": 1e-2,
        "objective_loss": "ce",
        "checkpoint_every": 40,
    }
    run = tiny_settings(folder / "run", data, **{**settings, **FAMILIES[family], **changes})
    try:
        outcome = train(run, wrap_target(target.model, "plain", ChatByteTokenizer()))
    finally:
        set_linear_mode(target.model, target.linear_mode)  # type: ignore[arg-type]
    assert outcome.drafter is not None
    return outcome.drafter
