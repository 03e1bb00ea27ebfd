"""The columns of a slot's numbers on the device: whole numbers in one array, fractions in another.

S slots, the last of which is the trash slot: padding rows, and rows of requests that have ended, read and write there.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

LENGTH, ANCHOR, STEP, IS_ALIVE, LIMIT, TOP_K, SEED, FIRST_STOP = range(8)
NUM_STOPS = 8
NUM_WHOLE = FIRST_STOP + NUM_STOPS
TEMPERATURE, TOP_P, MIN_P = range(3)
NUM_FRACTIONS = 3


class SlotColumns(NamedTuple):
    """Both arrays.

    Attributes:
        whole_SX: int64 [S, NUM_WHOLE]: n, the anchor, the request's own step counter, 1 while it is alive, the position
            of its last token, top_k, seed, then its stop ids and -1.
        fractions_SX: float32 [S, NUM_FRACTIONS]: temperature, top_p, min_p.
    """

    whole_SX: Tensor
    fractions_SX: Tensor


class SamplingRows(NamedTuple):
    """Sampling settings of the requests of one step."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    seed_B: Tensor


def sampling_rows(columns: SlotColumns, slots_B: Tensor) -> SamplingRows:
    """Look up the settings of some slots.

    Args:
        columns: of all slots.
        slots_B: int64.
    """
    whole_SX, fractions_SX = columns
    arrays = (
        fractions_SX[:, TEMPERATURE],
        whole_SX[:, TOP_K],
        fractions_SX[:, TOP_P],
        fractions_SX[:, MIN_P],
        whole_SX[:, SEED],
    )
    return SamplingRows(*(array[slots_B] for array in arrays))
