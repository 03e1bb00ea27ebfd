"""The C files of this folder as one library, compiled where they run: once per version of them, kept beside the
caches of other libraries.

Only where torch's products in bf16 leave most of the processor idle: on x86-64 with AVX512-bf16, under Linux, with gcc
at hand, whose OpenMP is the one that torch brings, so that both share their threads. Anywhere else `library` is None.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent
_SOURCES = (
    "products.c",
    "quantized.c",
    "integers.c",
    "rows.c",
    "attention.c",
    "layer.c",
    "context.c",
    "choices.c",
    "steps.c",
    "finite_copy.c",
)
_HEADERS = ("common.h", "layers.h", "products.h")
_INSTRUCTIONS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16")
_FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fopenmp", *(f"-m{name}" for name in _INSTRUCTIONS))
_COMPILE_LIMIT_S = 120
_log = logging.getLogger(__name__)

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_ARGUMENTS = {
    "paceline_product": [
        *(_POINTER, _SIZE, _POINTER, _INT, _POINTER, _POINTER, _FLOAT, _POINTER, _POINTER, _POINTER),
        *(_SIZE, _SIZE, _SIZE, _INT, _INT),
    ],
    "paceline_norm": [_POINTER, _SIZE, _POINTER, _FLOAT, _POINTER, _SIZE, _SIZE, _INT],
    "paceline_turn_heads": [
        *(_POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _FLOAT, _INT),
    ],
    "paceline_turns": [*([_POINTER] * 4), *([_SIZE] * 3)],
    "paceline_convolve": [
        *(_POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _SIZE, _INT),
    ],
    "paceline_top_k": [_POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT],
    "paceline_walk": [
        *(_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
        *(_SIZE, _SIZE, _SIZE, _SIZE, _INT),
    ],
    "paceline_step_rows": [*([_POINTER] * 16), *([_SIZE] * 9)],
    "paceline_block_rows": [*([_POINTER] * 8), *([_SIZE] * 6)],
    "paceline_verify_greedily": [_POINTER, _POINTER, _SIZE, _SIZE, _INT, _POINTER, _SIZE, _SIZE, _SIZE, _INT],
    "paceline_commit_step": [*([_POINTER] * 12), *([_SIZE] * 4)],
    "paceline_store_drafts": [*([_POINTER] * 4), _INT, *([_POINTER] * 5), *([_SIZE] * 6)],
    "paceline_copy_if_finite": [_POINTER, _INT, _POINTER, _INT, _SIZE, _POINTER, _INT],
    "paceline_attend": [_POINTER, _INT],
    "paceline_seen_spans": [_POINTER, _POINTER, _POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _INT],
    "paceline_table_rows": [_POINTER, _POINTER, _POINTER, _POINTER, *([_SIZE] * 5)],
    "paceline_layer": [_POINTER, _POINTER],
    "paceline_layers": [_POINTER, _SIZE, _SIZE, _POINTER],
    "paceline_write_context": [_POINTER, _POINTER],
}
# Those that say whether a number pointed outside of what there is.
_ANSWERING = (
    "paceline_write_context",
    "paceline_turns",
    "paceline_step_rows",
    "paceline_table_rows",
    "paceline_block_rows",
    "paceline_commit_step",
    "paceline_store_drafts",
)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None where this machine cannot build or run it. The first call may take seconds."""
    if not _is_processor_fit():
        return None
    compiler = shutil.which("gcc")
    if compiler is None:
        _log.info("no gcc: products and attention run through torch, which is slower on this processor")
        return None
    try:
        return _load(_built(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        detail = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        _log.warning("the native operations could not be built; torch runs in their place: %s", detail)
        return None


def loaded_library() -> ctypes.CDLL:
    """The library, for whoever asked before whether there is one."""
    loaded = library()
    assert loaded is not None, "the caller asks `rows.can_run`"
    return loaded


def has_amx() -> bool:
    """Whether the processor multiplies tiles of bf16 (AMX), which torch's own products use."""
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return asked is not None and bool(asked())


def permutes_bytes() -> bool:
    """Whether the processor looks bytes up in tables (AVX512-VBMI), as products with codes of 8 bits do."""
    return "avx512_vbmi" in _processor()


def multiplies_bytes() -> bool:
    """Whether the processor multiplies bytes and sums them up in words (AVX512-VNNI)."""
    return "avx512_vnni" in _processor()


@functools.cache
def _processor() -> str:
    """What Linux says of the processors; nothing where it is not asked."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _is_processor_fit() -> bool:
    has_bf16 = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return sys.platform == "linux" and platform.machine() == "x86_64" and has_bf16 is not None and bool(has_bf16())


def _built(compiler: str) -> Path:
    """Path of the library, compiled unless one of the same text lies there."""
    digest = hashlib.sha256(" ".join((compiler, *_FLAGS)).encode())
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_FOLDER / name).read_bytes())
    for folder in (Path.home() / ".cache" / "paceline", Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"):
        path = folder / f"native-{digest.hexdigest()[:24]}.so"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_ours = folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & 0o022
            if is_ours and (path.is_file() or _compile(compiler, path)):
                return path
        except OSError:
            continue  # such as a home that nobody may write to
    raise OSError("no folder of ours to keep the library in")


def _compile(compiler: str, path: Path) -> bool:
    _log.info("compiling the native operations, once")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        sources = [str(_FOLDER / name) for name in _SOURCES]
        command = [compiler, *_FLAGS, *sources, "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
        made.replace(path)  # another process may do the same at the same time: either file will do
    return True


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, _INT if name in _ANSWERING else None
    return loaded
