"""`paceline report`: what it takes, what it writes, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.cli.test_main import run
from tests.unit.reporting.pages import Page
from tests.unit.reporting.traces import answer, two_answers, write


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "a.jsonl", two_answers())


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write(tmp_path / "b.jsonl", [answer("b", [([1, 9], 1, 2)]), answer("a", [([1, 2, 3], 1, 2)])])


def test_a_trace_on_stdout(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(trace), "--no-color"]) == 0
    captured = capsys.readouterr()
    assert "acceptance length      2.500 (2.333 to 3.000)" in captured.out
    assert "(The)|[ cat][ sat][ on]( 12)" in captured.out
    assert "\x1b" not in captured.out and captured.err == ""


def test_figures_as_json(trace: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(trace), str(other), "--json"]) == 0
    pair, first, second = json.loads(capsys.readouterr().out)["sections"]
    assert pair["title"] == "a.jsonl against b.jsonl"
    assert pair["figures"]["quotient"]["estimate"] == pytest.approx(2.0 / 2.5)
    assert pair["figures"]["num_pairs"] == 2
    assert first["figures"]["summary"]["acceptance_length"] == 2.5
    assert [rate["value"] for rate in second["figures"]["per_position"]] == [1.0, 0.0, 0.0]


def test_a_page(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert run(["report", str(trace), "--html", str(page), "--prompt", "b"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"{page}: ")
    found = Page(page.read_text(encoding="utf-8"))
    assert found.faults == [] and len(found.all("article")) == 1
    assert run(["report", str(trace), "--html", str(page), "-q"]) == 0, "a report is replaced"
    assert capsys.readouterr().err == ""
    assert len(Page(page.read_text(encoding="utf-8")).all("article")) == 2
    assert run(["report", str(trace), "--html", str(page), "--json", "-q"]) == 0, "both at once"
    assert json.loads(capsys.readouterr().out)


def test_a_run_and_a_result_beside_a_trace(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    rows = [{"kind": "train", "step": step, "loss": 3.0 / step} for step in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"drafter": "d", "target": "t", "sets": [{"set": "s", "acceptance_length": 2.5}]}))
    assert run(["report", str(folder), str(result), str(trace), "--json"]) == 0
    sections = json.loads(capsys.readouterr().out)["sections"]
    assert [section["title"] for section in sections] == ["run", "result.json", "a.jsonl"]
    assert sections[0]["figures"]["loss"] == [[1.0, 3.0], [2.0, 1.5], [3.0, 1.0]]


def test_plain_answers_of_another_file_give_the_break_even(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write(tmp_path / "plain.jsonl", [answer("a", [([], 0, 1)] * 3, method="plain", step_ms=5.0)])
    assert run(["report", str(trace), str(plain), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["sections"]
    assert first["figures"]["times"]["break_even"] == pytest.approx(2.0)
    assert second["figures"] is None and "no acceptance to show" in second["notes"][0]


@pytest.mark.parametrize(
    ("extra", "code", "part"),
    [
        (["nothing.jsonl"], 1, "does not exist"),
        (["--prompt", "z"], 2, "no trace has an answer to the prompt 'z'"),
        (["--html", "no/such/report.html"], 2, "folder of the page does not exist"),
        (["--max-prompts", "-1"], 2, "max-prompts"),
        (["--first-refusal", "x"], 2, "first-refusal"),
    ],
)
def test_mistakes_are_one_error(
    trace: Path, extra: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(trace), *extra]) == code
    captured = capsys.readouterr()
    assert part in captured.err and captured.out == "" and "Traceback" not in captured.err


def test_what_it_is_made_of_is_never_replaced(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = trace.read_bytes()
    (tmp_path / "link.html").symlink_to(trace)
    for name in (str(trace), str(tmp_path / "link.html")):
        assert run(["report", str(trace), "--html", name, "--force"]) == 2
        assert "would replace what it is made of" in capsys.readouterr().err
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert run(["report", str(trace), "--html", str(notes)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (notes.read_text(), trace.read_bytes()) == ("mine", before)
    assert run(["report", str(trace), "--html", str(notes), "--force", "-q"]) == 0
    assert notes.read_text().startswith("<!doctype html>")


def test_three_set_ups_are_too_many(trace: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(trace), str(other), str(trace)]) == 2
    assert "two are compared at a time" in capsys.readouterr().err


def test_a_damaged_trace_leaves_no_page(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.write_text(trace.read_text()[:-30])
    assert run(["report", str(trace), "--html", str(tmp_path / "report.html")]) == 1
    assert ":3 is not JSON" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_report_needs_no_torch(trace: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from paceline.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
    )
    words = [sys.executable, "-c", program, "report", str(trace), "--html", str(tmp_path / "r.html"), "-q"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "False", "False"]
