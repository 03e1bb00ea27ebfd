"""Every conversation's features are looked at before they are written: finite, and of the scale that the others have.

S tokens, E taps times width, D width.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.capture.feature_file import TapScales
from paceline.errors import NumericError

_log = logging.getLogger(__name__)

_FACTOR = 3.0  # a tap this many times above or below the median is worth a warning
_FEWEST = 16  # conversations before the median means something
_REMEMBERED = 256
_MOST_WARNINGS = 5


class ScaleWatch:
    """Warns of conversations whose taps are far from the running median; a broken layer or a wrong dtype shows so.

    Args:
        num_taps: of each conversation.
    """

    def __init__(self, num_taps: int) -> None:
        self._seen: list[deque[float]] = [deque(maxlen=_REMEMBERED) for _ in range(num_taps)]
        self.num_warnings = 0

    def add(self, conversation: int, rms: Sequence[float], layer_ids: Sequence[int]) -> None:
        """Look at one conversation.

        Args:
            conversation: its number, for the message.
            rms: per tap.
            layer_ids: of the taps.
        """
        for seen, value, layer in zip(self._seen, rms, layer_ids, strict=True):
            if len(seen) >= _FEWEST:
                median = statistics.median(seen)
                if not median / _FACTOR <= value <= median * _FACTOR:
                    self._warn(conversation, layer, value, median)
            seen.append(value)

    def _warn(self, conversation: int, layer: int, value: float, median: float) -> None:
        self.num_warnings += 1
        if self.num_warnings <= _MOST_WARNINGS:
            _log.warning(
                "conversation %d: layer %d has RMS %.3g, the conversations before it %.3g%s",
                conversation,
                layer,
                value,
                median,
                "; further ones go unmentioned" if self.num_warnings == _MOST_WARNINGS else "",
            )


def check_sample(
    conversation: int, taps_SE: Tensor, hidden_SD: Tensor | None, layer_ids: Sequence[int], watch: ScaleWatch
) -> TapScales:
    """Check one conversation and add up the scale of its taps.

    Args:
        conversation: its number, for messages.
        taps_SE: as they will be stored.
        hidden_SD: its last states, if they are kept.
        layer_ids: of the taps.
        watch: compares it with the others.
    Raises:
        NumericError: a NaN or an infinity; names the conversation and the layer.
    """
    width = taps_SE.shape[1] // len(layer_ids)
    squares_ST = taps_SE.view(len(taps_SE), len(layer_ids), width).double().square().sum(-1)
    for number, layer in enumerate(layer_ids):
        if not bool(torch.isfinite(squares_ST[:, number]).all()):
            raise NumericError(
                f"conversation {conversation}: the output of layer {layer} is not finite",
                hint="target.dtype=float32; float16 overflows in many models",
            )
    if hidden_SD is not None and not bool(torch.isfinite(hidden_SD).all()):
        raise NumericError(f"conversation {conversation}: the last state is not finite", hint="target.dtype=float32")
    num_first = min(len(taps_SE), 1)
    first_T, later_T = squares_ST[:1].sum(0), squares_ST[1:].sum(0)
    num_later = len(taps_SE) - num_first
    scales = TapScales(tuple(later_T.tolist()), num_later * width, tuple(first_T.tolist()), num_first * width)
    if num_later:
        watch.add(conversation, scales.rms, layer_ids)
    return scales
