"""What a server was asked to do: the models, how many requests it takes, and how it treats its clients."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator

from paceline.configuration.fields import Count, CountOrZero, Flag, Name, NumberOrZero, OrNone, PositiveNumber
from paceline.configuration.generation import DraftLength, ModelSettings

Port = Annotated[int, Strict(), Field(ge=0, le=65535)]


class ServeRun(ModelSettings):
    """A target and its drafter behind HTTP."""

    engine: Literal["paceline", "vllm"] = Field(
        "paceline", description="who serves; vllm is started once the drafter is known to be one that it serves right"
    )
    engine_command: Name = Field("vllm", description="program that is started with engine vllm")
    draft_length: DraftLength = Field(
        "adaptive", description="adaptive drafts as many as pay, fixed spec_tokens every step, off none"
    )
    max_model_len: Annotated[Count | None, OrNone] = Field(
        None, description="largest context in tokens; unset takes the target's, at most 2048"
    )
    host: Name = Field("127.0.0.1", description="address to listen on; 0.0.0.0 takes requests from everywhere")
    port: Port = Field(8000, description="0 takes any that is free")
    served_model_name: Annotated[Name | None, OrNone] = Field(
        None, description="name that clients ask for; unset takes the target's as given"
    )
    api_keys: tuple[Name, ...] = Field((), description="clients need one of these; none lets everybody in")
    allowed_origins: tuple[Name, ...] = Field(
        (), description="web pages that may ask, as http://host:port; * takes all"
    )
    max_num_seqs: Count = Field(16, description="requests that are decoded at the same time")
    max_num_waiting: Annotated[CountOrZero | None, OrNone] = Field(
        1024, description="requests that may wait beyond those; further ones get status 429; unset sets no limit"
    )
    max_itl_ms: Annotated[PositiveNumber | None, OrNone] = Field(
        None, description="how long prompts may keep answers waiting for their next tokens; unset sets no limit"
    )
    prefill_chunk_size: Count = Field(512, description="prompt tokens per pass of the target")
    num_blocks: Annotated[Count | None, OrNone] = Field(
        None, description="blocks of the caches; unset takes what max_num_seqs full contexts need"
    )
    prefix_cache: Flag = Field(True, description="keep the keys of texts for requests that begin the same")
    canary: Literal["start", "off"] = Field(
        "start", description="start serves nothing before a drafter has passed its canary"
    )
    stream_interval_s: NumberOrZero = Field(
        0.02, description="least time between two chunks of an answer; 0 sends each step's tokens at once"
    )
    request_timeout_s: Annotated[PositiveNumber | None, OrNone] = Field(
        None, description="seconds after which an answer ends where it is; unset sets no limit"
    )
    shutdown_timeout_s: PositiveNumber = Field(30.0, description="seconds that answers get to end once it is told to")
    max_body_mb: Count = Field(32, description="largest body of a request in MiB")
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = Field(
        "none", description="what answers tell of drafting"
    )
    reasoning_parser: Literal["auto", "none"] = Field(
        "auto", description="auto tells what a target thinks apart from what it says, where its chats have such a part"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto samples as the target's generation_config.json says where a request says nothing"
    )

    @field_validator("api_keys")
    @classmethod
    def _keys_can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for key in keys:
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise ValueError("an API key has characters that no header can carry")
        return keys

    @model_validator(mode="after")
    def _a_command_needs_its_engine(self) -> Self:
        if self.engine == "paceline" and self.engine_command != type(self).model_fields["engine_command"].default:
            raise ValueError(f"engine_command is {self.engine_command!r}, and engine paceline starts no other program")
        return self

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        if len(set(self.api_keys)) < len(self.api_keys):
            raise ValueError("an API key stands twice in api_keys")
        return self
