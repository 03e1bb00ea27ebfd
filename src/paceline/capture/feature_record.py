"""Where stored features come from: everything that a training run must share to read them instead of its target.

Taps of another layer, another stream, another norm or other weights have the right shape and train without a word;
only acceptance falls. So the record is complete, is written with the features, and is compared key by key.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline import __version__
from paceline.checkpoint.contract import AuxHiddenStream, TargetLayerId
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.errors import RequestError
from paceline.models.loading import LoadedTarget
from paceline.models.targets.target import Target

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Texts:
    """Conversations as token ids with supervision marks, end to end.

    Attributes:
        tokens: int32 [total].
        supervised: bool [total]: response tokens.
        starts: int64 [count + 1], borders.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each, int64 [count]."""
        lengths: np.ndarray = np.diff(self.starts)
        return lengths

    def span(self, index: int) -> slice:
        """Where one of them lies in `tokens`."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))


def cut_texts(tokens: np.ndarray, supervised: np.ndarray, starts: np.ndarray, max_length: int) -> Texts:
    """Conversations as a run uses them, each cut on the right; arguments as in `Texts`."""
    lengths = np.minimum(np.diff(starts), max_length)
    kept = [slice(start, start + length) for start, length in zip(starts[:-1].tolist(), lengths.tolist(), strict=True)]
    return Texts(
        tokens=np.concatenate([tokens[span] for span in kept] or [tokens[:0]]).astype(np.int32),
        supervised=np.concatenate([supervised[span] for span in kept] or [supervised[:0]]).astype(bool),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def conversation_key(token_ids: np.ndarray) -> bytes:
    """What a conversation's features are found by: a hash of its token ids."""
    return hashlib.blake2b(np.ascontiguousarray(token_ids, dtype="<i4").tobytes(), digest_size=16).digest()


def data_sha256(parts: Iterable[Texts]) -> str:
    """One hash of many conversations, ids and marks, whatever their order and however they are split into parts."""
    keys = sorted(
        hashlib.sha256(
            np.ascontiguousarray(texts.tokens[span], dtype="<i4").tobytes() + b"|" + texts.supervised[span].tobytes()
        ).digest()
        for texts in parts
        for span in map(texts.span, range(len(texts)))
    )
    return hashlib.sha256(b"".join(keys)).hexdigest()


def weights_sha256(model: Target) -> str:
    """One hash of a target's parameters, by name, in the dtype that they are loaded in."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def feature_record(
    target: LoadedTarget,
    parts: Sequence[Texts],
    *,
    layer_ids: Sequence[TargetLayerId],
    stream: AuxHiddenStream,
    keeps_hidden: bool,
    max_length: int,
    mask_token_id: int | None = None,
    files: Sequence[Mapping[str, object]] = (),
    sampling: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """The provenance of features, as JSON can hold it.

    Args:
        target: that computes them.
        parts: all conversations, cut to `max_length`.
        layer_ids: tapped layers, ascending.
        stream: which of the target's streams.
        keeps_hidden: whether the last state, after the final norm, is stored too.
        max_length: cut of each conversation.
        mask_token_id: of the drafter that they are meant for.
        files: name, sha256 and rows of each data file.
        sampling: how the answers were drawn, where that is known.
    """
    contract, tokenizer = target.contract, target.tokenizer
    is_text = isinstance(tokenizer, TextTokenizer)
    dtype = str(target.model.norm.weight.dtype).removeprefix("torch.")
    stops = set(contract.stop_token_ids)
    return {
        "schema_version": SCHEMA_VERSION,
        "target": {
            "name": contract.name,
            "sha256_of_weights": weights_sha256(target.model),
            "architecture": contract.architecture,
            "num_layers": contract.num_layers,
            "hidden_size": contract.hidden_size,
            "vocab_size": contract.vocab_size,
            "dtype": dtype,
        },
        "tokenizer_sha256": hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest() if is_text else None,
        "chat_template_sha256": tokenizer.template_sha256 if is_text else None,
        "default_system_prompt": _has_default_system_prompt(tokenizer) if is_text else None,
        "tap_ids": [int(layer) for layer in layer_ids],
        "tap_id_scheme": "output",  # 0-based decoder layer whose output is tapped
        "tap_point": "layer_output",
        "aux_hidden_stream": stream,
        "tap_dtype": dtype,
        "tap_norm": "none",  # stored raw: a drafter that norms its taps does so itself
        "last_hidden_norm": "post" if keeps_hidden else "absent",
        "logit_softcap": None,
        "logit_multiplier": 1.0,
        "engine": {
            "name": "paceline",
            "version": __version__,
            "attention_backend": "row_invariant" if target.linear_mode == "row_invariant" else "sdpa",
            "linear_mode": target.linear_mode,
            "kv_dtype": dtype,
            "prefix_cache": False,
            "tp": 1,
            "pp": 1,
        },
        "sampling": dict(sampling) if sampling is not None else None,
        "mask_token_id": mask_token_id,
        "loss_mask_method": "generation_boundary",
        "end_token_supervised": any(_ends_on(texts, stops) for texts in parts),
        "data": {
            "sha256": data_sha256(parts),
            "num_conversations": sum(map(len, parts)),
            "files": [dict(file) for file in files],
            "max_length": max_length,
            "packing": False,
        },
    }


def run_id(record: Mapping[str, object]) -> str:
    """A short name that follows from a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


# What must agree, with the words a reader needs; the rest of a record says who wrote the features, not what they are.
COMPARED = {
    "schema_version": "another layout of features",
    "target.sha256_of_weights": "another target, or other weights",
    "target.architecture": "another kind of target",
    "target.num_layers": "another depth",
    "target.hidden_size": "another width",
    "target.vocab_size": "another vocabulary",
    "target.dtype": "another precision of the target",
    "tokenizer_sha256": "another tokenizer",
    "chat_template_sha256": "another chat template",
    "tap_ids": "other layers",
    "tap_id_scheme": "another numbering of layers",
    "tap_point": "another place in a layer",
    "aux_hidden_stream": "another stream",
    "tap_dtype": "another precision",
    "tap_norm": "another scale",
    "last_hidden_norm": "another last state",
    "logit_softcap": "other logits",
    "logit_multiplier": "other logits",
    "data.max_length": "another cut of conversations",
    "data.num_conversations": "other conversations",
    "data.sha256": "other conversations",
}


def differences(stored: Mapping[str, object], wanted: Mapping[str, object]) -> list[str]:
    """What forbids to read features with one record where another is needed, as lines of text; none if all agrees.

    A last state that is stored and not needed does no harm.
    """
    lines = []
    for key, meaning in COMPARED.items():
        there, here = _looked_up(stored, key), _looked_up(wanted, key)
        if there != here and not (key == "last_hidden_norm" and (there, here) == ("post", "absent")):
            lines.append(f"{key}: stored {there!r}, needed {here!r} ({meaning})")
    return lines


def _looked_up(record: Mapping[str, object], key: str) -> object:
    value: object = record
    for part in key.split("."):
        value = value.get(part, "absent") if isinstance(value, Mapping) else "absent"
    return value


def _has_default_system_prompt(tokenizer: TextTokenizer) -> bool | None:
    """Whether the template puts a system message where a chat has none."""
    if not tokenizer.has_chat_template:
        return None
    try:
        return "system" in tokenizer.render_chat([{"role": "user", "content": "0"}])
    except RequestError:  # a template that refuses such a chat puts nothing there
        return False


def _ends_on(texts: Texts, stops: set[int]) -> bool:
    ends = zip(texts.starts[:-1].tolist(), texts.starts[1:].tolist(), strict=True)
    filled = (end - 1 for start, end in ends if end > start)
    return any(texts.supervised[last] and int(texts.tokens[last]) in stops for last in itertools.islice(filled, 10_000))
