"""Drafter folders of every known layout, read into one contract and canonical tensors, and written back.

Each layout has a file of its own; `table.py` tells them apart. Nothing outside this package reads a drafter's config.
"""

from __future__ import annotations

from paceline.checkpoint.dialects.defaults import default_target_layer_ids
from paceline.checkpoint.dialects.files import (
    DrafterFiles,
    is_drafter_folder,
    read_draft_to_target,
    read_drafter,
    read_drafter_contract,
    read_mask_embedding,
)
from paceline.checkpoint.dialects.layer_attention import resolve_layer_attention
from paceline.checkpoint.dialects.table import (
    Dialect,
    contract_from_config,
    detect_dialect,
    file_names,
    is_drafter_config,
    write_drafter_config,
)

__all__ = [
    "Dialect",
    "DrafterFiles",
    "contract_from_config",
    "default_target_layer_ids",
    "detect_dialect",
    "file_names",
    "is_drafter_config",
    "is_drafter_folder",
    "read_draft_to_target",
    "read_drafter",
    "read_drafter_contract",
    "read_mask_embedding",
    "resolve_layer_attention",
    "write_drafter_config",
]
