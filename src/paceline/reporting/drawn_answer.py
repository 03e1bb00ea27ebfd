"""One answer as a page draws it: its text token by token, and a map of its blocks, with what is known of each token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.reporting.provenance import reproduce
from paceline.reporting.token_pieces import BONUS, REFUSED, Look, Pieces, delivered, judged, visible
from paceline.trace.acceptance import AcceptanceSummary
from paceline.trace.answer import TracedAnswer
from paceline.trace.step import StepDetails, StepRecord

Wanted = Callable[[StepRecord], bool]


@dataclass(frozen=True)
class Chip:
    """One token: its fate, its text, what is known of it, and whether its text ends a line."""

    fate: str
    text: str
    title: str
    ends_line: bool = False


@dataclass(frozen=True)
class Cell:
    """One place of a block: the draft's fate and text; of a refused one, the token that came in its place."""

    fate: str
    text: str
    chosen: str = ""


@dataclass(frozen=True)
class MapRow:
    """One step: its number, its anchor, a cell per draft, the target's own token."""

    number: int
    anchor: str
    cells: list[Cell]
    bonus: str | None
    first_refusal: str
    num_kept: int


@dataclass(frozen=True)
class DrawnAnswer:
    """One answer.

    Attributes:
        name: of its prompt.
        category: of its prompt, or of its set.
        question: its text, shortened; None where the trace has none.
        steps: of its text, a list of chips each; the first is the prompt pass's token.
        rows: of its map, those that are wanted.
        depth: cells of the widest row.
        summary: its acceptance.
        num_tokens: delivered.
        finish_reason: why it ended.
        left_out: what of it is not drawn; None where all is.
        command: that repeats it; None where the trace does not say enough.
    """

    name: str
    category: str | None
    question: str | None
    steps: list[list[Chip]]
    rows: list[MapRow]
    depth: int
    summary: AcceptanceSummary
    num_tokens: int
    finish_reason: str | None
    left_out: str | None
    command: str | None


def draw_answer(answer: TracedAnswer, *, most_steps: int, wanted: Wanted | None = None) -> DrawnAnswer:
    """Put together what is drawn.

    Args:
        answer: as the trace has it.
        most_steps: steps that are drawn at most; the others are counted, and said to be left out.
        wanted: which steps the map shows; None shows all. The text is drawn as it is.
    """
    trace, pieces = answer.trace, Pieces(answer.decode)
    steps: list[list[Chip]] = []
    rows: list[MapRow] = []
    if trace.first_token_id is not None:
        piece = pieces.advance(trace.first_token_id)
        steps.append([_chip(BONUS, piece, "from the prompt pass")])
    records = trace.records[:most_steps]
    for number, record in enumerate(records):
        is_wanted = wanted is None or wanted(record)
        row = _map_row(answer, record, number, pieces) if is_wanted else None
        chips = []
        places = iter(range(len(record.proposed_ids) + 2))
        for look, piece in delivered(record, pieces):
            position = record.num_verified_accepted if look is not BONUS else record.num_accepted
            if look is not REFUSED:
                position = next(places)
            chips.append(_chip(look, piece, _title(answer, record, number, look, position)))
        steps.append(chips)
        if row is not None:
            rows.append(row)
    prompt = answer.prompt
    num_left = len(trace.records) - len(records)
    return DrawnAnswer(
        name=visible(answer.name),
        category=None if prompt is None else visible(prompt.category or prompt.set or "") or None,
        question=None if prompt is None or prompt.text is None else _short(prompt.text, 600),
        steps=steps,
        rows=rows,
        depth=max((len(row.cells) for row in rows), default=0),
        summary=AcceptanceSummary.from_steps(trace.records),
        num_tokens=trace.num_output_tokens,
        finish_reason=trace.finish_reason,
        left_out=f"the first {len(records)} of {len(trace.records)} steps are drawn" if num_left else None,
        command=reproduce(answer),
    )


def first_refusal_is(position: int) -> Wanted:
    """Wants the steps whose first refused draft stood there."""

    def wanted(record: StepRecord) -> bool:
        return record.refused_id is not None and record.num_verified_accepted == position

    return wanted


def _map_row(answer: TracedAnswer, record: StepRecord, number: int, pieces: Pieces) -> MapRow:
    """Read before the step's tokens go into the text."""
    anchor = visible(pieces.last_piece)
    looks = judged(record, pieces)
    branch = pieces.fork()
    bonus = None
    for look, piece in delivered(record, branch):
        bonus = visible(piece) if look is BONUS else bonus
    cells = [
        Cell(look.name, visible(piece), (bonus or "") if look is REFUSED and bonus is not None else "")
        for look, piece in looks
    ]
    refusal = str(record.num_verified_accepted) if record.refused_id is not None else "none"
    return MapRow(number, anchor, cells, bonus, refusal, record.num_accepted)


def _chip(look: Look, piece: str, title: str) -> Chip:
    return Chip(look.name, visible(piece), title, "\n" in piece and look is not REFUSED)


def _title(answer: TracedAnswer, record: StepRecord, number: int, look: Look, position: int) -> str:
    """What is known of a token: its place, how likely it was, and what else was."""
    place = f"step {number}, draft {position}" if look is not BONUS else f"step {number}"
    lines = [f"{place}, position {record.anchor_position + 1 + position}: {look.means}"]
    details = record.details
    if details is not None:
        lines += _chances(details, look, position)
        if position < len(details.target_top):
            top = ", ".join(
                f"'{visible(answer.decode([token]))}' {_percent(logprob)}"
                for token, logprob in details.target_top[position]
            )
            lines.append(f"target's five: {top}")
    return "\n".join(lines)


def _chances(details: StepDetails, look: Look, position: int) -> list[str]:
    found = []
    if look is BONUS:
        if details.bonus_logprob is not None:
            found.append(f"target {_percent(details.bonus_logprob)}")
        return found
    if position < len(details.draft_logprobs):
        found.append(f"drafter {_percent(details.draft_logprobs[position])}")
    if position < len(details.target_logprobs):
        found.append(f"target {_percent(details.target_logprobs[position])}")
    if position < len(details.confidences):
        found.append(f"confidence {details.confidences[position]:.2f}")
    return [", ".join(found)] if found else []


def _percent(logprob: float) -> str:
    share = 100 * math.exp(min(0.0, logprob))
    return f"{share:.1f} %" if share >= 0.1 else "below 0.1 %"


def _short(text: str, most: int) -> str:
    shown = "".join(letter if letter == "\n" else visible(letter) for letter in text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"
