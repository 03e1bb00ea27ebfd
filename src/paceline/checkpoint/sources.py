"""Views of a tensor source: the same tensors under other names, or a fused one as its parts.

Both stay lazy: nothing is read before it is asked for. What a view does not mention keeps its own name, so that strict
loading still sees every tensor of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.checkpoint.weights import TensorSource
from paceline.errors import CheckpointError


class RenamedSource:
    """A source whose tensors appear under their canonical names.

    Args:
        source: the file.
        canonical_of: file name to canonical name; names that are not in it keep their own, and entries without a tensor
            are left alone.
    Raises:
        CheckpointError: two tensors of the file would have one canonical name.
    """

    def __init__(self, source: TensorSource, canonical_of: Mapping[str, str]) -> None:
        self._source = source
        self._file_names: dict[str, str] = {}
        for name in source.names():
            canonical = canonical_of.get(name, name)
            if canonical in self._file_names:
                raise CheckpointError(
                    f"the tensors {self._file_names[canonical]} and {name} both stand for {canonical}",
                    origin={"file": source.origin},
                )
            self._file_names[canonical] = name

    @property
    def origin(self) -> str:
        """The file or folder that is read, for messages."""
        return self._source.origin

    def names(self) -> list[str]:
        """Canonical names, in file order."""
        return list(self._file_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._source.shape(self._file_name(name))

    def load(self, name: str) -> Tensor:
        """The tensor in its stored dtype, on the CPU."""
        return self._source.load(self._file_name(name))

    def _file_name(self, name: str) -> str:
        if name not in self._file_names:
            raise CheckpointError(f"{self.origin} has no tensor {name}")
        return self._file_names[name]


@dataclass(frozen=True)
class _Rows:
    """Half-open rows of a fused tensor."""

    fused: str
    first: int
    last: int


class SplitRowsSource:
    """A source whose fused tensors appear as the parts that were stacked, and no longer under their own name.

    Args:
        source: the file.
        parts: fused name to its parts, name and number of rows, in row order; entries without a tensor are left alone.
    Raises:
        CheckpointError: the rows of a fused tensor are not those of its parts, or a part is also stored by itself.
    """

    def __init__(self, source: TensorSource, parts: Mapping[str, Sequence[tuple[str, int]]]) -> None:
        self._source = source
        self._rows: dict[str, _Rows | None] = {}
        for name in source.names():
            if name not in parts:
                self._add(name, None)
                continue
            height, first = source.shape(name)[:1], 0
            total = sum(rows for _, rows in parts[name])
            if height != (total,):
                listed = " + ".join(f"{part} {rows}" for part, rows in parts[name])
                raise CheckpointError(
                    f"tensor {name} is {list(source.shape(name))}; its parts have {total} rows ({listed})",
                    origin={"file": source.origin},
                )
            for part, rows in parts[name]:
                self._add(part, _Rows(name, first, first + rows))
                first += rows

    def _add(self, name: str, rows: _Rows | None) -> None:
        if name in self._rows:
            places = ["by itself" if place is None else f"in {place.fused}" for place in (self._rows[name], rows)]
            raise CheckpointError(
                f"tensor {name} is stored twice: {places[0]} and {places[1]}", origin={"file": self._source.origin}
            )
        self._rows[name] = rows

    @property
    def origin(self) -> str:
        """The file or folder that is read, for messages."""
        return self._source.origin

    def names(self) -> list[str]:
        """All names, parts in place of what they are stacked in."""
        return list(self._rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        rows = self._place(name)
        return (
            self._source.shape(name) if rows is None else (rows.last - rows.first, *self._source.shape(rows.fused)[1:])
        )

    def load(self, name: str) -> Tensor:
        """The tensor in its stored dtype, on the CPU; a part is a view of its fused tensor."""
        rows = self._place(name)
        return self._source.load(name) if rows is None else self._source.load(rows.fused)[rows.first : rows.last]

    def _place(self, name: str) -> _Rows | None:
        if name not in self._rows:
            raise CheckpointError(f"{self.origin} has no tensor {name}")
        return self._rows[name]
