"""Bodies of requests and answers in the form of the OpenAI API, with the further fields that vLLM's clients send.

A field of the wrong type is refused. A field that nobody here knows is kept aside: `unknown_fields` names it, and
the server says once that it changes nothing. `null` means the same as an absent field, as it does for OpenAI's clients.

Source: the OpenAI API reference (chat completions, completions, models) and vLLM's additions to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, Strict
from pydantic_core import CoreSchema


@dataclass(frozen=True)
class FirstFault:
    """Of a list, only the first fault is told: millions of them would keep the server busy for minutes.

    Pydantic's own `FailFast` cannot be part of a union: it has no hash.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "list"
        return cast(CoreSchema, {**schema, "fail_fast": True})


Flag = Annotated[bool, Strict()]
Whole = Annotated[int, Strict()]
Real = Annotated[float, Strict()]  # an integer is a float in JSON, and passes
Text = Annotated[str, Strict()]
Texts = Annotated[list[Text], FirstFault()]
TokenIds = Annotated[list[Whole], FirstFault()]

Role = Text  # which roles there are is the chat template's business


class Body(BaseModel):
    """Base of what clients send."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Names of fields that were sent and are not known, with a dot where one is in another.

        What messages and tools hold besides is no business of ours: the chat template gets it.
        """
        own = list(self.model_extra or ())
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Body):
                own += [f"{field.alias or name}.{inner}" for inner in value.unknown_fields]
        return tuple(sorted(own))


class FunctionCall(Body):
    """Which function, and its arguments as JSON text."""

    name: Text
    arguments: Text | None = None


class ToolCall(Body):
    """One call in a message of the assistant."""

    id: Text | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ContentPart(Body):
    """A piece of a message; only text can be read."""

    type: Text
    text: Text | None = None


class ChatMessage(Body):
    """One turn. Further fields, such as `name` or `reasoning_content`, reach the chat template as they are."""

    role: Role
    content: Text | Annotated[list[ContentPart], FirstFault()] | None = None
    tool_calls: Annotated[list[ToolCall], FirstFault()] | None = None
    tool_call_id: Text | None = None


Messages = Annotated[list[ChatMessage], FirstFault()]


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], FirstFault()]


class NamedFunction(Body):
    """The name in a `tool_choice`."""

    name: Text


class NamedTool(Body):
    """A `tool_choice` that names one function."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """What `response_format` of type json_schema carries."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | Flag | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Body):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """vLLM's wider choice of forms; one of them."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    json_object: Flag | None = None
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Text | None = None


class StreamOptions(Body):
    """What a stream says besides its text."""

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None


class SamplingFields(Body):
    """What both kinds of completion have in common. Ranges are those of `SamplingParameters`, which checks them."""

    model: Text | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Whole | None = None
    min_p: Real | None = None
    seed: Whole | None = None
    n: Whole | None = None
    stop: Text | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: Flag | None = None
    ignore_eos: Flag | None = None
    frequency_penalty: Real | None = None
    presence_penalty: Real | None = None
    repetition_penalty: Real | None = None
    logit_bias: dict[str, Real] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    draft_length: Literal["off", "fixed", "adaptive"] | None = None
    priority: Whole | None = None
    cache_salt: Text | None = None
    # Understood, and of no consequence for what is computed.
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: Flag | None = None
    service_tier: Text | None = None


class ChatCompletionRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Whole | None = None
    logprobs: Flag | None = None
    top_logprobs: Whole | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Text | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Text | Texts | TokenIds | Annotated[list[TokenIds], FirstFault()]
    logprobs: Whole | None = None
    echo: Flag | None = None
    suffix: Text | None = None
    best_of: Whole | None = None
    add_special_tokens: Flag | None = None


class TokenizeRequest(Body):
    """Body of POST /tokenize: a prompt, or messages of a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: Flag | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    return_token_strs: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds


class Answer(BaseModel):
    """Base of what the server sends: exactly these fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class TopLogprob(Answer):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The delivered token at a position, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Of one choice, in order."""

    content: list[ChatLogprob]


class CompletionLogprobs(Answer):
    """Parallel lists, one entry per delivered token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class AnsweredCall(Answer):
    """A function that the model calls."""

    id: str
    type: Literal["function"] = "function"
    function: dict[str, str]


class AnswerMessage(Answer):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(Answer):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None


class CompletionChoice(Answer):
    """One of the answers to one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str
    stop_reason: int | str | None = None


class PromptTokensDetails(Answer):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(Answer):
    """Tokens of a request: each prompt once, and what was delivered of all its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class SpeculativeDecodingMetrics(Answer):
    """What drafting did for one answer. Source: vLLM's object of the same name.

    `acceptance_histogram[i]` steps kept exactly i drafts; its sum is `num_spec_steps`. The two lists, with one entry
    per step, are there at the level "detailed".
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | None = None
    per_step_drafted: list[int] | None = None


class RequestMetrics(Answer):
    """Statistics of a request with one answer."""

    speculative_decoding: SpeculativeDecodingMetrics


class ChatCompletion(Answer):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | None = None


class Completion(Answer):
    """Answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: RequestMetrics | None = None


class ModelCard(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paceline"
    root: str
    max_model_len: int
    draft_model: str | None = None


class ModelList(Answer):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(Answer):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Answer):
    """Answer of POST /detokenize."""

    prompt: str
