"""Whether an engine checks itself: asked once, when it is set up, and never inside a step."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.configuration.environment import read_environment


def checks_are_asked_for(variables: Mapping[str, str] | None = None) -> bool:
    """Whether `PACELINE_DEBUG` asks for the checks of `InvariantChecks`, which cost far more than a step.

    Args:
        variables: what to read instead of the process environment, for tests.

    Raises:
        ConfigError: its value is neither on (1) nor off (0).
    """
    return read_environment(variables).debug
