"""Results of `evaluate` and of `bench` as sections. Figures are shown as they stand there; none is made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.reporting.inputs import ResultInput, number
from paceline.reporting.provenance import provenance_rows
from paceline.reporting.sections import BarFigure, LineFigure, Section, Table, Tile, file_name, plain, with_interval
from paceline.reporting.token_pieces import visible

_TABLES = ("rows", "comparisons", "requests", "sets")
_FEW_PROMPTS = 8  # as `paceline bench` warns
_LATENCIES = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL"), ("e2el_ms", "E2EL"))


@dataclass(frozen=True)
class _Bar:
    """A figure of a result, with the interval that stands beside it."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None


def result_section(given: ResultInput) -> Section:
    """Show a result.

    Args:
        given: of `evaluate` or of `bench`.
    """
    return _bench(given) if given.kind == "bench" else _evaluate(given)


def _evaluate(given: ResultInput) -> Section:
    sets = given.values["sets"]
    lengths = [
        _Bar(
            _text(each.get("set")),
            number(each.get("acceptance_length")),
            number(each.get("low")),
            number(each.get("high")),
        )
        for each in sets
    ]
    bars = [
        BarFigure(
            "Acceptance length",
            lengths,
            "Committed tokens per step on each prompt set, with 95 % intervals over prompts.",
            "set",
            "acceptance length",
        )
    ]
    for each in sets:
        for key, title in (
            ("per_position", "Acceptance by position"),
            ("conditional", "Acceptance by position, conditional"),
        ):
            shares = [_Bar(str(place), value) for place, value in enumerate(_numbers(each.get(key)))]
            says = "Share of steps that kept the draft at a position; the result file has no intervals for it."
            bars.append(BarFigure(f"{title}, {_text(each.get('set'))}", shares, says, "position", "share kept", 1.0))
        counts = [_Bar(str(kept), value) for kept, value in enumerate(_numbers(each.get("histogram")))]
        says = "How many steps kept exactly so many drafts."
        bars.append(BarFigure(f"Drafts kept per step, {_text(each.get('set'))}", counts, says, "drafts kept", "steps"))
    rows = [
        [
            _text(each.get("set")),
            plain(number(each.get("num_prompts")), 0),
            plain(number(each.get("num_output_tokens")), 0),
            plain(number(each.get("num_steps")), 0),
            with_interval(number(each.get("acceptance_length")), number(each.get("low")), number(each.get("high"))),
            plain(number(each.get("draft_acceptance_rate")), 3),
            plain(number(each.get("temperature")), 2),
        ]
        for each in sets
    ]
    head = ["set", "prompts", "tokens", "steps", "acceptance length", "draft acceptance rate", "temperature"]
    return Section(
        title=file_name(given.path),
        notes=[
            "A result of `evaluate` has figures and no steps: for text, maps and times give its trace (--trace-file)."
        ],
        tiles=[Tile("target", _text(given.values.get("target"))), Tile("drafter", _text(given.values.get("drafter")))],
        bars=bars,
        tables=[Table("Sets", head, rows)],
        provenance=[("run", _about(given.values))],
        figures={"sets": sets},
    )


def _bench(given: ResultInput) -> Section:
    values, rows = given.values, given.values["rows"]
    notes = []
    if values.get("status") != "done":
        notes.append(f"The measurement has the status {_text(values.get('status'))}: {_text(values.get('error'))}")
    failed = sum(int(number(row.get("num_failed")) or 0) for row in rows)
    if failed:
        notes.append(f"{failed} requests failed; latencies are of the others.")
    units = [each for row in rows for each in [_inner(row, "speed_up", "num_units")] if each is not None]
    if units and min(units) < _FEW_PROMPTS:
        notes.append(f"An interval over {min(units):g} prompts says little; take {_FEW_PROMPTS} or more.")
    return Section(
        title=file_name(given.path),
        notes=notes,
        tiles=[
            Tile("set-ups", str(len({_text(row.get("setup")) for row in rows}))),
            Tile("base", _text(values.get("base")), "what ratios are held against"),
            Tile("requests", str(len(values["requests"]))),
        ],
        bars=_bench_bars(rows),
        lines=_bench_lines(rows),
        tables=[
            _rate_table(rows),
            _latency_table(rows),
            _drafting_table(rows),
            _comparison_table(values["comparisons"]),
        ],
        provenance=[("run", _about(values))],
        figures={"rows": rows, "comparisons": values["comparisons"]},
    )


def _bench_bars(rows: Sequence[Mapping[str, Any]]) -> list[BarFigure]:
    speed_ups = [
        _Bar(_load_name(row), *_interval(row.get("decode_speed_up")))
        for row in rows
        if row.get("decode_speed_up") is not None
    ]
    lengths = [
        _Bar(_load_name(row), number(row["drafting"].get("acceptance_length")))
        for row in rows
        if isinstance(row.get("drafting"), Mapping)
    ]
    says = "Median over prompts of how much faster an answer decodes than with the base, with 95 % intervals."
    return [
        BarFigure("Speed-up of decoding", speed_ups, says, "set-up and load", "times the base"),
        BarFigure("Acceptance length", lengths, "Committed tokens per step.", "set-up and load", "acceptance length"),
    ]


