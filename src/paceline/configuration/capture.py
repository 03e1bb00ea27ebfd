"""What capturing prompts and answers was asked to do: flat settings with the names of their command-line flags."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, model_validator

from paceline.configuration.fields import (
    Count,
    DeviceName,
    DtypeName,
    Flag,
    LinearMode,
    Name,
    NumberOrZero,
    OrNone,
    PathName,
    Seed,
    Settings,
    Share,
    Threads,
)

CaptureBackend = Literal["engine", "lockstep"]


class CapturePromptsRun(Settings):
    """Conversations that a target writes: prompts of its own, or given ones, and answers to them."""

    model: Name = Field(description="target: a folder, a .gguf file, a hub name or an alias")
    output: PathName = Field(description="folder of the shards; an earlier capture with equal settings goes on in it")
    self_chat: Annotated[Count | None, OrNone] = Field(
        None, description="conversations that the target starts by itself, before duplicates are dropped"
    )
    prompts: Annotated[PathName | None, OrNone] = Field(
        None, description="prompts to answer, JSONL with `prompt` or `messages`"
    )
    max_user_tokens: Count = Field(98, ge=2, description="a longer user turn of self-chat is dropped")
    max_answer_tokens: Count = Field(320, description="an answer is cut there and kept")
    max_prompt_tokens: Annotated[Count | None, OrNone] = Field(
        None, description="leave out longer prompts; unset refuses those that the context has no room for"
    )
    greedy_share: Share = Field(0.75, description="share of conversations that are answered greedily")
    temperature: NumberOrZero = Field(0.8, description="of the other answers")
    top_p: Annotated[float, Strict(), Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        1.0, description="of the other answers: sample from the likeliest tokens up to this share of probability"
    )
    seed: Seed = Field(0, description="of all choices and draws")
    exclude: tuple[PathName, ...] = Field(
        (), description="files of evaluation prompts; prompts that resemble one are left out"
    )
    exclude_ngram: Count = Field(8, description="words in a row that a prompt may not share with an excluded one")
    backend: CaptureBackend = Field(
        "engine", description="engine serves any mix of lengths, lockstep is for thousands of rows on one GPU"
    )
    batch_size: Count = Field(64, description="conversations that are written at the same time")
    shard_size: Count = Field(1024, description="conversations per shard; what a kill can cost")
    draft_model: Annotated[Name | None, OrNone] = Field(
        None, description="drafter folder or hub name; drafts are judged so that they change no token"
    )
    spec_tokens: Annotated[Count | None, OrNone] = Field(
        None, description="proposals per step; unset takes what the drafter was trained for"
    )
    dtype: DtypeName = Field("auto", description="precision of the models; auto takes the device's best")
    device: DeviceName = Field("auto", description="auto, cpu, cuda or cuda:N")
    linear_mode: LinearMode = Field("auto", description="arithmetic of matrix products")
    threads: Annotated[Threads | None, OrNone] = Field(
        None, description="CPU threads; unset leaves the choice to torch"
    )
    offline: Flag = Field(False, description="never touch the network; a missing file is an error")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.self_chat is None) == (self.prompts is None):
            given = "neither is set" if self.self_chat is None else f"self_chat is {self.self_chat} and prompts is set"
            raise ValueError(f"prompts come either from self_chat or from a file of prompts; {given}")
        if self.self_chat is not None and self.max_prompt_tokens is not None:
            raise ValueError("max_prompt_tokens is for files of prompts; max_user_tokens bounds self_chat")
        return self

    @model_validator(mode="after")
    def _drafts_need_the_engine(self) -> Self:
        if self.draft_model is not None and self.backend != "engine":
            raise ValueError(
                f"draft_model is {self.draft_model!r} but backend is {self.backend!r}, which drafts nothing"
            )
        if self.spec_tokens is not None and self.draft_model is None:
            raise ValueError(f"spec_tokens is {self.spec_tokens} but there is no draft_model to use it")
        return self
