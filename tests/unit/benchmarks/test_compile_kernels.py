"""Every kernel of the sanitizer's cases compiles, in both dtypes and with early launches: no GPU is needed to ask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE
from paceline.ops.dispatch import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
ROOT = Path(__file__).parents[3]
REFUSED = """
import sys
from benchmarks import compile_kernels
from paceline.ops import gated_rms_norm
from paceline.ops.dispatch import tl, triton

def returns_in_a_loop(x_ptr, gate_ptr, y_ptr, size, BLOCK: tl.constexpr):
    for _ in range(size):
        return

gated_rms_norm._gate_kernel = triton.jit(returns_in_a_loop)
sys.exit(compile_kernels.main(["--only", "gate_by_sigmoid"]))
"""


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: this one's Triton interprets."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TRITON_CACHE_DIR": str(folder)}
    return subprocess.run([sys.executable, *arguments], env=variables, cwd=ROOT, capture_output=True, text=True)


def test_some_kernels_compile_and_say_what_they_take(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-m", "benchmarks.compile_kernels", "--only", "add_norm, sum", "--dependent-launch")
    assert done.returncode == EXIT_DONE, done.stdout + done.stderr
    assert "2 variants, 0 do not compile" in done.stderr and "USE_PDL=True" in done.stdout
    assert "registers" in done.stdout.splitlines()[0]


def test_what_the_compiler_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "script").mkdir()
    script = tmp_path / "script" / "refused.py"
    script.write_text(REFUSED)
    done = run_python(tmp_path, str(script))
    assert done.returncode == EXIT_CHECK_SAYS_NO, done.stdout + done.stderr
    assert "do not compile" in done.stderr and "_gate_kernel" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--dependent-launch"]], ids=["plain", "early"])
def test_every_kernel_compiles(options: list[str], tmp_path: Path) -> None:
    done = run_python(tmp_path, "-m", "benchmarks.compile_kernels", *options)
    assert done.returncode == EXIT_DONE, done.stdout + done.stderr
