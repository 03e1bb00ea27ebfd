"""Every error that paceline raises on purpose.

PacelineError
├── ConfigError           a setting, flag or file of settings is wrong            exit 2, HTTP 400
├── RequestError          a generation request asks for something impossible      exit 2, HTTP 400
├── DataError             prompts or training data cannot be read or used         exit 1, HTTP 400
├── CheckpointError       a model folder or file is missing, damaged or unknown   exit 1, HTTP 500
├── CompatibilityError    two sound parts do not fit each other                   exit 1, HTTP 400
├── ShapeError            a tensor does not have the promised shape               exit 1, HTTP 500
├── CapacityError         disk or memory is full                                  exit 1, HTTP 429
│   └── QueueFullError    as many requests wait as may wait; later it may fit     exit 1, HTTP 429
├── NumericError          NaN or infinity where a number was needed               exit 1, HTTP 500
├── OfflineError          something would have to be downloaded                   exit 1, HTTP 503
├── ServerError           a server that is measured is out of reach or refuses    exit 1, HTTP 502
├── EngineClosedError     an engine was asked for something after its end         exit 1, HTTP 503
│   └── EngineDeadError   its steps kept failing; the cause is chained            exit 1, HTTP 503
├── MissingExtraError     an optional dependency is not installed                 exit 1, HTTP 500
└── CheckFailedError      a check ran and says no                                 exit 3, HTTP 500
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CHECK_SAYS_NO = 3
EXIT_INTERRUPTED = 130


def shown(value: object) -> str:
    """A caller's value as a message shows it: at most 200 characters, and never an error of its own."""
    try:
        text = repr(value)
    except Exception as error:  # an integer of thousands of digits, or anything else that cannot show itself
        return f"a value of type {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= 200 else text[:190] + " and so on"


class PacelineError(Exception):
    """A mistake that its reader can mend: what disagrees, where it came from, what to try.

    Args:
        message: what disagrees, with both values.
        origin: where the values came from, label to place (`{"drafter": "runs/a/config.json"}`).
        hint: what to try next.
    """

    exit_code: int = EXIT_FAILED
    http_status: int = 500

    def __init__(self, message: str, *, origin: Mapping[str, object] | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.origin = {label: str(place) for label, place in (origin or {}).items()}
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.origin:
            lines.append("  " + "   ".join(f"{label}: {place}" for label, place in self.origin.items()))
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)


class ConfigError(PacelineError):
    """A setting is unknown, malformed or contradicts another."""

    exit_code = EXIT_USAGE
    http_status = 400


class RequestError(PacelineError):
    """A request cannot be served as asked (sampling values, prompt length, budget)."""

    exit_code = EXIT_USAGE
    http_status = 400


class DataError(PacelineError):
    """Prompts or training data are missing, unreadable or unusable."""

    http_status = 400


class CheckpointError(PacelineError):
    """A model folder or file is missing, damaged, incomplete or of an unknown kind."""


class CompatibilityError(PacelineError):
    """Two sound parts do not fit each other, such as a drafter and another model's target."""

    http_status = 400


class ShapeError(PacelineError):
    """A tensor does not have the shape that its name promises."""

    def __init__(
        self,
        name: str,
        *,
        expected: str | Sequence[int],
        found: Sequence[int],
        origin: Mapping[str, object] | None = None,
        hint: str | None = None,
    ) -> None:
        wanted = expected if isinstance(expected, str) else str(list(expected))
        super().__init__(f"{name} has shape {list(found)}, expected {wanted}", origin=origin, hint=hint)


class CapacityError(PacelineError):
    """Disk, memory, context length or a queue is exhausted."""

    http_status = 429


class QueueFullError(CapacityError):
    """As many requests wait already as the settings allow; nothing is wrong with this one."""


class NumericError(PacelineError):
    """A NaN or an infinity appeared where a finite number was needed."""


class OfflineError(PacelineError):
    """Going on would need the network, which is off or out of reach."""

    http_status = 503


class ServerError(PacelineError):
    """Another server, which this program asks as a client, cannot be reached, refuses, or does not keep to the API."""

    http_status = 502


class EngineClosedError(PacelineError):
    """An engine that was closed, and has no caches any more, was asked to go on."""

    http_status = 503


class EngineDeadError(EngineClosedError):
    """An engine ended because it kept failing; what it failed of is chained."""


class EngineFaultError(PacelineError):
    """The engine found itself wrong: what a device holds is not what the host knows. The step's requests end."""


class MissingExtraError(PacelineError):
    """An optional dependency is not installed; the hint names the extra that brings it."""


class CheckFailedError(PacelineError):
    """A check ran to its end and its answer is no."""

    exit_code = EXIT_CHECK_SAYS_NO
