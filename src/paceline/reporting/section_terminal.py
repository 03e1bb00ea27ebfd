"""Sections in a terminal: figures with what they mean, ratios with their intervals and a bar, tables, answers as chips.

Nothing depends on colour. Names and texts from files are shown with control characters as escapes.
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from paceline.reporting.drawn_answer import MapRow, first_refusal_is
from paceline.reporting.pair_section import draw_pair
from paceline.reporting.sections import BarFigure, Drawing, LineFigure, Section, Table, plain
from paceline.reporting.terminal import print_block_map, print_chips
from paceline.reporting.token_pieces import ACCEPTED, BONUS, CUT, REFUSED, UNSEEN, visible
from paceline.trace.acceptance import AcceptanceSummary
from paceline.trace.answer import TracedAnswer

_BAR_WIDTH = 30
_MOST_ROWS = 40
_MOST_DIFFERING = 12
_LOOKS = {look.name: look for look in (ACCEPTED, REFUSED, BONUS, UNSEEN, CUT)}


def print_section(console: Console, section: Section, drawing: Drawing) -> None:
    """Print one section.

    Args:
        console: where to print.
        section: what is said.
        drawing: which answers are drawn.
    """
    _line(console, Text(section.title, style="bold"))
    for note in section.notes:
        _line(console, Text(f"! {note}", style="yellow"))
    width = max((len(tile.label) for tile in section.tiles), default=0)
    for tile in section.tiles:
        means = f"  {tile.means}" if tile.means else ""
        _line(console, Text.assemble(f"{tile.label:<{width}}  ", (tile.value, "bold"), (means, "dim")))
    for figure in section.bars:
        _print_bars(console, figure)
    for line in section.lines:
        _print_line(console, line)
    shown = {figure.title for figure in section.bars}
    for table in section.tables:
        if table.rows and table.title not in shown:
            _print_table(console, table)
    for answer in drawing.chosen(section.answers):
        _print_answer(console, answer, drawing)
    _print_pairs(console, section, drawing)
    left_out = drawing.left_out(section.answers or [pair.before for pair in section.pairs])
    if left_out is not None:
        _line(console, Text(f"\n{left_out}", style="dim"))


def _print_bars(console: Console, figure: BarFigure) -> None:
    rows = [each for each in figure.estimates if each.value is not None]
    if not rows:
        return
    largest = figure.top or max(each.value or 0.0 for each in rows) or 1.0
    labels = [visible(each.label) for each in figure.estimates]
    width = max(map(cell_len, labels))
    is_whole = all(each.low is None and (each.value or 0.0).is_integer() for each in rows) and figure.top is None
    _heading(console, figure.title, figure.says)
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    for each, label in zip(figure.estimates, labels, strict=True):
        if each.value is None:
            continue
        value = f"{each.value:.0f}" if is_whole else f"{each.value:.3f}"
        interval = "" if each.low is None or each.high is None else f"{each.low:.3f} to {each.high:.3f}"
        length = round(min(1.0, each.value / largest) * _BAR_WIDTH)
        pad = " " * (width - cell_len(label))
        row = Text.assemble(
            f"  {label}{pad}  ", (f"{value:>8}", "bold"), f"  {interval:<16}  ", (block * length, "cyan")
        )
        row.rstrip()
        _line(console, row)


def _print_line(console: Console, figure: LineFigure) -> None:
    """Of a curve, its first, least, greatest and last value; of one with few points, all of them."""
    rows = []
    for name, points in figure.series:
        if not points:
            continue
        ys = [y for _, y in points]
        if len(points) <= 10:
            shown = "  ".join(f"{x:.4g}: {y:.4g}" for x, y in points)
        else:
            shown = (
                f"{ys[0]:.4g} at {points[0][0]:g}, {ys[-1]:.4g} at {points[-1][0]:g}; {min(ys):.4g} to {max(ys):.4g}"
            )
        rows.append((visible(name), shown))
    if not rows:
        return
    _heading(console, figure.title, f"{figure.says} ({figure.x_label}: {figure.y_label})")
    width = max(cell_len(name) for name, _ in rows)
    for name, shown in rows:
        _line(console, Text(f"  {name}{' ' * (width - cell_len(name))}  {shown}"))


def _print_table(console: Console, table: Table) -> None:
    rows = table.rows[:_MOST_ROWS]
    widths = [max(cell_len(row[column]) for row in [table.head, *rows]) for column in range(len(table.head))]
    _heading(console, table.title, "")
    for row in [table.head, *rows]:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            pad = " " * (width - cell_len(cell))
            cells.append(pad + cell if column >= table.first_number else cell + pad)
        line = Text("  " + "  ".join(cells), style="dim" if row is table.head else "")
        line.rstrip()
        _line(console, line)
    if table.left_out is not None or len(rows) < len(table.rows):
        _line(console, Text(f"  {len(rows)} of the rows are shown", style="dim"))


def _print_answer(console: Console, answer: TracedAnswer, drawing: Drawing) -> None:
    summary = AcceptanceSummary.from_steps(answer.trace.records)
    length = plain(summary.acceptance_length, 2)
    says = f"{answer.trace.num_output_tokens} tokens, {summary.num_steps} steps, acceptance length {length}"
    _heading(console, visible(answer.name), says)
    trace, num_steps = answer.trace, len(answer.trace.records)
    if num_steps > drawing.most_steps:
        trace = type(trace)(**{**vars(trace), "records": trace.records[: drawing.most_steps]})
        _line(console, Text(f"the first {drawing.most_steps} of {num_steps} steps are drawn", style="dim"))
    wanted = None if drawing.first_refusal is None else first_refusal_is(drawing.first_refusal)
    if wanted is None:
        print_chips(console, trace, answer.decode)
        console.print()
    if trace.records:
        print_block_map(console, trace, answer.decode, wanted=wanted)


def _print_pairs(console: Console, section: Section, drawing: Drawing) -> None:
    of_before = {id(pair.before): pair for pair in section.pairs}
    for answer in drawing.chosen([pair.before for pair in section.pairs]):
        pair = of_before[id(answer)]
        drawn = draw_pair(pair, most_steps=min(_MOST_DIFFERING, drawing.most_steps))
        _heading(console, drawn.name, drawn.said.partition(";")[0])
        for name, each in (("A", pair.before), ("B", pair.after)):
            _line(console, Text(f"{name}:", style="bold"))
            print_chips(console, each.trace, each.decode)
        for place, before, after in drawn.rows:
            _line(console, Text.assemble((f"token {place}", "dim")))
            for name, row in (("A", before), ("B", after)):
                _line(console, Text.assemble(f"  {name} kept {row.num_kept}  ", _block(row)))
        if drawn.left_out is not None:
            _line(console, Text(f"steps that differ: {drawn.left_out}", style="dim"))


def _block(row: MapRow) -> Text:
    cells = [
        Text(f"{look.opening}{cell.text}{look.closing}", style=look.style)
        for cell in row.cells
        for look in [_LOOKS[cell.fate]]
    ]
    if row.bonus is not None:
        cells.append(Text(f"{BONUS.opening}{row.bonus}{BONUS.closing}", style=BONUS.style))
    return Text(" ").join(cells)


def _heading(console: Console, title: str, says: str) -> None:
    console.print()
    _line(console, Text.assemble((title, "bold"), (f"  {says}" if says else "", "dim")))


def _line(console: Console, text: Text) -> None:
    shown = visible_lines(text, console.encoding)
    console.print(shown, soft_wrap=True)


def visible_lines(text: Text, encoding: str) -> Text:
    """A text that an output of this encoding can carry: what it lacks becomes escapes."""
    try:
        text.plain.encode(encoding)
    except UnicodeEncodeError:
        return Text(text.plain.encode(encoding, "backslashreplace").decode(encoding))
    return text
