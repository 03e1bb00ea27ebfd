"""A Kimi checkpoint as `kimi_names.py` names it: one prefix, one shape per tensor, plain numbers.

    prefix       multimodal exports may leave out the inner `model.`: `language_model.layers...`
    A_log        [1, 1, heads, 1], [heads], or longer and zero behind the heads (Kimi-K3 stores it as wide as a head)
    convolution  [channels, 1, taps] or [channels, taps]
    experts      plain, or packed as MXFP4 (`quantized.py`)

Source: tensor inventories of Kimi-Linear-48B-A3B and Kimi-K3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.checkpoint.contract import TargetContract
from paceline.checkpoint.quantized import open_dequantized
from paceline.checkpoint.weights import TensorSource, cut, load_part
from paceline.errors import CheckpointError

_WRAPPER, _INNER, _HEAD = "language_model.", "language_model.model.", "language_model.lm_head."


def open_kimi(
    source: TensorSource, contract: TargetContract, quantization_config: Mapping[str, Any] | None
) -> TensorSource:
    """Present a file of any variant under the published names.

    Args:
        source: the file.
        contract: of the target, with `kimi` set.
        quantization_config: that object of its config, or None.
    Raises:
        CheckpointError: a tensor is there under two names, the file's quantisation is not the config's, or is not
            supported.
    """
    plain, _ = open_dequantized(source, quantization_config, origin=contract.origin)
    return _KimiTensors(plain, contract)


class _KimiTensors:
    """The file under one spelling of names and shapes."""

    def __init__(self, source: TensorSource, contract: TargetContract) -> None:
        assert contract.kimi is not None, "the caller chooses by this field"
        self._source = source
        self._num_heads = contract.kimi.delta.num_heads if contract.kimi.delta is not None else 0
        self._stored: dict[str, str] = {}
        for name in source.names():
            published = _published(name)
            if published in self._stored:
                raise CheckpointError(
                    f"one tensor has two names: {self._stored[published]} and {name}", origin={"file": source.origin}
                )
            self._stored[published] = name

    @property
    def origin(self) -> str:
        return self._source.origin

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._source.shape(self._known(name))
        if name.endswith(".A_log") and _numel(stored) >= self._num_heads:
            return (self._num_heads,)
        if name.endswith("_conv1d.weight") and len(stored) == 3 and stored[1] == 1:
            return (stored[0], stored[2])
        return stored

    def load(self, name: str) -> Tensor:
        tensor = self._source.load(self._known(name))
        if name.endswith(".A_log"):
            return self._decay_rates(name, tensor)
        return tensor.reshape(self.shape(name))

    def load_part(self, name: str, rows: tuple[int, int], columns: tuple[int, int] | None) -> Tensor:
        stored = self._known(name)
        if self.shape(name) != self._source.shape(stored):  # narrowed and brought into shape before it is cut
            return cut(self.load(name), rows, columns)
        return load_part(self._source, stored, rows, columns)

    def _decay_rates(self, name: str, tensor: Tensor) -> Tensor:
        """One rate per head; whatever pads them must be zero, or they are not what they are taken for."""
        flat = tensor.flatten()
        rates, rest = flat[: self._num_heads], flat[self._num_heads :]
        if bool(rest.ne(0).any()):
            raise CheckpointError(
                f"{name} holds {flat.numel()} values for {self._num_heads} heads, and those behind the heads' are not "
                "zero",
                origin={"file": self.origin},
            )
        return rates

    def _known(self, name: str) -> str:
        if name not in self._stored:
            raise CheckpointError(f"{self.origin} has no tensor {name}")
        return self._stored[name]


def _published(name: str) -> str:
    if not name.startswith(_WRAPPER) or name.startswith((_INNER, _HEAD)):
        return name
    return _INNER + name.removeprefix(_WRAPPER)


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