def _bench_lines(rows: Sequence[Mapping[str, Any]]) -> list[LineFigure]:
    setups = list(dict.fromkeys(_text(row.get("setup")) for row in rows))

    def by_concurrency(read: Any) -> list[tuple[str, list[tuple[float, float]]]]:
        found = []
        for setup in setups:
            of_setup = [row for row in rows if _text(row.get("setup")) == setup]
            points = [(number(row.get("concurrency")), read(row)) for row in of_setup]
            found.append((setup, sorted((x, y) for x, y in points if x is not None and y is not None)))
        return found

    return [
        LineFigure(
            "Throughput by concurrency",
            by_concurrency(lambda row: number(row.get("output_tokens_per_second"))),
            "Output tokens per second of all requests together.",
            "requests at once",
            "tokens/s",
            with_dots=True,
            from_zero=True,
        ),
        LineFigure(
            "Speed-up by concurrency",
            by_concurrency(lambda row: _interval(row.get("speed_up"))[0]),
            "Median over prompts of an answer's speed over the base's, prompt pass included.",
            "requests at once",
            "times the base",
            levels=[("base", 1.0)],
            with_dots=True,
            from_zero=True,
        ),
        LineFigure(
            "Throughput against latency",
            [
                (
                    setup,
                    sorted(
                        (x, y)
                        for row in rows
                        if _text(row.get("setup")) == setup
                        for x in [_inner(row, "tpot_ms", "median")]
                        for y in [number(row.get("output_tokens_per_second"))]
                        if x is not None and y is not None
                    ),
                )
                for setup in setups
            ],
            "Output tokens per second over the median time per output token: up and to the left is better.",
            "TPOT, ms",
            "tokens/s",
            with_dots=True,
            from_zero=True,
        ),
    ]


def _rate_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = [
        [
            _load_name(row),
            plain(number(row.get("num_requests")), 0),
            plain(number(row.get("num_failed")), 0),
            plain(number(row.get("requests_per_second")), 3),
            plain(number(row.get("output_tokens_per_second")), 1),
            plain(number(row.get("goodput_requests_per_second")), 3),
            with_interval(*_interval(row.get("speed_up")), 2),
            with_interval(*_interval(row.get("decode_speed_up")), 2),
            _share(row.get("num_identical"), row.get("num_compared")),
        ]
        for row in rows
    ]
    head = [
        "set-up",
        "requests",
        "failed",
        "requests/s",
        "tokens/s",
        "good/s",
        "speed-up",
        "of decoding",
        "same answers",
    ]
    return Table("Throughput", head, shown)


def _latency_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    tables = [row[name] for row in rows for name, _ in _LATENCIES if isinstance(row.get(name), Mapping)]
    percentiles = [str(key) for table in tables for key in table if str(key).startswith("p")]
    parts = ["mean", "median", *dict.fromkeys(percentiles)]
    titles = [f"{title} {part}" for _, title in _LATENCIES for part in parts]
    shown = []
    for row in rows:
        cells = [plain(_inner(row, name, part), 2) for name, _ in _LATENCIES for part in parts]
        cells += [plain(_inner(row, "e2el_ms", "num_values"), 0), plain(number(row.get("tokens_per_delta")), 2)]
        shown.append([_load_name(row), *cells])
    return Table("Latency, ms", ["set-up", *titles, "answers", "tokens per delta"], shown)


def _drafting_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = []
    for row in rows:
        drafting = row.get("drafting")
        if not isinstance(drafting, Mapping):
            continue
        names = ("num_steps", "acceptance_length", "draft_acceptance_rate")
        steps, length, rate = (number(drafting.get(name)) for name in names)
        shares = " ".join(plain(share, 3) for share in _numbers(drafting.get("per_position")))
        shown.append([_load_name(row), plain(steps, 0), plain(length, 3), plain(rate, 3), shares])
    head = ["set-up", "steps", "acceptance length", "draft acceptance rate", "kept at each position"]
    return Table("Drafting", head, shown)


def _comparison_table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    shown = [
        [
            f"{_text(each.get('setup'))} / {_text(each.get('base'))}{_load(each)}",
            with_interval(*_interval(each.get("speed_up")), 2),
            with_interval(*_interval(each.get("decode_speed_up")), 2),
            plain(_inner(each, "speed_up", "num_units"), 0),
            plain(number(each.get("total_ratio")), 3),
            _share(each.get("num_identical"), each.get("num_compared")),
        ]
        for each in comparisons
    ]
    head = ["pair", "speed-up (95 %)", "of decoding (95 %)", "prompts", "ratio of totals", "same answers"]
    return Table("Paired comparisons", head, shown)


def _about(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (visible(name), visible(value))
        for name, value in provenance_rows({key: value for key, value in values.items() if key not in _TABLES})
    ]


def _load_name(row: Mapping[str, Any]) -> str:
    return _text(row.get("setup")) + _load(row)


def _load(row: Mapping[str, Any]) -> str:
    concurrency, rate = number(row.get("concurrency")), number(row.get("request_rate"))
    parts = [] if concurrency is None else [f"{concurrency:g} at once"]
    parts += [] if rate is None else [f"{rate:g}/s"]
    return f", {', '.join(parts)}" if parts else ""


def _interval(value: object) -> tuple[float | None, float | None, float | None]:
    if not isinstance(value, Mapping):
        return None, None, None
    return number(value.get("estimate")), number(value.get("low")), number(value.get("high"))


def _inner(row: Mapping[str, Any], name: str, part: str) -> float | None:
    inner = row.get(name)
    return number(inner.get(part)) if isinstance(inner, Mapping) else None


def _numbers(values: object) -> list[float | None]:
    return [number(value) for value in values] if isinstance(values, list) else []


def _share(part: object, of: object) -> str:
    first, second = number(part), number(of)
    return "-" if first is None or second is None else f"{first:g} of {second:g}"


def _text(value: object) -> str:
    return "-" if value is None else visible(str(value))
