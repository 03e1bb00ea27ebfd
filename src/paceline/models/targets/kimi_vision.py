"""Kimi-K3's vision tower and projector: patches of images or clips to rows as wide as the text model.

    patches    product of each patch with one matrix, plus a learned grid resampled to the image, plus a wave per frame
    blocks     x + wo(attention(wqkv(norm0 x))), x + fc1(gelu(fc0(norm1 x))); all patches of an item see each other
    turning    of the channel pairs of a head, even ones by the column, odd ones by the row
    merging    neighbouring patches side by side, mean over frames, then two products and a norm

Source: config and tensor inventory of Kimi-K3; Kimi-VL (arXiv 2504.07491) for the turning. P patches of all items, D
width, N heads, H head size, E edge of a patch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from paceline.checkpoint.kimi_contract import VisionSettings
from paceline.errors import ShapeError
from paceline.models.layers import Block, Linear, RMSNorm

Grid = tuple[int, int, int]  # frames, rows and columns of patches of one item
_THETA = 10_000.0


class PatchEmbedding(Block):
    """One product per patch, and where the patch lies."""

    def __init__(self, vision: VisionSettings) -> None:
        super().__init__()
        height, width, self.num_frames = vision.grid
        self.proj = nn.Conv2d(3, vision.hidden_size, vision.patch_size, vision.patch_size, bias=vision.has_patch_bias)
        self.grid = nn.Parameter(torch.empty(height, width, vision.hidden_size))

    def forward(self, pixels_P3EE: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Map patches to rows, [P, D]."""
        places = [self._places(grid) for grid in grids]
        rows_PD: Tensor = self.proj(pixels_P3EE).flatten(1)
        return rows_PD + torch.cat(places).to(rows_PD.dtype)

    def _places(self, grid: Grid) -> Tensor:
        num_frames, height, width = grid
        learned_DHW = self.grid.float().permute(2, 0, 1)
        if learned_DHW.shape[1:] != (height, width):
            sized = functional.interpolate(learned_DHW[None], size=(height, width), mode="bilinear")
            learned_DHW = sized[0]
        flat_SD = learned_DHW.flatten(1).t()
        if num_frames == 1:  # an image is no clip of one frame: it gets no wave
            return flat_SD
        if num_frames > self.num_frames:
            raise ShapeError("grid", expected=f"at most {self.num_frames} frames", found=grid)
        frames_FD = frame_waves(num_frames, flat_SD.shape[1], flat_SD.device)
        return (flat_SD.unsqueeze(0) + frames_FD.unsqueeze(1)).flatten(0, 1)


