"""`python -m tests.unit.cli.threads_at_exit ...`: the command line, and which threads are left when it leaves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.cli.main import main

_leave = os._exit


def _tell_and_leave(code: int) -> None:
    names = sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    sys.stderr.write(f"threads at exit: {' '.join(name for name in names if 'gloo' in name) or 'none of gloo'}\n")
    sys.stderr.flush()
    _leave(code)


if __name__ == "__main__":
    os._exit = _tell_and_leave  # type: ignore[assignment]
    main()
