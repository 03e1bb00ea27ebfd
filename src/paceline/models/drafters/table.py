"""Drafter family to class; adding a row is the whole registration."""

from __future__ import annotations

from paceline.checkpoint.contract import DrafterFamily
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.models.drafters.dspark import DSparkDrafter

BLOCK_DRAFTERS: dict[DrafterFamily, type[BlockDrafter]] = {
    "dflash": DFlashDrafter,
    "dspark": DSparkDrafter,
}
