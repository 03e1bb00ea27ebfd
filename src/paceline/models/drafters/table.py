"""Drafter family to class; adding a row is the whole registration."""

from __future__ import annotations

from paceline.checkpoint.contract import DrafterFamily
from paceline.models.drafters.dflash import DFlashDrafter

DRAFTERS: dict[DrafterFamily, type[DFlashDrafter]] = {"dflash": DFlashDrafter}
