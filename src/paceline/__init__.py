"""Block-drafting speculative decoding: train, check and serve drafters that ride on a target's hidden states.

The names below load what they need on first use; `import paceline` alone loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters
    from paceline.engine.structured import StructuredOutput
    from paceline.models.loading import load_drafter, load_target

__version__ = "0.1.0.dev0"

_HOMES = {
    "Engine": "paceline.engine.engine",
    "EngineSettings": "paceline.engine.engine",
    "SamplingParameters": "paceline.engine.request",
    "StructuredOutput": "paceline.engine.structured",
    "load_drafter": "paceline.models.loading",
    "load_target": "paceline.models.loading",
}

__all__ = [
    "Engine",
    "EngineSettings",
    "SamplingParameters",
    "StructuredOutput",
    "__version__",
    "load_drafter",
    "load_target",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value  # the next access does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
