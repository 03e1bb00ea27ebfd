"""Models that all tests of ranks share, and a rank that is alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.distributed.spread import CPU, decode, write_models

from paceline.distributed.world import World


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("spread"))


@pytest.fixture(scope="session")
def plain(models: Path) -> dict[str, Any]:
    """What one process writes without drafts, by dtype."""
    alone = World(0, 1, CPU)
    return {dtype: decode(alone, models, {"dtype": dtype}) for dtype in ("float32", "bfloat16")}
