"""A result file that grows: every row is on disk as soon as it is known, and a run that was cut short can go on.

Beside the keys of `results.py` it has `complete`, false until the last row is there, and `settings`: what its rows were
measured with. A run that goes on, and files that are joined, must agree in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Row, rounded, write_result

from paceline.errors import ConfigError, DataError

_OWN = "drafters"  # a setting in which files that are joined differ
_LISTED = "temperatures"  # another: rows of one drafter may lie in several files


class GrowingResult:
    """Rows by key, rewritten whole, in order and atomically, whenever some are added.

    Args:
        head: all of the result but its rows, from `make_result`.
        settings: plain JSON values.
        folder: where `NAME.json` goes; None keeps the rows in memory.
        key: the fields that tell rows apart.
        order: sorts rows.
    """

    def __init__(
        self,
        head: Mapping[str, object],
        settings: Mapping[str, object],
        folder: Path | None,
        *,
        key: Sequence[str],
        order: Callable[[Row], Any],
    ) -> None:
        self._head, self._settings, self._folder, self._key, self._order = head, settings, folder, tuple(key), order
        self._rows: dict[tuple[object, ...], Row] = {}
        self.is_complete = False

    @property
    def rows(self) -> list[Row]:
        """All rows there are, in order."""
        return sorted(self._rows.values(), key=self._order)

    def find(self, **key: object) -> Row | None:
        """The row with this key, if it is there."""
        return self._rows.get(tuple(key[name] for name in self._key))

    def put(self, *rows: Row) -> None:
        """Add rows, or replace those of the same keys, and write the file."""
        for row in rows:
            self._rows[tuple(row[name] for name in self._key)] = rounded(row)
        self._write()

    def finish(self) -> None:
        """Mark the result as complete."""
        self.is_complete = True
        self._write()

    def _write(self) -> None:
        if self._folder is not None:
            write_result(
                self._folder,
                {**self._head, "complete": self.is_complete, "settings": self._settings, "rows": self.rows},
            )

    def resume(self) -> None:
        """Take over the rows of the file in the folder, if there is one.

        Raises:
            ConfigError: its rows were measured with other settings, or at another commit.
            DataError: the file cannot be read.
        """
        path = None if self._folder is None else self._folder / f"{self._head['name']}.json"
        if path is None or not path.exists():
            return
        found = read_growing(path)
        here = {"commit": self._head["commit"], **self._settings}
        refuse_differences(here, {"commit": found["commit"], **found["settings"]}, path)
        for row in found["rows"]:
            self._rows[tuple(row[name] for name in self._key)] = row


def read_growing(path: Path) -> dict[str, Any]:
    """Read a result with settings.

    Raises:
        DataError: it is missing, no JSON, or was written without settings.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    missing = [name for name in ("commit", "complete", "settings", "rows") if name not in found]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}", hint="measure again, without --resume")
    return found


def refuse_differences(
    here: Mapping[str, object], there: Mapping[str, object], path: Path, *, but: Sequence[str] = ()
) -> None:
    """Compare settings.

    Raises:
        ConfigError: they differ; every difference is named with both values.
    """
    names = [name for name in {**here, **there} if name not in but and here.get(name) != there.get(name)]
    if names:
        differences = "; ".join(f"{name} is {here.get(name)!r} here and {there.get(name)!r} there" for name in names)
        raise ConfigError(
            f"rows of one table have to be measured alike, but {differences}",
            origin={"there": path},
            hint="the same options, or another --out folder",
        )


def join_results(paths: Sequence[Path], key: Sequence[str]) -> dict[str, Any]:
    """One result out of those of several drafters, their rows one after another.

    Args:
        paths: files that were written by `GrowingResult`.
        key: the fields that tell rows apart.

    Raises:
        ConfigError: they were not measured alike, or two have a row of the same key.
        DataError: a file cannot be read.
    """
    found = [read_growing(path) for path in paths]
    rows: dict[tuple[object, ...], Row] = {}
    for path, one in zip(paths, found, strict=True):
        refuse_differences(found[0]["settings"], one["settings"], path, but=[_OWN, _LISTED])
        refuse_differences(found[0]["versions"], one["versions"], path)
        for row in one["rows"]:
            where = tuple(row[name] for name in key)
            if where in rows:
                raise ConfigError(f"two of the files have a row of {', '.join(map(str, where))}", origin={"one": path})
            rows[where] = row
    drafters: dict[str, object] = {}
    for one in found:
        drafters |= one["settings"].get(_OWN, {})
    settings = {**found[0]["settings"], _OWN: drafters}
    if _LISTED in settings:
        settings[_LISTED] = list(dict.fromkeys(value for one in found for value in one["settings"][_LISTED]))
    return {
        **found[0],
        **{name: _each(one[name] for one in found) for name in ("command", "commit", "date", "machine")},
        "complete": all(one["complete"] for one in found),
        "settings": settings,
        "rows": list(rows.values()),
    }


def _each(values: Any) -> str:
    """Different values, each once."""
    return "; ".join(dict.fromkeys(values))
