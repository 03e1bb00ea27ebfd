"""The order of ids by frequency: what always comes first does, ties go to the lower id."""

from __future__ import annotations

import torch

from paceline.models.drafters.vocabulary import by_frequency


def test_order() -> None:
    counts = torch.tensor([0, 5, 2, 5, 0, 9])
    assert by_frequency(counts, ()).tolist() == [5, 1, 3, 2, 0, 4]
    assert by_frequency(counts, (4, 2)).tolist() == [2, 4, 5, 1, 3, 0]
    assert counts.tolist() == [0, 5, 2, 5, 0, 9]
