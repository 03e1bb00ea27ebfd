"""What the decider makes of the target's own choices: rows that count, ends, places that change hands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists
from tests.tiny_kimi import k3_tiny_config, kimi_contract

from paceline.distributed.places import DecodeRequest, Place, Places
from paceline.errors import RequestError
from paceline.ops.sample_tokens import NO_TOKEN

CONTRACT = kimi_contract(k3_tiny_config(eos_token_id=2))


def after(text: Sequence[int]) -> int:
    """A language in which the next token follows from length and last token, and 2 ends it."""
    return 3 + (7 * text[-1] + len(text)) % 11


def run(
    requests: Sequence[DecodeRequest],
    *,
    num_places: int = 2,
    max_rows: int = 4,
    draft: Callable[[Place], list[int]] = lambda place: [],
    follows: Callable[[Sequence[int]], int] = after,
) -> Any:
    """Serve them all; the target is `follows`, and rows run by place have to be what is known of its text."""
    places = Places(CONTRACT, requests, num_places=num_places, max_rows=max_rows, max_model_len=64)
    committed: dict[int, list[int]] = {}
    while True:
        for number in places.admit():
            committed[number] = []
        rows = places.next_rows()
        if not any(rows):
            return places.results()
        assert all(len(row) <= max_rows for row in rows)
        own = [
            [follows([*committed[number], *row[: at + 1]]) for at in range(len(row))] for number, row in enumerate(rows)
        ]
        judged = places.num_judged()
        own = [ids if judged[number] else [NO_TOKEN] * len(ids) for number, ids in enumerate(own)]
        assert all(count in (0, len(row)) for count, row in zip(judged, rows, strict=True))
        for number, count in enumerate(places.take(own)):
            assert count <= len(rows[number]) and (count > 0) == bool(rows[number])
            committed[number] = [*committed.get(number, []), *rows[number][:count]]
        for place in places.running:
            if place is not None and place.is_at_anchor:
                place.drafts = draft(place)


def plain(request: DecodeRequest) -> tuple[int, ...]:
    text = list(request.prompt_ids)
    for _ in range(request.max_tokens):
        text.append(after(text))
    return tuple(text[len(request.prompt_ids) :])


@given(
    prompts=lists(lists(integers(3, 20), min_size=1, max_size=13), min_size=1, max_size=5),
    numbers=lists(integers(0, 4), min_size=5, max_size=5),
    num_places=integers(1, 3),
)
def test_any_drafts_leave_the_text_as_it_is(prompts: list[list[int]], numbers: list[int], num_places: int) -> None:
    requests = [DecodeRequest(tuple(prompt), max_tokens=1 + len(prompt) % 7) for prompt in prompts]

    def draft(place: Place) -> list[int]:
        text, drafts = list(place.text), []
        for at in range(3):  # right for a while
            drafts.append(after(text) if at < numbers[place.num_run % 5] else 3)
            text.append(drafts[-1])
        return drafts

    found = run(requests, num_places=num_places, draft=draft)
    assert [one.token_ids for one in found] == [plain(request) for request in requests]
    assert all(one.finish_reason == "length" for one in found)


def test_right_drafts_are_counted() -> None:
    def right(place: Place) -> list[int]:
        text = list(place.text)
        for _ in range(3):
            text.append(after(text))
        return text[-3:]

    (found,) = run([DecodeRequest((5,), max_tokens=9)], draft=right)
    assert found.steps == ((0, 0, 0, 1), (3, 3, 3, 4), (3, 3, 3, 4))
    assert (found.acceptance.num_steps, found.acceptance.acceptance_length) == (2, 4.0)


def test_a_stop_token_ends_a_request_within_a_block() -> None:
    request = DecodeRequest((5, 6), max_tokens=20)
    stopping = lambda text: 2 if len(text) == 7 else after(text)  # noqa: E731
    (found,) = run([request], draft=lambda place: [after(place.text), 9, 9], follows=stopping)
    assert found.finish_reason == "stop" and len(found.token_ids) == 6 and found.token_ids[-1] == 2
    assert sum(step[3] for step in found.steps) == 6 and all(step[1] <= step[2] <= step[0] for step in found.steps)
    own = DecodeRequest((5, 6), max_tokens=20, ignore_eos=True, stop_token_ids=frozenset({after([5, 6])}))
    (found,) = run([own])
    assert found.finish_reason == "stop" and found.token_ids == (after([5, 6]),)
    (found,) = run([DecodeRequest((5, 6), max_tokens=8, ignore_eos=True)], follows=stopping)
    assert found.finish_reason == "length" and found.token_ids[5] == 2


def test_numbers_that_say_nothing_end_a_request_and_no_other() -> None:
    requests = [DecodeRequest((5, 6), max_tokens=6), DecodeRequest((7,), max_tokens=6)]
    broken = lambda text: NO_TOKEN if text[0] == 5 and len(text) == 4 else after(text)  # noqa: E731
    first, second = run(requests, follows=broken)
    assert first.finish_reason == "error" and first.token_ids == plain(requests[0])[:2]
    assert second.token_ids == plain(requests[1])


@pytest.mark.parametrize("ends", [False, True])
def test_drafts_before_a_row_that_says_nothing_are_delivered(ends: bool) -> None:
    """All of them, or up to one that ends the text: then nobody asks for the row."""

    def broken(text: Sequence[int]) -> int:
        return NO_TOKEN if len(text) == 5 else 2 if ends and len(text) == 4 else after(text)

    def right(place: Place) -> list[int]:
        text = list(place.text)
        for _ in range(3):
            text.append(broken(text))
        return text[-3:]

    (found,) = run([DecodeRequest((5, 6), max_tokens=9)], draft=right, follows=broken)
    assert found.finish_reason == ("stop" if ends else "error")
    expected = plain(DecodeRequest((5, 6), max_tokens=3))
    assert found.token_ids == ((*expected[:2], 2) if ends else expected)
    assert found.steps == ((3, 3, 3, 3),)


@pytest.mark.parametrize(
    "request_",
    [
        DecodeRequest(()),
        DecodeRequest((5,) * 60, max_tokens=5),
        DecodeRequest((5,), max_tokens=0),
        DecodeRequest((512,), max_tokens=1),
        DecodeRequest((5,), max_tokens=1, temperature=-1.0),
    ],
)
def test_impossible_requests(request_: DecodeRequest) -> None:
    with pytest.raises(RequestError):
        run([request_])
