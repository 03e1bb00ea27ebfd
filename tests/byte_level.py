"""A byte-level tokenizer of 512 ids with a chat template: what serving needs of one, without files."""

from __future__ import annotations

import functools

from tests.tiny import EOS_ID, VOCAB_SIZE
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.checkpoint.tiktoken_file import byte_of_character
from paceline.checkpoint.tokenizer import TextTokenizer

TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %} <tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if mood %}({{ mood }}){% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ("<|begin|>", "<|unused|>", "<|end|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|system|>")
assert _SPECIAL[EOS_ID] == "<|end|>"


@functools.cache
def byte_level_tokenizer(template: str = TEMPLATE) -> TextTokenizer:
    """Special tokens, every byte, and pairs of letters, which leave parts of characters to single bytes."""
    characters = {byte: character for character, byte in byte_of_character().items()}
    tokens = [*_SPECIAL, *(characters[byte] for byte in range(256))]
    letters = "etaoinshrdlu"
    merges = [(one, other) for one in letters for other in letters]
    tokens += ["".join(pair) for pair in merges]
    tokens += [f"<filler-{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return TextTokenizer(
        backend, chat_template=template or None, special_tokens={"eos_token": "<|end|>"}, origin="tests/byte_level"
    )
