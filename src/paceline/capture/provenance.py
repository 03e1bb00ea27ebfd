"""Where captured conversations come from: the target's weights, tokenizer and template, and what computed them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from paceline import __version__
from paceline.capture.feature_record import weights_sha256
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.errors import RequestError
from paceline.models.loading import LoadedDrafter, LoadedTarget

_MARK = "#system#"


def target_record(target: LoadedTarget) -> dict[str, object]:
    """A target, its tokenizer and its template, as JSON can hold them; hashing reads every weight once."""
    contract, tokenizer = target.contract, target.tokenizer
    is_text = isinstance(tokenizer, TextTokenizer)
    return {
        "target": {
            "name": Path(contract.name).name,  # the hash says which it is, wherever it lies
            "sha256_of_weights": weights_sha256(target.model),
            "architecture": contract.architecture,
            "num_layers": contract.num_layers,
            "hidden_size": contract.hidden_size,
            "vocab_size": contract.vocab_size,
            "dtype": str(target.model.norm.weight.dtype).removeprefix("torch."),
            "stop_token_ids": list(contract.stop_token_ids),
        },
        "tokenizer_sha256": hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest() if is_text else None,
        "chat_template_sha256": tokenizer.template_sha256 if is_text else None,
        "default_system_prompt": _default_system_prompt(tokenizer) if is_text else None,
    }


def engine_record(
    target: LoadedTarget, drafter: LoadedDrafter | None, *, backend: str, batch_size: int
) -> dict[str, object]:
    """What the arithmetic depends on: tokens may differ in a near-tie where one of these does."""
    return {
        "name": "paceline",
        "version": __version__,
        "torch": torch.__version__,
        "backend": backend,
        "batch_size": batch_size,
        "device": target.model.norm.weight.device.type,
        "linear_mode": target.linear_mode,
        "draft_model": None if drafter is None else Path(drafter.contract.origin).parent.name,
        "num_draft_tokens": None if drafter is None else drafter.num_draft_tokens,
    }


def _default_system_prompt(tokenizer: TextTokenizer) -> bool:
    """Whether the template writes a system message where a chat has none."""
    user = {"role": "user", "content": "0"}
    try:
        before, _, _ = tokenizer.render_chat([{"role": "system", "content": _MARK}, user]).partition(_MARK)
        return bool(before.strip()) and tokenizer.render_chat([user]).startswith(before)
    except RequestError:  # no template, or one that knows no system message
        return False
