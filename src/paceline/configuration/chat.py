"""What a chat in the terminal was asked to do: the models, how answers are drawn, and how long they may be."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from paceline.configuration.fields import Count, CountOrZero, StopText
from paceline.configuration.generation import DraftLength, ModelRun, TokenBiases


class ChatRun(ModelRun):
    """A conversation with a target, in this process."""

    max_tokens: Count = Field(1024, description="largest number of tokens of an answer")
    draft_length: DraftLength = Field(
        "adaptive", description="adaptive drafts as many as pay, fixed spec_tokens every step, off none"
    )
    stop: tuple[StopText, ...] = Field((), description="end an answer before any of these strings")
    stop_token_ids: tuple[CountOrZero, ...] = Field((), description="end an answer at any of these tokens")
    logit_bias: TokenBiases = Field({}, description="numbers added to the logits of token ids")
    allowed_token_ids: tuple[CountOrZero, ...] = Field(
        (), description="choose among these tokens alone; none allows all"
    )
    bad_words: tuple[StopText, ...] = Field((), description="texts that are never completed")

    @model_validator(mode="after")
    def _turns_need_the_template(self) -> Self:
        if self.raw:
            raise ValueError("raw is set, but only the chat template tells turns apart; `paceline generate --raw`")
        return self