def frame_waves(num_frames: int, size: int, device: torch.device) -> Tensor:
    """Sines, then cosines, of a frame's number at falling frequencies, float32 [frames, size]."""
    rates = _THETA ** (-torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    angles = torch.outer(torch.arange(num_frames, dtype=torch.float32, device=device), rates)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def turning_angles(grids: Sequence[Grid], head_size: int, device: torch.device) -> Tensor:
    """How far each channel pair of each patch is turned, float32 [P, head_size / 2]; every frame of a clip alike."""
    rates = _THETA ** (-torch.arange(0, head_size, 4, dtype=torch.float32, device=device) / head_size)
    angles = []
    for num_frames, height, width in grids:
        place = torch.arange(height * width, device=device).repeat(num_frames)
        column, row = (place % width).float(), (place // width).float()
        angles.append(torch.stack((torch.outer(column, rates), torch.outer(row, rates)), dim=-1).flatten(1))
    return torch.cat(angles)


def turn_pairs(x_PNH: Tensor, angles_PA: Tensor) -> Tensor:
    """Turn neighbouring channels as points of a plane."""
    even, odd = x_PNH.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = angles_PA.cos().unsqueeze(1), angles_PA.sin().unsqueeze(1)
    turned = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    return turned.flatten(-2).to(x_PNH.dtype)


class VisionBlock(Block):
    """Attention within each item, then a two-layer MLP."""

    def __init__(self, vision: VisionSettings) -> None:
        super().__init__()
        width, inner = vision.hidden_size, vision.projection_size
        self.num_heads = vision.num_heads
        self.norm0 = RMSNorm(width, vision.norm_eps)
        self.norm1 = RMSNorm(width, vision.norm_eps)
        self.wqkv = Linear(width, 3 * inner, bias=vision.has_attention_bias)
        self.wo = Linear(inner, width, bias=vision.has_attention_bias)
        self.fc0 = Linear(width, vision.intermediate_size, bias=vision.has_linear_bias)
        self.fc1 = Linear(vision.intermediate_size, width, bias=vision.has_linear_bias)

    def forward(self, x_PD: Tensor, angles_PA: Tensor, lengths: Sequence[int]) -> Tensor:
        """Map rows [P, D] to rows; `lengths` are the patches of each item."""
        q, k, v = self.wqkv(self.norm0(x_PD)).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        q, k = turn_pairs(q, angles_PA), turn_pairs(k, angles_PA)
        items = zip(*(rows.split(list(lengths)) for rows in (q, k, v)), strict=True)
        mixed = [
            functional.scaled_dot_product_attention(*(rows.transpose(0, 1)[None] for rows in item))[0].transpose(0, 1)
            for item in items
        ]
        x_PD = x_PD + self.wo(torch.cat(mixed).flatten(1))
        y_PD: Tensor = self.fc1(functional.gelu(self.fc0(self.norm1(x_PD)), approximate="tanh"))
        return x_PD + y_PD


class VisionTower(nn.Module):
    """Patches of several items to merged rows of each."""

    def __init__(self, vision: VisionSettings) -> None:
        super().__init__()
        self.settings = vision
        self.patch_embed = PatchEmbedding(vision)
        self.blocks = nn.ModuleList(VisionBlock(vision) for _ in range(vision.num_layers))
        self.final_layernorm = RMSNorm(vision.hidden_size, vision.norm_eps)

    def forward(self, pixels_P3EE: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """Run the tower.

        Args:
            pixels_P3EE: patches of all items, row by row, frame by frame.
            grids: frames, rows and columns of patches of each item.
        Returns:
            Per item, [rows * columns / 4, 4 * D] for merges of 2 by 2: frames are averaged.
        Raises:
            ShapeError: the patches are not as many as the grids say, or a grid does not divide into merges.
        """
        lengths = [frames * height * width for frames, height, width in grids]
        if sum(lengths) != pixels_P3EE.shape[0]:
            raise ShapeError("pixels", expected=f"[{sum(lengths)}, 3, edge, edge]", found=pixels_P3EE.shape)
        angles = turning_angles(grids, self.settings.projection_size // self.settings.num_heads, pixels_P3EE.device)
        x_PD = self.patch_embed(pixels_P3EE, grids)
        for block in self.blocks:
            x_PD = block(x_PD, angles, lengths)
        x_PD = self.final_layernorm(x_PD)
        return [self._merge(rows, grid) for rows, grid in zip(x_PD.split(lengths), grids, strict=True)]

    def _merge(self, rows_SD: Tensor, grid: Grid) -> Tensor:
        down, across = self.settings.merge_size
        num_frames, height, width = grid
        if height % down or width % across:
            raise ShapeError("grid", expected=f"multiples of {down} rows and {across} columns", found=grid)
        tiles = rows_SD.view(num_frames, height // down, down, width // across, across, -1)
        return tiles.permute(0, 1, 3, 2, 4, 5).mean(0).flatten(2).flatten(0, 1)


class Projector(Block):
    """Merged rows to the width of the text model."""

    def __init__(self, vision: VisionSettings, text_width: int) -> None:
        super().__init__()
        merged = vision.hidden_size * vision.merge_size[0] * vision.merge_size[1]
        self.linear_1 = Linear(merged, merged)
        self.linear_2 = Linear(merged, text_width)
        self.post_norm = RMSNorm(text_width, vision.projector_eps)

    def forward(self, rows_SM: Tensor) -> Tensor:
        """Map [S, merged width] to [S, text width]."""
        y: Tensor = self.post_norm(self.linear_2(functional.gelu(self.linear_1(rows_SM))))
        return y
