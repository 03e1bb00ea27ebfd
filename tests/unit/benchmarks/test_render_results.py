from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.render_results import ROOT, main

RESULT: dict[str, Any] = {
    "name": "cpu-main",
    "command": "make bench",
    "commit": "abc",
    "date": "2026-11-29",
    "machine": "2 cores",
    "versions": {"torch": "2.13"},
    "rows": [{"mode": "plain", "tokens_per_second": 61.234}, {"mode": "a|b", "ratio": 1.5, "ok": True}],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "cpu-main.json").write_text(json.dumps(RESULT))
    (tmp_path / "README.md").write_text("before\n<!-- results: cpu-main -->\nold\n<!-- end -->\nafter\n")
    return tmp_path


def test_pages_follow_the_files(root: Path) -> None:
    assert main(root, check=True) == 1
    assert main(root) == 0
    readme = (root / "README.md").read_text()
    assert "| plain | 61.2 |  |  |" in readme
    assert "| a\\|b |  | 1.5 | yes |" in readme
    assert readme.startswith("before\n") and readme.endswith("<!-- end -->\nafter\n")
    assert "`make bench` at `abc`" in (root / "docs" / "results" / "README.md").read_text()
    assert main(root, check=True) == 0


def test_a_slot_may_choose_columns(root: Path) -> None:
    readme = root / "README.md"
    readme.write_text("<!-- results: cpu-main: ratio mode -->\n<!-- end -->\n")
    assert main(root) == 0
    text = readme.read_text()
    assert "| ratio | mode |\n" in text and "| 1.5 | a\\|b |" in text and "tokens_per_second" not in text
    assert main(root, check=True) == 0
    readme.write_text("<!-- results: cpu-main: ratios mode -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match="does not have: ratios"):
        main(root)


def test_a_slot_may_choose_rows(root: Path) -> None:
    readme = root / "README.md"
    readme.write_text("<!-- results: cpu-main: mode ratio where ratio=1.5,2 -->\n<!-- end -->\n")
    assert main(root) == 0
    text = readme.read_text()
    assert "| a\\|b | 1.5 |" in text and "plain" not in text
    for condition, message in (("ratio=7", "rows of cpu-main .* ratio=7"), ("ratios=1", "does not have: ratios")):
        readme.write_text(f"<!-- results: cpu-main: mode where {condition} -->\n<!-- end -->\n")
        with pytest.raises(SystemExit, match=message):
            main(root)


def test_pages_of_the_documentation_have_slots_too(root: Path) -> None:
    page = root / "docs" / "measurements.md"
    page.write_text("<!-- results: cpu-main: mode -->\nold\n<!-- end -->\n")
    assert main(root) == 0
    assert "| plain |" in page.read_text()
    page.write_text(page.read_text().replace("plain", "plane"))
    assert main(root, check=True) == 1
    page.write_text("<!-- results: other -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match=r"docs/measurements\.md shows results of other"):
        main(root)


def test_a_figure_changed_by_hand_is_found(root: Path) -> None:
    main(root)
    readme = root / "README.md"
    readme.write_text(readme.read_text().replace("61.2", "99.9"))
    assert main(root, check=True) == 1


def test_files_that_cannot_be_used(root: Path) -> None:
    (root / "docs" / "results" / "other.json").write_text(json.dumps({**RESULT, "name": "else"}))
    with pytest.raises(SystemExit, match="calls itself else"):
        main(root)
    (root / "docs" / "results" / "other.json").write_text(json.dumps({"name": "other"}))
    with pytest.raises(SystemExit, match="lacks command"):
        main(root)


def test_a_slot_without_its_file(root: Path) -> None:
    (root / "docs" / "results" / "cpu-main.json").unlink()
    with pytest.raises(SystemExit, match=r"cpu-main\.json does not exist"):
        main(root)


def test_this_repository_agrees() -> None:
    assert main(ROOT, check=True) == 0
