"""Training runs of seconds: a tiny target with a tokenizer, token files, settings, and the folders that hold them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.fakes import ByteTokenizer
from tests.tiny import tiny_drafter, tiny_prompts, tiny_target, wrap_target

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.export import split_fused, write_drafter_folder
from paceline.checkpoint.names import dense_target_destinations, drafter_destinations
from paceline.checkpoint.weights import save_safetensors
from paceline.configuration.run import TrainRun
from paceline.models.fingerprint import record_fingerprint
from paceline.models.loading import LoadedTarget
from paceline.models.targets.dense import DenseTarget

USER, ASSISTANT, END = 500, 501, 2
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}<assistant>"


class ChatByteTokenizer(ByteTokenizer):
    """Bytes with a template of fixed parts: [USER] text [END] [ASSISTANT].

    Args:
        closes_with: the id that ends the user's turn; a faulty template has another than the target's stop token.
    """

    has_chat_template = True
    tells_the_date = False

    def __init__(self, closes_with: int = END) -> None:
        super().__init__()
        self._closes_with = closes_with

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Render the user's turn and open the assistant's."""
        (message,) = messages
        return [USER, *self.encode(message["content"]), self._closes_with, ASSISTANT]


def chat_target(seed: int = 0, *, closes_with: int = END, **changes: Any) -> LoadedTarget:
    """A random tiny target, plain arithmetic, with a chat template."""
    return wrap_target(tiny_target(seed=seed, **changes), "plain", ChatByteTokenizer(closes_with))


def write_token_file(path: Path, rows: Sequence[Sequence[int]], *, num_prompt_tokens: int) -> Path:
    """Conversations of which all but the first tokens are the answer."""
    np.savez(
        path,
        tokens=np.concatenate([np.asarray(row) for row in rows]).astype(np.uint16),
        prompt_len=np.full(len(rows), num_prompt_tokens),
        response_len=np.array([len(row) - num_prompt_tokens for row in rows]),
    )
    return path


def random_rows(count: int, length: int, *, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Texts of independent tokens without special ids: there is nothing to learn from them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for _ in range(count)]


def tiny_settings(folder: Path, data: Path, **changes: Any) -> TrainRun:
    """A run of 20 small steps; `changes` such as `schedule_num_steps=40` replace `schedule.num_steps`."""
    settings: dict[str, Any] = {
        "seed": 0,
        "output": str(folder),
        "device": "cpu",
        "target": {"name": "tiny", "dtype": "float32"},
        "drafter": {
            "num_layers": 1,
            "intermediate_size": 32,
            "target_layer_ids": [0, 2],
            "block_size": 4,
            "mask_token_id": 3,
        },
        "data": {"files": [str(data)], "hold_out": 4, "max_length": 24},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"num_steps": 20, "batch_size": 2, "num_anchors": 4},
        "objective": {"loss": "kl", "gamma": 4.0, "chunk_rows": 64},
        "evaluate": {"every": 100, "num_conversations": 4, "batch_size": 4},
        "checkpoint": {"every": 10, "keep": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("_")
        if isinstance(settings.get(section), dict) and name:
            settings[section][name] = value
        else:
            settings[key] = value
    return TrainRun.model_validate(settings)


def hugging_face_config(contract: TargetContract) -> dict[str, Any]:
    """The config.json of a tiny target."""
    family = "qwen3" if contract.has_qk_norm else "llama"
    return {
        "architectures": [contract.architecture],
        "model_type": family,
        "num_hidden_layers": contract.num_layers,
        "hidden_size": contract.hidden_size,
        "intermediate_size": contract.intermediate_size,
        "num_attention_heads": contract.num_heads,
        "num_key_value_heads": contract.num_kv_heads,
        "head_dim": contract.head_size,
        "vocab_size": contract.vocab_size,
        "rms_norm_eps": contract.rms_norm_eps,
        "rope_theta": contract.rope.theta,
        "max_position_embeddings": contract.max_position_embeddings,
        "tie_word_embeddings": contract.tie_word_embeddings,
        "eos_token_id": list(contract.stop_token_ids),
        "bos_token_id": contract.bos_token_id,
        "torch_dtype": contract.dtype,
    }


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A word-level tokenizer: "w7" is id 7; the chat marks are the last ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    marks = ["<user>", "<assistant>"]
    words = [f"w{index}" for index in range(vocab_size - len(marks))]
    words[0], words[END] = "<unk>", "<end>"
    vocabulary = {word: index for index, word in enumerate([*words, *marks])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>", *marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<end>", "unk_token": "<unk>"})
    )


def write_target_folder(folder: Path, model: DenseTarget) -> Path:
    """A tiny target as a Hugging Face folder, with a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hugging_face_config(model.contract)))
    destinations = dense_target_destinations(model.contract)
    save_safetensors(folder / "model.safetensors", split_fused(dict(model.named_parameters()), destinations), {})
    write_tokenizer(folder, model.contract.vocab_size)
    return folder


def write_drafter(folder: Path, target: LoadedTarget, *, fingerprint: bool = True, **changes: Any) -> Path:
    """A random drafter for a target as an exported folder; `changes` replace fields of its contract."""
    drafter = tiny_drafter(target.contract, **changes)
    tensors = split_fused(drafter.checkpoint_parameters(), drafter_destinations(drafter.contract))
    (probe,) = tiny_prompts([40], vocab_size=target.contract.vocab_size)
    record = record_fingerprint(target.model, drafter, probe) if fingerprint else None
    table = drafter.vocabulary.target_ids_V
    write_drafter_folder(folder, drafter.contract, tensors, record, {}, draft_to_target=table)
    return folder
