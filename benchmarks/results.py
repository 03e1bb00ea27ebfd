"""Result files: one JSON object per measurement, with what is needed to judge and repeat it.

`{"name", "command", "commit", "date", "machine", "versions", "lossless", "rows"}`. Nothing in it names a host or a
folder outside the repository: absolute paths in the command are cut to their last part.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("paceline", "torch", "triton", "transformers", "numpy")

Row = Mapping[str, object]

_CPU_INFO = Path("/proc/cpuinfo")
_MATRIX_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # best first; the first one found is told
_NUM_DIGITS = 5
# What is rendered from results, or only describes, changes no measurement; a result written before is among it.
_NOT_MEASURED = (":(exclude)docs", ":(exclude)*.md")


def make_result(name: str, rows: Sequence[Row], *, machine: str, arguments: Sequence[str]) -> dict[str, object]:
    """The result of a benchmark that has just run.

    Args:
        name: of the result, which is also its file's.
        rows: plain values; floats are rounded to five digits.
        machine: from `describe_machine`.
        arguments: of the command, as in `sys.argv[1:]`.
    """
    # Not above: it imports Triton, before which scripts may still have to say that it shall interpret.
    from paceline.ops.acceptance import VERIFY_METHODS, is_lossless

    return {
        "name": name,
        "command": command_text(Path(sys.argv[0]).stem, arguments),
        "commit": describe_commit(),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": machine,
        "versions": versions(),
        "lossless": all(map(is_lossless, VERIFY_METHODS)),  # of whatever method an engine may have used
        "rows": [rounded(row) for row in rows],
    }


def rounded(row: Row) -> dict[str, object]:
    """A row as it is written: floats to five digits, none that JSON does not know."""
    return {key: _rounded(value) for key, value in row.items()}


def write_result(folder: Path, result: Mapping[str, object]) -> Path:
    """Write `folder/NAME.json`, in full or not at all, and return its path."""
    from paceline.checkpoint.weights import write_text_atomic

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['name']}.json"
    write_text_atomic(path, json.dumps(result, ensure_ascii=False, indent=2, allow_nan=False) + "\n")
    return path


def command_text(module: str, arguments: Sequence[str]) -> str:
    """The command as anybody may type it, without folders of this machine."""
    return shlex.join(["python", "-m", f"benchmarks.{module}", *map(scrub_argument, arguments)])


def scrub_argument(argument: str) -> str:
    """Cut a path that leads out of the repository, alone or after the last `=`, to its last part."""
    head, separator, tail = argument.rpartition("=")
    is_of_this_machine = PurePosixPath(tail).is_absolute() or tail.startswith(("~", ".."))
    return head + separator + (PurePosixPath(tail).name if is_of_this_machine else tail)


def describe_commit(root: Path = ROOT) -> str:
    """Short id of the checked-out commit; `-dirty` if anything but documentation differs from it.

    An archive of `git archive` has no history; it knows its commit from a file that git fills in (`export-subst`).
    """
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        archived = root / "benchmarks" / "commit.txt"
        text = archived.read_text(encoding="utf-8").strip() if archived.exists() else "$"
        return "unknown" if text.startswith("$") else text[:12]
    changes = _git(root, "status", "--porcelain", "--", ".", *_NOT_MEASURED)
    return commit if changes == "" else f"{commit}-dirty"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def describe_machine(*facts: str, device: str = "cpu", cpu_info: Path = _CPU_INFO) -> str:
    """Processor, cores and bf16 instructions, the GPU if one was used, then `facts`; never a host's name."""
    fields: dict[str, str] = {}
    for line in cpu_info.read_text(encoding="utf-8").splitlines() if cpu_info.is_file() else ():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())  # the first processor's entry
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [fields.get("model name") or platform.machine(), f"{cores} cores"]
    flags = fields.get("flags", "").split()
    parts += [flag for flag in _MATRIX_FLAGS if flag in flags][:1]
    if device.startswith("cuda"):
        import torch

        parts.append(torch.cuda.get_device_name(device))
    return ", ".join([*parts, *facts])


def versions() -> dict[str, str]:
    """Python and the packages that decide a measurement."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            import paceline

            found[package] = paceline.__version__ if package == "paceline" else "not installed"
    return found


def text_table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Aligned columns for a terminal: all keys of the rows, or the chosen ones."""
    keys = columns if columns is not None else list(dict.fromkeys(key for row in rows for key in row))
    cells = [list(keys), *([_cell(row.get(key)) for key in keys] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(keys))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value)) or "none"
    return str(value)


def _rounded(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{_NUM_DIGITS}g}") if math.isfinite(value) else None
    return value
