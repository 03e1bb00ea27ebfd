"""Prompt files for verbs that measure drafters: without what a drafter has learnt, as far as its folder says so."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.evaluation.prompts import Prompt


def read_unlearnt_prompts(path: Path, drafters: Sequence[str], *, limit: int | None) -> list[Prompt]:
    """A prompt set; of a token file, conversations that no drafter was trained on.

    Args:
        path: the file.
        drafters: folders or hub names of those that are measured.
        limit: how many prompts to take from the start; None takes all.

    Raises:
        DataError: the file cannot be read, or all of it was learnt.
    """
    from paceline.checkpoint.locate import locate_drafter
    from paceline.checkpoint.training_record import num_held_out
    from paceline.errors import PacelineError
    from paceline.evaluation.prompts import file_sha256, read_prompts
    from paceline.log import get_logger

    held_out: list[int] = []
    for drafter in drafters:
        folder, found = None, None
        with contextlib.suppress(PacelineError):  # loading says what is wrong with it, or fetches it
            folder = locate_drafter(drafter, offline=True)
        if folder is not None and path.is_file():
            found = num_held_out(folder, file_sha256(path))
        if found is not None:
            held_out.append(found)
        if found is not None and path.suffix != ".npz":
            get_logger(__name__).warning(
                "%s was trained on %s: what is measured on it may have been learnt", folder, path
            )
    return read_prompts(path, limit=limit, num_held_out=min(held_out, default=None))
