"""The trace file of a run: every answer's steps, what was asked, what tokens read as, what it all comes from."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.cli.running import Models
    from paceline.configuration.generation import TracedRun
    from paceline.engine.request import RequestResult
    from paceline.evaluation.prompts import Prompt


class TraceFile:
    """Writes answers as they come; `close` it.

    Args:
        path: appended to, made if missing.
        run: its settings.
        models: as loaded.
        prompt_files: that prompts were read from.
        requests_at_once: how many were decoded at the same time, at most.

    Raises:
        DataError: the file ends inside a line.
    """

    def __init__(
        self,
        path: Path,
        run: TracedRun,
        models: Models,
        prompt_files: Sequence[Path] = (),
        *,
        requests_at_once: int = 1,
    ) -> None:
        from paceline.serving.token_texts import TokenTexts
        from paceline.trace.writer import TraceWriter

        facts = {**run_facts(run, models, prompt_files), "requests_at_once": requests_at_once}
        self._writer = TraceWriter(path, facts)
        self._texts = TokenTexts(models.target.tokenizer)

    def write(
        self,
        result: RequestResult,
        prompt: Prompt,
        *,
        set_name: str | None = None,
        turn: int = 0,
        sample_index: int = 0,
        seed: int | None = None,
    ) -> None:
        """Append one answer.

        Args:
            result: as it ended.
            prompt: what it answers.
            set_name: of the prompt's set.
            turn: which of its questions.
            sample_index: which of its samples.
            seed: that it was drawn with.

        Raises:
            CapacityError: the disk is full.
        """
        from paceline.trace.answer import PromptFacts, hash_ids, ids_of

        is_one_question = len(prompt.turns) == 1 and not prompt.messages
        facts = PromptFacts(
            id=prompt.id,
            set=set_name,
            category=prompt.category,
            turn=turn,
            sample_index=sample_index,
            seed=seed,
            sha256=hash_ids(result.prompt_ids),
            text=prompt.turns[0] if is_one_question else None,
        )
        tokens = {token: self._texts.bytes_of(token) for token in ids_of(result.trace)}
        self._writer.write(result.trace, facts, tokens)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def run_facts(run: TracedRun, models: Models, prompt_files: Sequence[Path] = ()) -> dict[str, object]:
    """What a run's answers come from, as plain JSON values.

    Args:
        run: its settings.
        models: as loaded.
        prompt_files: that prompts were read from.
    """
    from datetime import UTC, datetime

    from paceline.cli.facts import machine_facts, package_versions
    from paceline.engine.identity import weights_digest
    from paceline.evaluation.prompts import file_sha256

    target, drafter = models.target, models.drafter
    weight = target.model.norm.weight
    facts: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "versions": {name: version for name, version in package_versions().items() if version is not None},
        "machine": machine_facts(),
        "target": {
            "name": target.contract.name,
            "origin": target.contract.origin,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "device": str(weight.device),
            "linear_mode": target.linear_mode,
            "weights": weights_digest(target.model),
        },
        "settings": run.model_dump(mode="json"),
        "prompt_files": [{"file": str(path), "sha256": file_sha256(path)} for path in prompt_files],
    }
    if drafter is not None:
        facts["drafter"] = {
            "origin": drafter.contract.origin,
            "family": drafter.contract.family,
            "num_draft_tokens": drafter.num_draft_tokens,
            "weights": weights_digest(drafter.model),
        }
    return facts
