"""The folder of a training run as a section: curves of loss, accuracy and acceptance, and what was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.reporting.inputs import TrainingInput, number
from paceline.reporting.provenance import shortened
from paceline.reporting.sections import LineFigure, Section, Table, Tile, file_name, plain
from paceline.reporting.token_pieces import visible

_MOST_ROWS = 100
_MOST_CURVES = 6


def training_section(given: TrainingInput) -> Section:
    """Say how a run went.

    Args:
        given: its rows and files.
    """
    notes = []
    if given.has_torn_end:
        notes.append("The last line is not whole: the run still goes on, or was stopped while it wrote.")
    num_bad = sum(int(number(row.get("num_bad_steps")) or 0) for row in given.steps)
    if num_bad:
        notes.append(f"{num_bad} steps had a loss or a gradient that was not finite; they updated nothing.")
    sets = _sets(given.evaluations)
    lengths = {name: _curve_in(given.evaluations, name, "acceptance_length") for name in sets}
    return Section(
        title=file_name(given.path.resolve()),
        notes=notes,
        tiles=_tiles(given, lengths),
        lines=_lines(given, sets, lengths),
        tables=_tables(given, sets),
        provenance=_provenance(given),
        figures={
            "num_rows": len(given.steps),
            "num_evaluations": len(given.evaluations),
            "last_step": _last(given),
            "loss": _curve(given.steps, "loss"),
            "acceptance_length": lengths,
            "num_bad_steps": num_bad,
        },
    )


def _tiles(given: TrainingInput, lengths: Mapping[str, Sequence[tuple[float, float]]]) -> list[Tile]:
    tiles = [Tile("steps", f"{_last(given):g}"), Tile("rows of metrics", str(len(given.steps)))]
    loss = _curve(given.steps, "loss")
    if loss:
        tiles.append(Tile("loss", plain(loss[-1][1], 4), f"last row; first {loss[0][1]:.4f}"))
    seconds, tokens = (sum(y for _, y in _curve(given.steps, key)) for key in ("seconds", "num_tokens"))
    if seconds:
        tiles.append(Tile("tokens per second", plain(tokens / seconds, 0), f"{tokens:,.0f} in {seconds:,.0f} s"))
    for name, curve in lengths.items():
        if curve:
            best = max(curve, key=lambda point: point[1])
            means = f"simulated, last evaluation; best {best[1]:.3f} at step {best[0]:g}"
            tiles.append(Tile(f"acceptance length, {visible(name)}", plain(curve[-1][1], 3), means))
    return tiles


def _lines(
    given: TrainingInput, sets: Sequence[str], lengths: Mapping[str, Sequence[tuple[float, float]]]
) -> list[LineFigure]:
    steps = given.steps
    depth = max(
        (len(row["accuracy_by_row"]) for row in steps if isinstance(row.get("accuracy_by_row"), list)), default=0
    )
    picked = sorted({round(index * (depth - 1) / (_MOST_CURVES - 1)) for index in range(_MOST_CURVES)}) if depth else []
    accuracy = [(f"draft {index}", _curve_at(steps, "accuracy_by_row", index)) for index in picked]
    found = [
        LineFigure(
            "Loss", [("loss", _curve(steps, "loss"))], "Mean loss of the steps since the row before.", "step", "loss"
        ),
        LineFigure(
            "Accuracy by draft",
            accuracy,
            "Share of drafts in training that are the token that came, by place in the block.",
            "step",
            "accuracy",
            from_zero=True,
        ),
        LineFigure(
            "Simulated acceptance length",
            [(visible(name), lengths[name]) for name in sets],
            "Acceptance length on held-out conversations, by walks as verification would take them.",
            "step",
            "acceptance length",
            with_dots=True,
        ),
        LineFigure(
            "Gradient norm",
            [("norm", _curve(steps, "gradient_norm"))],
            "Mean norm of the gradient before it is clipped.",
            "step",
            "norm",
            from_zero=True,
        ),
        LineFigure(
            "Learning rate", [("rate", _curve(steps, "rate"))], "As it was set.", "step", "rate", from_zero=True
        ),
        LineFigure(
            "Speed",
            [("tokens per second", _curve(steps, "tokens_per_second"))],
            "Tokens of conversations per second; evaluations and saving are left out.",
            "step",
            "tokens/s",
            from_zero=True,
        ),
    ]
    return [each for each in found if any(points for _, points in each.series)]


def _tables(given: TrainingInput, sets: Sequence[str]) -> list[Table]:
    rows = []
    for row in given.evaluations:
        for name in sets:
            values = row.get(name)
            if isinstance(values, Mapping):
                shares = values.get("per_position")
                shown = [plain(number(share), 3) for share in shares] if isinstance(shares, list) else []
                length = plain(number(values.get("acceptance_length")), 3)
                rows.append([f"{row['step']:g}", visible(name), length, " ".join(shown)])
    if not rows:
        return []
    left_out = f"the last {_MOST_ROWS} of {len(rows)} are listed" if len(rows) > _MOST_ROWS else None
    head = ["step", "set", "acceptance length", "kept at each position"]
    return [Table("Evaluations", head, rows[-_MOST_ROWS:], left_out, first_number=2)]


def _provenance(given: TrainingInput) -> list[tuple[str, list[tuple[str, str]]]]:
    found = []
    commands = given.files.get("command.txt", "").splitlines()
    if commands:
        found.append(
            ("command", [(f"attempt {index}", shortened(line)) for index, line in enumerate(commands, start=1)])
        )
    try:
        versions = json.loads(given.files.get("versions.json", "{}"))
    except ValueError:
        versions = {}
    if isinstance(versions, dict) and versions:
        found.append(("versions", [(shortened(str(name)), shortened(str(value))) for name, value in versions.items()]))
    if "config.toml" in given.files:
        found.append(("config.toml", [("", shortened(given.files["config.toml"], 20_000))]))
    return found


def _sets(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    names = (name for row in evaluations for name, value in row.items() if isinstance(value, Mapping))
    return list(dict.fromkeys(names))


def _curve(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    points = [(float(row["step"]), number(row.get(key))) for row in rows]
    return [(x, y) for x, y in points if y is not None]


def _curve_in(rows: Sequence[Mapping[str, Any]], name: str, key: str) -> list[tuple[float, float]]:
    inner = [{**row[name], "step": row["step"]} for row in rows if isinstance(row.get(name), Mapping)]
    return _curve(inner, key)


def _curve_at(rows: Sequence[Mapping[str, Any]], key: str, index: int) -> list[tuple[float, float]]:
    lists = [(row["step"], row.get(key)) for row in rows]
    points = [
        (float(step), number(values[index]))
        for step, values in lists
        if isinstance(values, list) and index < len(values)
    ]
    return [(x, y) for x, y in points if y is not None]


def _last(given: TrainingInput) -> float:
    return max(float(row["step"]) for row in (*given.steps, *given.evaluations))
