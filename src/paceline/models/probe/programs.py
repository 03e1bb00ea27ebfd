"""Which program cuts which family's draft computation into stages."""

from __future__ import annotations

from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.table import Drafter
from paceline.models.probe.block import BlockProgram
from paceline.models.probe.eagle3 import Eagle3Program
from paceline.models.probe.stages import Program


def program_of(drafter: Drafter) -> Program:
    """The stages of a drafter's family."""
    return BlockProgram(drafter) if isinstance(drafter, BlockDrafter) else Eagle3Program(drafter)
