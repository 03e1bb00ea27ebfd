from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from benchmarks import cpu_main
from benchmarks.cpu_main import Bench, engine_mode, floors, main, make_rows, parse
from benchmarks.paired_speeds import Mode, TimedRun, measure
from tests import tiny

from paceline.engine.request import SamplingParameters

PROMPTS = tuple(map(tuple, tiny.tiny_prompts([5, 9])))


def tiny_bench() -> Bench:
    target, drafter = tiny.loaded()
    sampling = SamplingParameters(max_tokens=6, ignore_eos=True)
    plain, speculative = engine_mode(target, None, sampling), engine_mode(target, drafter, sampling)
    modes: dict[str, Mode] = {
        "plain": plain,
        "speculative": speculative,
        "plain-16-bits": plain,
        "speculative-16-bits": speculative,
        "plain-row-invariant": plain,
        "speculative-row-invariant": speculative,
    }
    return Bench(modes, PROMPTS, target, drafter, 6, wide=(target, drafter))


def test_rows() -> None:
    bench = tiny_bench()
    runs = measure(bench.modes, PROMPTS, num_rounds=2)
    rows = make_rows(runs, floors(bench, runs, 1e9))
    assert [row["mode"] for row in rows] == [
        "plain",
        "speculative",
        "plain-16-bits",
        "speculative-16-bits",
        "plain-row-invariant",
        "speculative-row-invariant",
    ]
    wanted = {"mode", "concurrency", "tokens_per_second", "ratio_to_plain", "num_prompts", "p10", "p90", "floor_share"}
    assert all(wanted <= set(row) for row in rows)
    assert ["acceptance_length" in row for row in rows] == [False, True] * 3
    assert ["ratio_to_own_plain" in row for row in rows] == [False, False, False, True, False, True]
    assert all(row["own_low"] <= row["ratio_to_own_plain"] <= row["own_high"] for row in rows[3::2])  # type: ignore[operator]
    for row in rows:
        share = float(str(row["tokens_per_second"])) / float(str(row["floor_tokens_per_second"]))
        assert row["floor_share"] == pytest.approx(share)


def test_floor_grows_with_what_a_step_yields() -> None:
    bench = tiny_bench()
    runs = measure(bench.modes, PROMPTS, num_rounds=1)
    found = floors(bench, runs, 1e9)
    assert found["plain"] == found["plain-row-invariant"] == 1e9 / cpu_main.plain_step_bytes(bench.target, 10)
    delivered = cpu_main.acceptance(runs["speculative"]).delivered_per_step
    step_bytes = cpu_main.speculative_step_bytes(bench.target, bench.drafter, 10)
    assert found["speculative"] == pytest.approx(delivered * 1e9 / step_bytes)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(cpu_main, "read_bandwidth", lambda: 1e9)
    return ["--quick", "--threads", str(torch.get_num_threads()), "--out", str(tmp_path)]


def test_tables_and_result(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_main, "prepare", lambda _options: tiny_bench())
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.index("plain") < printed.index("speculative") < printed.index("plain-row-invariant")
    assert "speculative equal to plain: 2 of 2" in printed
    result = json.loads((tmp_path / "cpu-main.json").read_text())
    assert len(result["rows"]) == 6 and "reads 1.0 GB/s" in result["machine"]


def test_no_speed_is_reported_of_another_text(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench = tiny_bench()
    honest = bench.modes["speculative-row-invariant"]

    def lossy(prompt: Sequence[int]) -> TimedRun:
        run = honest(prompt)
        return TimedRun((*run.token_ids[:-1], run.token_ids[-1] ^ 1), run.prefill_s, run.decode_s, run.records)

    bench.modes["speculative-row-invariant"] = lossy
    monkeypatch.setattr(cpu_main, "prepare", lambda _options: bench)
    assert main(arguments) == 3
    assert "equal to plain: 0 of 2" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_quick_is_two_prompts() -> None:
    options = parse(["--quick"])
    assert (options.num_prompts, options.rounds, options.max_tokens) == (2, 1, 128)
    assert parse([]).num_prompts == 16
    with pytest.raises(SystemExit, match="2"):
        parse(["--max-tokens", "1"])
