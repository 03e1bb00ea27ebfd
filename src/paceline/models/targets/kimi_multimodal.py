"""Kimi-K3 as published: the text model, and a vision tower whose rows take the place of placeholder tokens.

Everything that a drafter or the engine asks of a target, the text model answers; taps of the wrapper are taps of the
text model. B requests, T rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.errors import RequestError
from paceline.models.layers import Attend, Linear, RMSNorm
from paceline.models.taps import TapCollector
from paceline.models.targets.kimi import KimiTarget
from paceline.models.targets.kimi_vision import Grid, Projector, VisionTower


class KimiMultimodalTarget(nn.Module):
    """A Kimi target whose prompts may hold images and clips.

    Args:
        contract: with `kimi.vision` set.
    """

    supports_eagle3: ClassVar[bool] = True
    aux_hidden_streams: frozenset[AuxHiddenStream] = KimiTarget.aux_hidden_streams

    def __init__(self, contract: TargetContract) -> None:
        super().__init__()
        assert contract.kimi is not None and contract.kimi.vision is not None, "the table chooses by architecture"
        vision = contract.kimi.vision
        self.contract = contract
        self.language_model = KimiTarget(contract)
        self.vision_tower = VisionTower(vision)
        self.mm_projector = Projector(vision, contract.hidden_size)
        self.aux_hidden_streams = contract.aux_hidden_streams
        self.media_token_id = vision.media_token_id

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The text model's input table."""
        return self.language_model.embed_tokens

    @property
    def layers(self) -> nn.ModuleList:
        """The text model's layers."""
        return self.language_model.layers

    @property
    def norm(self) -> RMSNorm:
        """The text model's final norm."""
        return self.language_model.norm

    @property
    def lm_head(self) -> Linear:
        """The text model's output head."""
        return self.language_model.lm_head

    @property
    def position_table(self) -> Tensor:
        """The text model's: of no width."""
        return self.language_model.position_table

    @position_table.setter
    def position_table(self, table: Tensor) -> None:
        self.language_model.position_table = table

    @property
    def capture_ids(self) -> range:
        """Those of the text model."""
        return self.language_model.capture_ids

    def default_capture_ids(self) -> tuple[CaptureId, ...]:
        """Those of the text model."""
        return self.language_model.default_capture_ids()

    def forward(
        self,
        token_ids_BT: Tensor,
        positions_BT: Tensor,
        attend: Attend,
        taps: TapCollector | None = None,
        *,
        embeddings_BTD: Tensor | None = None,
    ) -> Tensor:
        """Run the text model; arguments as there."""
        hidden_BTD: Tensor = self.language_model(
            token_ids_BT, positions_BT, attend, taps, embeddings_BTD=embeddings_BTD
        )
        return hidden_BTD

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every vocabulary id."""
        return self.language_model.logits(hidden)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embedding rows of tokens, placeholders like any other."""
        return self.language_model.embed(token_ids)

    def embed_media(self, pixels_P3EE: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """What images and clips look like to the text model.

        Args:
            pixels_P3EE: patches of all items; [items, patches, 3, E, E] is flattened.
            grids: frames, rows and columns of patches of each item.
        Returns:
            Per item, one row per merged patch, [rows * columns / 4, D].
        Raises:
            ShapeError: patches and grids do not fit each other.
        """
        if pixels_P3EE.dim() == 5:
            pixels_P3EE = pixels_P3EE.flatten(0, 1)
        pixels_P3EE = pixels_P3EE.to(self.vision_tower.final_layernorm.weight.dtype)
        return [self.mm_projector(rows) for rows in self.vision_tower(pixels_P3EE, grids)]

    def embed_prompt(
        self, token_ids_BT: Tensor, media: Sequence[Tensor], *, media_token_id: int | None = None
    ) -> Tensor:
        """Embeddings of a prompt in which media take the place of placeholders, in order.

        Args:
            token_ids_BT: with one placeholder per row of every item.
            media: from `embed_media`.
            media_token_id: the tokenizer's placeholder, which outranks the config's.
        Returns:
            [B, T, D] for `forward`'s `embeddings_BTD`.
        Raises:
            RequestError: there are more or fewer placeholders than rows.
        """
        rows_BTD = self.embed(token_ids_BT)
        is_placeholder_BT = token_ids_BT == (self.media_token_id if media_token_id is None else media_token_id)
        num_places, num_rows = int(is_placeholder_BT.sum()), sum(len(item) for item in media)
        if num_places != num_rows:
            raise RequestError(
                f"the prompt has {num_places} placeholders for media, and its {len(media)} items have {num_rows} rows",
                hint="one placeholder per merged patch: a quarter of an image's patches",
            )
        if num_rows == 0:
            return rows_BTD
        return rows_BTD.masked_scatter(is_placeholder_BT.unsqueeze(-1), torch.cat(list(media)).to(rows_BTD.dtype))
