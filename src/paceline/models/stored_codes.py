"""Weights of a target in the codes of their file: found at loading, read again when an arithmetic wants them.

The file is mapped, so what is not asked for takes no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.checkpoint.gguf_codes import BlockCodes, HoldsCodes, join
from paceline.checkpoint.weights import Destination


class StoredCodes:
    """Codes of one weight, which one or more tensors of a file make up.

    Args:
        source: the file.
        names: of its tensors, all of one kind, in the order of the weight's rows.
        weight: as it was filled from them. Once it has changed, codes no longer stand for it.
        ids: some rows alone, int64; None is all.
    """

    def __init__(self, source: HoldsCodes, names: tuple[str, ...], weight: Tensor, ids: Tensor | None = None) -> None:
        self._source, self._names, self._ids = source, names, ids
        self._state = _state(weight)

    def __deepcopy__(self, _memo: Any) -> StoredCodes:
        """Itself; a copied weight is another one, for which it does not stand."""
        return self

    def stand_for(self, weight: Tensor) -> bool:
        """Whether a weight is still the one that was filled, unchanged."""
        return self._state == _state(weight)

    def of_rows(self, ids: Tensor, weight: Tensor) -> StoredCodes:
        """The codes of some rows, in order.

        Args:
            ids: int64, of all rows.
            weight: these rows of the weight.
        """
        assert self._ids is None, "rows are chosen once"
        return StoredCodes(self._source, self._names, weight, ids)

    def read(self) -> BlockCodes:
        """Read them."""
        whole = join([self._source.codes(name) for name in self._names])
        return whole if self._ids is None else whole.rows(self._ids)


def find_codes(
    source: object, destinations: Mapping[str, Destination], parameter: str, weight: Tensor
) -> StoredCodes | None:
    """The codes of a parameter; None where its tensors are not all stored in codes of one kind.

    Args:
        source: what it was filled from.
        destinations: checkpoint tensor name to its place.
        parameter: its name.
        weight: itself.
    """
    if not isinstance(source, HoldsCodes):
        return None
    of_it = [(place.rows or (0, 0), name) for name, place in destinations.items() if place.parameter == parameter]
    names = tuple(name for _rows, name in sorted(of_it))
    kinds = {source.code_kind(name) for name in names}
    return StoredCodes(source, names, weight) if len(kinds) == 1 and None not in kinds else None


def _state(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies and how often it was written to."""
    return weight.data_ptr(), weight._version
