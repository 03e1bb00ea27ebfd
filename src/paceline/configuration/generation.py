"""What generation and evaluation were asked to do: flat settings with the names of their command-line flags.

Nothing here knows torch: device and dtype are names, which the models turn into objects.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, Strict, model_validator

from paceline.configuration.fields import (
    Count,
    CountOrZero,
    DeviceName,
    DraftSampleMethod,
    DraftVocabSize,
    DtypeName,
    Flag,
    LinearMode,
    Name,
    Number,
    NumberOrZero,
    OrNone,
    PathName,
    PositiveNumber,
    Seed,
    Settings,
    Share,
    StopText,
    Threads,
)

VerifyMethod = Literal["standard", "block", "match", "coupled"]
DraftLength = Literal["off", "fixed", "adaptive"]
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,18}")  # without leading zeros, so that no id has two names
Penalty = Annotated[float, Strict(), Field(ge=-2, le=2, allow_inf_nan=False)]


def _biases_name_tokens(biases: dict[str, float]) -> dict[str, float]:
    for token in biases:
        if _TOKEN_ID.fullmatch(token) is None:
            raise ValueError(f"{token!r} is no token id")
    return biases


TokenBiases = Annotated[dict[str, Number], AfterValidator(_biases_name_tokens)]


class ModelSettings(Settings):
    """The models of a run and how they are run."""

    model: Name = Field(description="target: a folder, a .gguf file, a hub name or an alias")
    draft_model: Annotated[Name | None, OrNone] = Field(
        None, description="drafter folder or hub name; unset drafts nothing"
    )
    spec_tokens: Annotated[Count | None, OrNone] = Field(
        None, description="proposals per step, the anchor not counted; unset takes what the drafter was trained for"
    )
    draft_sample_method: Annotated[DraftSampleMethod | None, OrNone] = Field(
        None, description="how proposals are picked when sampling; unset takes the drafter's own, coupled always draws"
    )
    verify_method: VerifyMethod = Field(
        "standard",
        description="how drafts are judged when sampling: standard, block (keeps more of a long block), match or "
        "coupled (both give the text of plain decoding at the same seed)",
    )
    draft_length: DraftLength = Field(
        "fixed", description="fixed drafts spec_tokens every step, adaptive as many as pay, off none"
    )
    draft_vocab_size: DraftVocabSize = Field(
        "auto",
        description="drafts are chosen from so many of the most frequent ids; auto takes those of 99.5 % of the text "
        "on a CPU, full takes all",
    )
    max_model_len: Annotated[Count | None, OrNone] = Field(
        None, description="largest context in tokens; unset takes what the prompts and max_tokens need"
    )
    dtype: DtypeName = Field("auto", description="precision of the models; auto takes the device's best")
    device: DeviceName = Field("auto", description="auto, cpu, cuda or cuda:N")
    linear_mode: LinearMode = Field(
        "auto",
        description="arithmetic of matrix products; row_invariant makes a row's bits independent of the batch",
    )
    threads: Annotated[Threads | None, OrNone] = Field(
        None, description="CPU threads; unset leaves the choice to torch"
    )
    offline: Flag = Field(False, description="never touch the network; a missing file is an error")

    @model_validator(mode="after")
    def _draft_settings_need_a_drafter(self) -> Self:
        for name in ("spec_tokens", "draft_sample_method", "verify_method", "draft_length", "draft_vocab_size"):
            unset = type(self).model_fields[name].default
            if self.draft_model is None and getattr(self, name) != unset:
                raise ValueError(f"{name} is {getattr(self, name)!r} but there is no draft_model to use it")
        return self


class ModelRun(ModelSettings):
    """What generation and evaluation have in common: the models, and how tokens are picked."""

    max_tokens: Count = Field(128, description="largest number of new tokens per prompt")
    temperature: NumberOrZero = Field(0.0, description="0 is greedy; higher is more varied")
    top_k: CountOrZero = Field(0, description="keep the k most likely tokens; 0 keeps all")
    top_p: Annotated[float, Strict(), Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        1.0, description="keep the most likely tokens up to this share of probability"
    )
    min_p: Share = Field(0.0, description="drop tokens below this share of the likeliest one's probability")
    seed: Annotated[Seed | None, OrNone] = Field(None, description="makes sampling repeatable; unset draws one")
    system: Annotated[Name | None, OrNone] = Field(None, description="system message of the chat template")
    raw: Flag = Field(False, description="take prompts as they are, without the chat template")
    ignore_eos: Flag = Field(False, description="go on past end-of-text tokens, up to max_tokens")
    min_tokens: CountOrZero = Field(0, description="the first so many tokens cannot end the text")
    repetition_penalty: PositiveNumber = Field(
        1.0, description="above 1 makes tokens of the prompt and the text less likely; 1 is off"
    )
    frequency_penalty: Penalty = Field(0.0, description="subtracted for each time that a token is in the text already")
    presence_penalty: Penalty = Field(0.0, description="subtracted once for a token that is in the text already")

    @model_validator(mode="after")
    def _text_settings_agree(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        if self.raw and self.system is not None:
            raise ValueError("system is set but raw leaves the chat template out, so nothing would show it")
        return self


class TracedRun(ModelRun):
    """A run that can keep a record of every step."""

    trace_file: Annotated[PathName | None, OrNone] = Field(
        None, description="append a record of every step to this .jsonl file"
    )
    trace_details: Flag = Field(
        False,
        description="records hold probabilities, entropies, confidences and the times of a step's parts, too; steps "
        "take longer, and no graphs are recorded",
    )

    @model_validator(mode="after")
    def _details_go_into_a_file(self) -> Self:
        if self.trace_details and self.trace_file is None:
            raise ValueError("trace_details is set but there is no trace_file that they could go to")
        return self


class GenerateRun(TracedRun):
    """Text from one or several prompts."""

    stop: tuple[StopText, ...] = Field((), description="end the text before any of these strings")
    stop_token_ids: tuple[CountOrZero, ...] = Field((), description="end the text at any of these tokens")
    include_stop_str_in_output: Flag = Field(False, description="keep the stop string at the end of the text")
    n: Annotated[Count, Field(le=64)] = Field(
        1, description="samples of each prompt; answer i of all prompts and samples draws with seed + i"
    )
    logprobs: Annotated[Annotated[CountOrZero, Field(le=32)] | None, OrNone] = Field(
        None, description="log-probability of each token, and of so many of the likeliest beside it; unset gives none"
    )
    logprobs_mode: Literal["raw", "processed"] = Field(
        "raw", description="raw reads the model's own distribution, processed the one that was sampled from"
    )
    logit_bias: TokenBiases = Field({}, description="numbers added to the logits of token ids")
    allowed_token_ids: tuple[CountOrZero, ...] = Field(
        (), description="choose among these tokens alone; none allows all"
    )
    bad_words: tuple[StopText, ...] = Field((), description="texts that are never completed")
    json_schema: Annotated[StopText | None, OrNone] = Field(
        None, description="the text is JSON of this schema: JSON text, or @FILE"
    )
    json_object: Flag = Field(False, description="the text is a JSON object")
    regex: Annotated[StopText | None, OrNone] = Field(None, description="the text matches this regular expression")
    choice: tuple[StopText, ...] = Field((), description="the text is one of these")
    grammar: Annotated[StopText | None, OrNone] = Field(
        None, description="the text follows this Lark grammar: its text, or @FILE"
    )
    structure_begins_after: Annotated[StopText | None, OrNone] = Field(
        None, description="text after which the structure begins, such as the end of a reasoning part"
    )
    tensor_parallel_size: Count = Field(
        1, description="processes of torchrun that share each layer: its heads, experts and ids"
    )
    pipeline_parallel_size: Count = Field(
        1, description="stages that the target's layers are cut into, each with processes of its own"
    )
    pipeline_cuts: tuple[Count, ...] = Field(
        (), description="first layer of every stage but the first; none given cuts evenly"
    )
    compare: Flag = Field(False, description="run plain decoding beside it and say whether the ids are identical")
    trace: Annotated[Flag | None, OrNone] = Field(
        None, description="show accepted, refused and bonus tokens; unset shows them on a terminal"
    )

    @model_validator(mode="after")
    def _one_structure_at_most(self) -> Self:
        named = ("json_schema", "json_object", "regex", "choice", "grammar")
        given = [name for name in named if getattr(self, name) not in (None, False, ())]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say what the text must look like; give one")
        if self.structure_begins_after is not None and not given:
            raise ValueError(
                f"structure_begins_after is {self.structure_begins_after!r} but nothing says what follows it; "
                "give json_schema, json_object, regex, choice or grammar"
            )
        return self

    @model_validator(mode="after")
    def _a_mode_needs_log_probabilities(self) -> Self:
        if self.logprobs is None and self.logprobs_mode != "raw":
            raise ValueError(f"logprobs_mode is {self.logprobs_mode!r} but logprobs is unset: there are none to read")
        return self

    @model_validator(mode="after")
    def _cuts_make_the_stages(self) -> Self:
        if self.pipeline_cuts and len(self.pipeline_cuts) != self.pipeline_parallel_size - 1:
            raise ValueError(
                f"pipeline_cuts has {len(self.pipeline_cuts)} cuts; pipeline_parallel_size "
                f"{self.pipeline_parallel_size} takes {self.pipeline_parallel_size - 1}"
            )
        return self

    @model_validator(mode="after")
    def _comparing_needs_a_drafter(self) -> Self:
        if self.compare and self.draft_model is None:
            raise ValueError("compare is set but there is no draft_model: plain decoding would be compared with itself")
        return self


class EvaluateRun(TracedRun):
    """Served acceptance of a drafter on prompt files."""

    draft_model: Name = Field(description="drafter folder or hub name")
    prompts: tuple[PathName, ...] = Field(
        min_length=1, description="prompt files (.jsonl, plain text or held-out .npz), one set each"
    )
    num_prompts: Annotated[Count | None, OrNone] = Field(None, description="prompts per set; unset takes all")
    max_num_seqs: Count = Field(8, description="prompts that are decoded at the same time")
