"""A recording exists in all processes or in none."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.engine.recordings import Recording, Repeated
from paceline.engine.shared_recordings import recorded_everywhere
from paceline.errors import EngineFaultError


def test_a_failure_elsewhere_is_one_here() -> None:
    made = recorded_everywhere(Repeated, lambda did: did)(lambda: 1)
    assert made.replay() == 1
    with pytest.raises(EngineFaultError, match="another process"):
        recorded_everywhere(Repeated, lambda _did: False)(lambda: 1)
    told: list[bool] = []

    def fail(_body: Any) -> Recording:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        recorded_everywhere(fail, lambda did: told.append(did) or did)(lambda: 1)  # type: ignore[func-returns-value]
    assert told == [False]
