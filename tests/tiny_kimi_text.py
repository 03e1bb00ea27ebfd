"""Files of a small tokenizer in the form that Kimi targets come in: `tiktoken.model` and tokenizer_config.json."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.kimi_k3_marks import MARKS

LINEAR_TOKENS = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_system|>")
K3_TOKENS = ("[BOS]", "[EOS]", MARKS[3], MARKS[0], MARKS[1], MARKS[2])  # the real ones have these ids, too


def write_kimi_text(folder: Path, words: Sequence[str] = (), added: Sequence[str] = K3_TOKENS) -> int:
    """Write both files; every byte is a token, and so is every beginning of a word, which thus can be merged.

    Returns:
        The number of tokens in the first file, which is the id of the first added token.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    for word in words:
        spelled = word.encode()
        tokens += [spelled[:end] for end in range(2, len(spelled) + 1) if spelled[:end] not in tokens]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    listed: dict[str, Any] = {
        str(len(tokens) + index): {"content": text, "special": not text.startswith("<|tool")}
        for index, text in enumerate(added)
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    return len(tokens)
