"""One thread, fixed seeds and no settings from outside for every test, whatever order they run in."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.interpreter import hasten

# Set before torch is imported: thread pools are sized once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Set before Triton is imported, which decides once: without a GPU it interprets kernels instead of compiling them.
# A machine with one can do either; `TRITON_INTERPRET=1 pytest` interprets there too.
HAS_GPU = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Times vary with the machine, and a red build must be reproducible from its log alone.
settings.register_profile(
    "paceline", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=50
)
settings.load_profile("paceline")


# Tensors of megabytes, which the statistics are made of, lie in memory that was used before: with the limits that glibc
# starts with, each is new pages that the kernel has to clear, a tenth of the time of such a test.
if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that it takes
    ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 2**28)


def _sync_without_waiting(descriptor: int) -> None:
    """A descriptor that is not open is refused, as ever."""
    os.fstat(descriptor)


# Files of tests need not outlast a power cut; whoever comes after a process that was killed finds what it wrote all the
# same. Tests of a flush that fails put in their own.
os.fsync = _sync_without_waiting  # type: ignore[assignment]

LONG = {"integration", "distributed", "test_dispatch.py", "test_fan_out.py"}  # folders and files with tests of 10 s


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests begin, in the order drawn for them: one at the end would keep a single worker busy."""
    items.sort(key=lambda item: LONG.isdisjoint(item.path.parts))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end, some 700,000 objects that no collection of garbage has to walk again."""
    if "torch" in sys.modules:
        from tests.unwritten_memory import spoil

        spoil()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> None:
    """Tests that never load torch do not pay for it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        # Without a GPU, torch.manual_seed keeps the text of its caller's whole stack for the day that one appears.
        (torch.manual_seed if HAS_GPU else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def _hastened_interpreter() -> None:
    hasten()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own variables must not change a result."""
    for name in [name for name in os.environ if name.startswith("PACELINE_") or name == "NO_COLOR"]:
        monkeypatch.delenv(name)
