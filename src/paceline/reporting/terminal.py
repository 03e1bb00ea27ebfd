"""Draws traces in a terminal: the text token by token, a map of the blocks, and the numbers.

What a token is shows twice, in its colour and in marks around it, so that pipes, NO_COLOR and colour-blind readers
lose nothing:

    [token]   green         a draft that was accepted
    ~token~   red, struck   the draft that was refused; it is not part of the text
    (token)   yellow        the target's own token: after the accepted drafts, or from the prompt pass
    .token.   dim           a draft behind the refused one; nobody looked at it (block map only)
    /token/   dim           accepted, but behind a stop or the token budget (block map only)
    |                       where a step ends

Spaces inside the marks belong to the token. Newlines and other control characters are written as escapes: a model's
text must not be able to move the cursor. Functions take a `decode` callable and no tokenizer; nothing here loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from paceline.reporting.token_pieces import (
    ACCEPTED,
    BONUS,
    CUT,
    REFUSED,
    UNSEEN,
    Decode,
    Look,
    Pieces,
    delivered,
    judged,
    visible,
)
from paceline.trace.acceptance import ACCEPTANCE_LENGTH_MEANS, DRAFT_ACCEPTANCE_RATE_MEANS, AcceptanceSummary
from paceline.trace.step import RequestTrace, StepRecord

_NARROWEST_CELL = 11
_WIDEST_CELL = 16
_BAR_WIDTH = 20
_VALUE_WIDTH = 8


class ChipPrinter:
    """Prints the generated text as chips while it is generated, one per token, refused drafts between them.

    Args:
        console: where to print; its settings decide about colour and width.
        decode: token ids to text.
    """

    def __init__(self, console: Console, decode: Decode) -> None:
        self._console = console
        self._pieces = Pieces(decode)
        self._column = 0
        self._is_first = True

    def first(self, token_id: int) -> None:
        """Print the token that the prompt pass gave."""
        self._open_step()
        self._write(BONUS, self._pieces.advance(token_id))

    def step(self, record: StepRecord) -> None:
        """Print what one step added."""
        self._open_step()
        for look, piece in delivered(record, self._pieces):
            self._write(look, piece)

    def finish(self) -> None:
        """End the last line."""
        if self._column > 0:
            self._console.print()
            self._column = 0

    def _open_step(self) -> None:
        if not self._is_first:
            self._put(Text("|", style="dim"))
        self._is_first = False

    def _write(self, look: Look, piece: str) -> None:
        self._put(_around(look, visible(piece, self._console.encoding)))
        if "\n" in piece and look is not REFUSED:
            self.finish()  # the text has a line break here as well

    def _put(self, chip: Text) -> None:
        # rich would break lines at the spaces inside the marks; a pipe gets no line breaks but those of the text.
        if self._console.is_terminal and self._column > 0 and self._column + chip.cell_len > self._console.width:
            self.finish()
        self._console.print(chip, end="", soft_wrap=True)
        self._column += chip.cell_len


def print_chips(console: Console, trace: RequestTrace, decode: Decode) -> None:
    """Print a request's text as chips, see `ChipPrinter`, under a legend.

    Args:
        console: where to print.
        trace: a request, finished or not.
        decode: token ids to text.
    """
    console.print(_legend(ACCEPTED, REFUSED, BONUS), soft_wrap=True)
    printer = ChipPrinter(console, decode)
    if trace.first_token_id is not None:
        printer.first(trace.first_token_id)
    for record in trace.records:
        printer.step(record)
    printer.finish()


def print_block_map(
    console: Console, trace: RequestTrace, decode: Decode, *, wanted: Callable[[StepRecord], bool] | None = None
) -> None:
    """Print one row per step: its anchor, a cell per draft, the target's own token.

    A refused cell holds both tokens, `~draft~>chosen`, shortened to the cell. Where the console has no room for cells,
    they shrink to their marks, and the refused pair stands at the end of the row.

    Args:
        console: where to print.
        trace: a request, finished or not.
        decode: token ids to text.
        wanted: which steps get a row; None shows all.
    """
    depth = max((record.num_draft_tokens for record in trace.records), default=0)
    index_width = len(str(max(len(trace.records) - 1, 0)))
    room = console.width - index_width - 2 - _WIDEST_CELL  # the last column is the target's own token
    cell_width = min(_WIDEST_CELL, room // (depth + 1) - 1)
    console.print(_legend(ACCEPTED, REFUSED, BONUS, UNSEEN, CUT), soft_wrap=True)
    pieces = Pieces(decode)
    if trace.first_token_id is not None:
        pieces.advance(trace.first_token_id)
    for index, record in enumerate(trace.records):
        if wanted is not None and not wanted(record):
            for _ in delivered(record, pieces):
                pass  # what follows is read behind it
            continue
        if cell_width >= _NARROWEST_CELL:
            cells = _wide_row(record, pieces, depth, cell_width, console.encoding)
        else:
            cells = _narrow_row(record, pieces, depth, console.encoding)
        row = Text.assemble((f"{index:>{index_width}}  ", "dim"), cells)
        row.rstrip()
        console.print(row, soft_wrap=True)


def print_summary(
    console: Console,
    summary: AcceptanceSummary,
    *,
    num_output_tokens: int | None = None,
    tokens_per_second: float | None = None,
    plain_tokens_per_second: float | None = None,
    identical: bool | None = None,
    lossless: bool | None = None,
) -> None:
    """Print the numbers of one or more requests, each beside what it means.

    Args:
        console: where to print.
        summary: from `AcceptanceSummary.from_steps`.
        num_output_tokens: tokens delivered, the one from the prompt pass included.
        tokens_per_second: of speculative decoding, if measured.
        plain_tokens_per_second: of plain decoding of the same prompts on the same machine, if measured.
        identical: whether the ids equal those of plain decoding, if compared.
        lossless: whether the method keeps the target's output; only a no is shown.
    """
    rows: list[tuple[str, str | Text, str]] = []
    if num_output_tokens is not None:
        rows.append(("output tokens", str(num_output_tokens), ""))
    rows.append(("steps", str(summary.num_steps), "target passes that judged drafts"))
    rows.append(("acceptance length", _number(summary.acceptance_length), ACCEPTANCE_LENGTH_MEANS))
    if summary.num_steps > 0 and not math.isclose(summary.delivered_per_step, summary.acceptance_length):
        means = "tokens delivered / steps; a stop or the budget cut off bonus tokens"
        rows.append(("delivered per step", _number(summary.delivered_per_step), means))
    counts = f"{DRAFT_ACCEPTANCE_RATE_MEANS}: {summary.num_accepted} / {summary.num_draft_tokens}"
    rows.append(("draft acceptance rate", _number(summary.draft_acceptance_rate), counts))
    for position, share in enumerate(summary.per_position):
        rows.append((f"  kept at position {position}", _number(share), _bar(share, console.encoding)))
    if tokens_per_second is not None:
        rows.append(("speculative", f"{tokens_per_second:.1f}", "tokens/s"))
    if plain_tokens_per_second is not None:
        rows.append(("plain", f"{plain_tokens_per_second:.1f}", "tokens/s"))
    if tokens_per_second is not None and plain_tokens_per_second:
        rows.append(("speed-up", f"{tokens_per_second / plain_tokens_per_second:.2f}x", "speculative / plain"))
    if identical is not None:
        verdict = Text("yes", style="bold green") if identical else Text("NO", style="bold red")
        rows.append(("identical", verdict, "token ids with and without the drafter"))
    if lossless is False:
        rows.append(("lossless", Text("NO", style="bold red"), "this method changes the target's output"))
    label_width = max(len(label) for label, _, _ in rows)
    for label, value, means in rows:
        shown = value if isinstance(value, Text) else Text(value, style="bold")
        line = Text.assemble(f"{label:<{label_width}}", " " * (_VALUE_WIDTH - len(shown)), shown, ("  " + means, "dim"))
        line.rstrip()
        console.print(line, soft_wrap=True)


def _wide_row(record: StepRecord, pieces: Pieces, depth: int, cell_width: int, encoding: str) -> Text:
    cells = [Text(_shorten(visible(pieces.last_piece, encoding), cell_width), style="bold")]
    drafts = judged(record, pieces)
    own = [piece for look, piece in delivered(record, pieces) if look is BONUS]
    chosen = visible(own[0], encoding) if own else ""
    for look, piece in drafts:
        if look is REFUSED and own:
            width = (cell_width - 3) // 2
            refused = _around(look, _shorten(visible(piece, encoding), width))
            cell = Text.assemble(refused, (">", "dim"), (_shorten(chosen, cell_width - 3 - width), BONUS.style))
        else:
            cell = _around(look, _shorten(visible(piece, encoding), cell_width - 2))
        cells.append(cell)
    cells += [Text()] * (depth - len(drafts))
    for cell in cells:
        cell.pad_right(max(0, cell_width - cell.cell_len))
    return Text(" ").join([*cells, _around(BONUS, chosen) if own else Text()])


def _narrow_row(record: StepRecord, pieces: Pieces, depth: int, encoding: str) -> Text:
    drafts = judged(record, pieces)
    row = Text().join([_around(look, "") for look, _ in drafts])
    row.pad_right(2 * (depth - len(drafts)) + 1)
    ending = [(look, piece) for look, piece in delivered(record, pieces) if look is not ACCEPTED]
    for number, (look, piece) in enumerate(ending):
        row.append(">" if number > 0 else "", style="dim").append_text(_around(look, visible(piece, encoding)))
    return row


def _around(look: Look, shown: str) -> Text:
    return Text(f"{look.opening}{shown}{look.closing}", style=look.style)


def _shorten(shown: str, width: int) -> str:
    return shown if cell_len(shown) <= width else set_cell_size(shown, max(0, width - 1)) + "+"


def _legend(*looks: Look) -> Text:
    return Text("  ").join([_around(look, look.means) for look in looks])


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _bar(share: float, encoding: str) -> str:
    if math.isnan(share):
        return ""
    return ("█" if encoding.lower().startswith("utf") else "#") * round(share * _BAR_WIDTH)
