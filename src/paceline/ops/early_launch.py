"""How a kernel begins that may be launched before the one ahead of it has ended (`dispatch.dependent_launch`)."""

from __future__ import annotations

from paceline.ops.dispatch import kernel, tl


@kernel
def wait_for_launch_ahead(USE_PDL: tl.constexpr) -> None:
    """Wait for the launch ahead, then let the one behind begin; nothing where launches follow each other.

    In this order, so that launches behind may read at once what is older than this one. What is constant, such as a
    gain, may be read before the wait.

    Args:
        USE_PDL: whether this launch may have begun early.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
