"""`paceline doctor`: a report to paste into a question: versions, processor, threads, variables, cache folders."""

from __future__ import annotations

import typer

from paceline.cli import options
from paceline.cli.facts import machine_facts as _machine
from paceline.cli.facts import package_versions as _versions


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
