"""How often each target id is in the answers that a drafter was trained on: a file in its folder, for a short list.

An engine may draft from the frequent ids alone; see `engine/short_list.py`. W target vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from paceline.checkpoint.export import PROVENANCE_FILE, TOKEN_COUNTS, TOKEN_COUNTS_FILE, require_token_counts
from paceline.checkpoint.locate import read_json
from paceline.checkpoint.weights import open_safetensors_file, save_safetensors, write_index, write_text_atomic
from paceline.errors import CheckpointError


def read_token_counts(folder: Path, vocab_size: int | None) -> Tensor | None:
    """The counts in a drafter's folder, int64 [W]; None where it has none.

    Args:
        folder: of a drafter.
        vocab_size: of its target; None where it is not known.
    Raises:
        CheckpointError: the file is damaged, of another target, or holds what cannot be counts.
    """
    path = folder / TOKEN_COUNTS_FILE
    if not path.is_file():
        return None
    source = open_safetensors_file(path)
    if source.names() != [TOKEN_COUNTS]:
        raise CheckpointError(
            f"the tensors are {', '.join(sorted(source.names())) or 'none'}; expected {TOKEN_COUNTS} alone",
            origin={"counts": str(path)},
        )
    counts_W = source.load(TOKEN_COUNTS)
    require_token_counts(counts_W, vocab_size, str(path))
    return counts_W.long()


def add_token_counts(folder: Path, counts_W: Tensor, vocab_size: int, record: Mapping[str, object]) -> None:
    """Put counts into a drafter's folder, in place of those that are there, and say where they come from.

    Args:
        folder: of a drafter.
        counts_W: int64.
        vocab_size: of its target.
        record: JSON values, for the provenance.
    Raises:
        CheckpointError: the counts cannot be those of this drafter's target, or the provenance is no JSON object.
        CapacityError: the disk is full.
    """
    require_token_counts(counts_W, vocab_size, str(folder / TOKEN_COUNTS_FILE))
    history = folder / PROVENANCE_FILE
    provenance = {**(read_json(history) if history.is_file() else {}), TOKEN_COUNTS: dict(record)}
    write_index(folder)  # first: without it some readers would take the counts for weights
    save_safetensors(folder / TOKEN_COUNTS_FILE, {TOKEN_COUNTS: counts_W.long()}, {})
    write_text_atomic(history, json.dumps(provenance, indent=2, allow_nan=False) + "\n")
