"""What a search found: the stage, the cause in words, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.probe.stages import Stage


@dataclass(frozen=True)
class Finding:
    """One cause.

    Attributes:
        stage: where it shows.
        cause: what disagrees, with both values.
        fix: what to try.
        is_named: false if nothing is known but where it begins: what follows in later stages then says nothing new.
    """

    stage: Stage
    cause: str
    fix: str
    is_named: bool = True
