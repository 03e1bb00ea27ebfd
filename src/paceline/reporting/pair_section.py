"""Two set-ups on the same prompts as a section, and two answers to one question aligned, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline.reporting.drawn_answer import MapRow, draw_answer
from paceline.reporting.provenance import differences
from paceline.reporting.sections import Section, Table, Tile, plain, with_interval
from paceline.reporting.token_pieces import Pieces, visible
from paceline.trace.acceptance import AcceptanceSummary
from paceline.trace.answer import TracedAnswer
from paceline.trace.step import RequestTrace

if TYPE_CHECKING:
    from paceline.evaluation.statistics import Interval
    from paceline.evaluation.trace_pairs import AnswerPair, TraceComparison

_MOST_ROWS = 300
_OF_PACE = ("requests_at_once", "settings.trace_details", "machine.processor")  # what changes times besides drafts


@dataclass(frozen=True)
class Lane:
    """How one set-up came to a token: whether a draft was accepted, in which step, and whether a step begins there."""

    fate: str
    step: int
    begins: bool


@dataclass(frozen=True)
class Column:
    """One token of the common text, and how either set-up came to it."""

    text: str
    title: str
    before: Lane
    after: Lane
    ends_line: bool


@dataclass(frozen=True)
class DrawnPair:
    """Two answers to one question.

    Attributes:
        name: of the prompt.
        columns: the text up to where the answers part.
        said: whether they part, and where; and what is left out.
        rows: place of the step in the text, and the step of either, where these kept different numbers of drafts.
        left_out: what of `rows` is not drawn.
    """

    name: str
    columns: list[Column]
    said: str
    rows: list[tuple[int, MapRow, MapRow]]
    left_out: str | None = None


def pair_section(names: tuple[str, str], comparison: TraceComparison) -> Section:
    """Say how two set-ups compare.

    Args:
        names: of A and B.
        comparison: of their answers.
    """
    found = comparison
    notes = [f"A is {names[0]}, B is {names[1]}. Ratios are B / A, differences B - A; the unit is the prompt."]
    if found.is_by_order:
        notes.append("The files do not name their prompts: answers are paired by their order.")
    if found.num_only_before or found.num_only_after:
        notes.append(f"Without a partner: {found.num_only_before} answers of A, {found.num_only_after} of B.")
    others = _differences(found.pairs[0])
    has_same_pace = not any(name in _OF_PACE for name, *_ in others)
    if not has_same_pace:
        notes.append("Times of A and B do not compare: requests at once, details of the trace or the machine differ.")
    sign = found.sign
    tiles = [
        Tile("pairs", str(len(found.pairs)), f"of answers, to {found.num_prompts} prompts"),
        Tile("acceptance length A", _interval(found.length_before)),
        Tile("acceptance length B", _interval(found.length_after)),
        Tile("ratio B / A", _interval(found.quotient), "of the acceptance lengths, paired by prompt"),
        Tile("difference B - A", _interval(found.difference), "mean over prompts"),
        Tile("longer with B", f"{sign.wins} of {sign.wins + sign.losses}", f"prompts, {sign.ties} equal"),
        Tile("sign test", f"p = {sign.p_value:.3g}", "two-sided"),
    ]
    if found.wilcoxon_p_value is not None:
        tiles.append(Tile("Wilcoxon", f"p = {found.wilcoxon_p_value:.3g}", "signed ranks, exact, two-sided"))
    if found.speed is not None and has_same_pace:
        tiles.append(Tile("speed B / A", _interval(found.speed), "tokens per second of decoding, paired"))
    tiles.append(Tile("same text", f"{found.num_same_texts} of {len(found.pairs)}", "pairs with the same token ids"))
    shared = f"of the {found.num_shared_steps} steps that begin at the same place of the same text"
    tiles.append(Tile("steps that differ", str(found.num_differing_steps), shared))
    figures = {key: value for key, value in vars(found).items() if key != "pairs"}
    return Section(
        title=f"{names[0]} against {names[1]}",
        notes=notes,
        tiles=tiles,
        tables=[_pairs_table(found.pairs), Table("What differs besides", ["", "A", "B"], others)],
        pairs=found.pairs,
        figures={
            key: asdict(value) if hasattr(value, "__dataclass_fields__") else value for key, value in figures.items()
        }
        | {
            "num_pairs": len(found.pairs),
            "num_same_texts": found.num_same_texts,
            "num_shared_steps": found.num_shared_steps,
            "num_differing_steps": found.num_differing_steps,
        },
    )


def draw_pair(pair: AnswerPair, *, most_steps: int) -> DrawnPair:
    """Align two answers.

    Args:
        pair: to one question.
        most_steps: steps, or rows of a list, that are drawn at most.
    """
    before, after = _lanes(pair.before.trace), _lanes(pair.after.trace)
    most = sum(len(record.emitted_ids) for record in pair.before.trace.records[:most_steps]) + 1
    ids = pair.before.trace.token_ids[: min(pair.num_same, most)]
    pieces = Pieces(pair.before.decode)
    columns = []
    for index, token in enumerate(ids):
        piece = pieces.advance(token)
        title = f"token {index}: A {_said(before[index])}, B {_said(after[index])}"
        columns.append(Column(visible(piece), title, before[index], after[index], "\n" in piece))
    said = "the texts are the same"
    if not pair.is_same_text:
        said = f"the texts part behind {pair.num_same} tokens; nothing is compared there"
    if len(ids) < pair.num_same:
        said += f"; {len(ids)} of {pair.num_same} common tokens are drawn"
    shown = pair.differing[:most_steps]
    maps = [
        {row.number: row for row in draw_answer(answer, most_steps=1 + max(steps, default=-1)).rows}
        for answer, steps in (
            (pair.before, [each.before.step_index for each in shown]),
            (pair.after, [each.after.step_index for each in shown]),
        )
    ]
    rows = [
        (each.position, maps[0][each.before.step_index], maps[1][each.after.step_index])
        for each in shown
        if each.before.step_index in maps[0] and each.after.step_index in maps[1]
    ]
    left_out = f"{len(rows)} of {len(pair.differing)} are drawn" if len(rows) < len(pair.differing) else None
    return DrawnPair(visible(pair.before.name), columns, said, rows, left_out)


def _differences(pair: AnswerPair) -> list[list[str]]:
    """Between the runs of the first pair; of several runs in a file the others are not looked at."""
    before, after = pair.before.run, pair.after.run
    if before is None or after is None:
        return []
    return [[visible(cell) for cell in row] for row in differences(before, after)]


def _lanes(trace: RequestTrace) -> list[Lane]:
    lanes = [] if trace.first_token_id is None else [Lane("bonus", -1, True)]
    for number, record in enumerate(trace.records):
        for position in range(len(record.emitted_ids)):
            fate = "accepted" if position < record.num_accepted else "bonus"
            lanes.append(Lane(fate, number, position == 0))
    return lanes


def _said(lane: Lane) -> str:
    if lane.step < 0:
        return "had it from the prompt pass"
    what = "accepted a draft" if lane.fate == "accepted" else "took the target's own"
    return f"{what} in step {lane.step}"


def _pairs_table(pairs: Sequence[AnswerPair]) -> Table:
    rows = []
    for pair in pairs[:_MOST_ROWS]:
        lengths = [_length(answer) for answer in (pair.before, pair.after)]
        both = None if None in lengths else (lengths[1] or 0.0) - (lengths[0] or 0.0)
        text = "same" if pair.is_same_text else f"parts behind {pair.num_same}"
        rows.append(
            [
                visible(pair.before.name),
                *(plain(length, 2) for length in lengths),
                "-" if both is None else f"{both:+.2f}",
                f"{len(pair.differing)} of {pair.num_shared_steps}",
                text,
            ]
        )
    left_out = f"{len(rows)} of {len(pairs)} pairs are listed" if len(rows) < len(pairs) else None
    return Table("Pairs", ["answer", "A", "B", "B - A", "steps that differ", "text"], rows, left_out)


def _length(answer: TracedAnswer) -> float | None:
    summary = AcceptanceSummary.from_steps(answer.trace.records)
    return summary.acceptance_length if summary.num_steps else None


def _interval(found: Interval) -> str:
    return with_interval(found.estimate, found.low, found.high)
