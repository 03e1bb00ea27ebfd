from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parents[1]


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, paceline; print([name for name in ('torch', 'transformers', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE)}
    )
    assert done.stdout.strip() == "[]"


def test_public_names_exist_and_no_others() -> None:
    assert paceline.__all__ == [
        "Engine",
        "EngineSettings",
        "SamplingParameters",
        "StructuredOutput",
        "__version__",
        "load_drafter",
        "load_target",
    ]
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
        assert name in dir(paceline)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paceline.nothing  # noqa: B018
