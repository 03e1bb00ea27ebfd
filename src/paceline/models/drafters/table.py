"""Drafter family to class; adding a row is the whole registration."""

from __future__ import annotations

from paceline.checkpoint.contract import DrafterFamily
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.eagle3 import Eagle3Drafter

BLOCK_DRAFTERS: dict[DrafterFamily, type[BlockDrafter]] = {
    "dflash": DFlashDrafter,
    "dflash2": DFlash2Drafter,
    "dspark": DSparkDrafter,
}

# A drafter of one pass per block, or of one pass per token; the engine has a proposer for each kind.
Drafter = BlockDrafter | Eagle3Drafter
DRAFTERS: dict[DrafterFamily, type[BlockDrafter] | type[Eagle3Drafter]] = {**BLOCK_DRAFTERS, "eagle3": Eagle3Drafter}
