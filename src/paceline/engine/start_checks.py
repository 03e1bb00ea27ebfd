"""What an engine must pass before it serves with a drafter: its canary, in words if it does not."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Literal

from paceline.errors import CompatibilityError

if TYPE_CHECKING:
    from paceline.engine.canary_report import CanaryReport
    from paceline.engine.settings import EngineSettings
    from paceline.models.loading import LoadedDrafter, LoadedTarget

CanaryMode = Literal["start", "off"]
CANARY_MODES: tuple[CanaryMode, ...] = ("start", "off")

_log = logging.getLogger(__name__)


def check_at_start(target: LoadedTarget, drafter: LoadedDrafter, settings: EngineSettings) -> CanaryReport:
    """Run the canary on small engines of these parts.

    Args:
        target: as it will serve.
        drafter: as it will serve.
        settings: of the engine that is about to be made.
    Returns:
        What the canary saw.
    Raises:
        CompatibilityError: something was refused, or served drafts are not those of the drafter; names what.
    """
    from paceline.engine.canary import run_canary  # it makes engines, and an engine may ask for this

    started_s = time.perf_counter()
    report = run_canary(target, drafter, settings)
    require_sound(report)
    _log.info("the canary passed in %.1f s: %s", time.perf_counter() - started_s, report.summary())
    return report


def require_sound(report: CanaryReport) -> None:
    """Refuse to serve what the canary found a fault in.

    Raises:
        CompatibilityError: names what was refused.
    """
    if not report.has_passed:
        raise CompatibilityError(
            f"the canary found a fault, so nothing is served: {'; '.join(report.faults())}",
            origin=report.origin,
            hint="`paceline check` for the pair; canary 'off' serves all the same, to study the fault",
        )
