"""Renders docs/results/*.json into docs/results/README.md and the pages that show them: no figure is typed by hand.

    python -m benchmarks.render_results            write
    python -m benchmarks.render_results --check    exit 1 if a page does not agree with the files

A result file has `name`, `command`, `commit`, `date`, `machine`, `versions` and `rows`. In README.md and docs/*.md,
what is between `<!-- results: NAME -->` and `<!-- end -->` is replaced by the table of that file. It has some of the
columns after `<!-- results: NAME: COLUMN COLUMN ... -->`, and some of the rows after `<!-- results: NAME: COLUMN ...
where COLUMN=VALUE,VALUE COLUMN=VALUE -->`, all on one line; values are written as the table shows them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("name", "command", "commit", "date", "machine", "versions", "rows")
_SLOT = re.compile(
    r"(<!-- results: (?P<name>[\w-]+)(?:: (?P<columns>[\w ]+?)(?: where (?P<rows>[\w=,. -]+?))?)? -->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """All result files of a folder by name; a file that lacks a key ends the program with its path."""
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in KEYS if key not in result]
        if missing or result["name"] != path.stem:
            problem = f"lacks {', '.join(missing)}" if missing else f"calls itself {result['name']}"
            raise SystemExit(f"{path}: {problem}")
        results[path.stem] = result
    return results


def table(rows: list[Mapping[str, object]], chosen: Sequence[str] | None = None) -> str:
    """A Markdown table with the chosen columns, or the union of the rows' keys."""
    columns = list(chosen or dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value).replace("|", "\\|")


def results_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of docs/results/README.md."""
    parts = ["# Results\n\nWritten by `make results` from the files beside this page; change those, not this.\n"]
    for name, result in results.items():
        versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
        parts.append(
            f"\n## {name}\n\n`{result['command']}` at `{result['commit']}` on {result['date']}; {result['machine']}; "
            f"{versions}\n\n{table(result['rows'])}"
        )
    return "".join(parts)


def fill(text: str, results: Mapping[str, Mapping[str, Any]], page: str = "README.md") -> str:
    """Put the tables into the slots of a page; a slot without its file, column or rows ends the program."""

    def one(slot: re.Match[str]) -> str:
        name = slot["name"]
        if name not in results:
            raise SystemExit(f"{page} shows results of {name}, but docs/results/{name}.json does not exist")
        rows, chosen = results[name]["rows"], (slot["columns"] or "").split()
        wanted = dict(condition.split("=", 1) for condition in (slot["rows"] or "").split())
        missing = [column for column in (*chosen, *wanted) if not any(column in row for row in rows)]
        if missing:
            raise SystemExit(f"{page} shows columns of {name} that it does not have: {', '.join(missing)}")
        for column, values in wanted.items():
            rows = [row for row in rows if _cell(row.get(column)) in values.split(",")]
        if not rows:
            raise SystemExit(f"{page} shows rows of {name} that it does not have: {slot['rows']}")
        return f"{slot[1]}{table(rows, chosen)}{slot['end']}"

    return _SLOT.sub(one, text)


def main(root: Path = ROOT, *, check: bool = False) -> int:
    """Write the pages, or with `check` say whether they are up to date."""
    folder = root / "docs" / "results"
    results = read_results(folder)
    wanted = {folder / "README.md": results_page(results)} if results else {}
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        if page.exists():
            wanted[page] = fill(page.read_text(encoding="utf-8"), results, str(page.relative_to(root)))
    stale = [page for page, text in wanted.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
    for page in stale:
        if check:
            print(f"{page.relative_to(root)} does not agree with docs/results/*.json; run `make results`")
        else:
            page.write_text(wanted[page], encoding="utf-8")
            print(f"wrote {page.relative_to(root)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
