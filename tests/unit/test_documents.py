"""What documents point at is there: files, folders, and headings of other pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("drafters/*/README.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
ROW = re.compile(r"^(?:\| (?P<first>[^|]+) \|.*|\*\*`(?P<folder>[\w/]+)/`(?P<rest>.*))$")


def headings(page: Path) -> set[str]:
    """As a reader's browser names them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for path, heading in LINK.findall(text):
        aim = (page.parent / path) if path else page
        if not aim.exists() or (heading and heading not in headings(aim)):
            yield f"{path}#{heading}" if heading else path


def missing_files(text: str, root: Path) -> Iterator[str]:
    """Names in the first column of the tables of packages that no file has."""
    folder = root
    for line in text[text.index("## The packages, file by file") : text.index("**Beside the package.**")].splitlines():
        row = ROW.match(line)
        if row is None:
            continue
        if row["folder"]:
            folder = root / row["folder"]
        for name in re.findall(r"`([\w/]+\.py)`", row["first"] or row["rest"]):
            if not (folder / name).is_file() and not (root / name).is_file():
                yield f"{folder.name}/{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page, page.read_text(encoding="utf-8"))) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](LICENSE) [b](LICENSES) [c](README.md#licence) [d](README.md#license) [e](#licence) [f](https://x.org/y)"
    assert list(broken_links(ROOT / "README.md", text)) == ["LICENSES", "README.md#license"]


def test_the_architecture_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "paceline"
    assert list(missing_files(text, package)) == []
    planted = text.replace(
        "**Beside the package.**", "**`engine/`: more.**\n| `step.py`, `steps.py` | |\n**Beside the package.**"
    )
    assert list(missing_files(planted, package)) == ["engine/steps.py"]
