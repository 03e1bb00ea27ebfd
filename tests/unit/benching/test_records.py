"""Times of a record move with where its pass began and when it was due."""

from __future__ import annotations

import pytest

from paceline.benching.records import AnswerRecord, Load, first_error


def test_a_closed_loop_counts_from_sending() -> None:
    record = AnswerRecord(0, "p", sent_s=105.0, total_s=2.0, first_s=1.0, delta_s=(1.0, 2.0))
    record.place(100.0, None)
    assert (record.sent_s, record.due_s, record.total_s, record.first_s) == (5.0, 5.0, 2.0, 1.0)


def test_an_open_loop_counts_from_arrival() -> None:
    record = AnswerRecord(0, "p", sent_s=105.0, total_s=2.0, first_s=1.0, delta_s=(1.0, 2.0))
    record.place(100.0, 4.5)
    assert (record.total_s, record.first_s, record.delta_s) == (2.5, 1.5, (1.5, 2.5))
    failed = AnswerRecord(0, "p", sent_s=105.0, total_s=2.0, error="no")
    failed.place(100.0, 4.0)
    assert failed.total_s == 3.0 and failed.first_s is None and first_error([record, failed]) == "no"


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Load(4), "4 at once"),
        (Load(None), "all at once"),
        (Load(None, 2.5), "2.5 requests/s"),
        (Load(8, 2.0), "2 requests/s, 8 at once"),
    ],
)
def test_loads_in_words(load: Load, said: str) -> None:
    assert load.describe() == said
