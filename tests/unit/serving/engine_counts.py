"""Snapshots of an engine that never ran: every counter 0 but those that a test names."""

from __future__ import annotations

from dataclasses import MISSING, fields

from paceline.engine.counters import EngineStats


def engine_stats(**counts: object) -> EngineStats:
    """A snapshot with these values."""
    zeros: dict[str, object] = {
        entry.name: () if "per_position" in entry.name else {} if entry.name == "implementations" else 0
        for entry in fields(EngineStats)
        if entry.default is MISSING and entry.default_factory is MISSING
    }
    return EngineStats(**{**zeros, **counts})  # type: ignore[arg-type]
