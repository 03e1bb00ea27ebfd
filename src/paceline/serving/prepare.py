"""From the body of a request to prompts and sampling parameters; everything that can be wrong with it is found here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.engine.sampling import SamplingParameters
from paceline.errors import shown
from paceline.serving.answer_form import AnswerForm, answer_form
from paceline.serving.chat import as_template_takes, render_messages
from paceline.serving.fields import FieldError, sampling_of
from paceline.serving.model import ServedModel
from paceline.serving.protocol import ChatCompletionRequest, CompletionRequest, SamplingFields
from paceline.serving.samples import Asked
from paceline.serving.tools import tool_use

DEFAULT_MAX_TOKENS = 16  # of a completion, by the OpenAI API; a chat has the room that there is
MOST_SAMPLES = 1024  # answers of one request
_MOST_TOP_LOGPROBS = 20  # of a chat, by the OpenAI API


@dataclass(frozen=True)
class PreparedChat:
    """A chat that can be run.

    Attributes:
        asked: of the engine.
        form: of its answers.
    """

    asked: Asked
    form: AnswerForm


def prepare_chat(body: ChatCompletionRequest, model: ServedModel, timeout_s: float | None) -> PreparedChat:
    """Render and encode a chat.

    Args:
        body: of the request.
        model: that answers.
        timeout_s: after which an answer ends.
    Raises:
        RequestError: a field asks for something impossible; a `FieldError` where it is known which.
    """
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, field)
    if max_tokens is not None and max_tokens < 1:
        raise FieldError(f"{field} is {shown(max_tokens)}; it has to be at least 1", param=field)
    if body.continue_final_message and body.add_generation_prompt:
        raise FieldError(
            "continue_final_message and add_generation_prompt exclude each other: the last turn goes on, or a new one "
            "begins",
            param="add_generation_prompt",
        )
    if body.top_logprobs and not body.logprobs:
        raise FieldError("top_logprobs is set, and logprobs is not true", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= _MOST_TOP_LOGPROBS:
        message = f"top_logprobs is {body.top_logprobs}; it has to be from 0 to {_MOST_TOP_LOGPROBS}"
        raise FieldError(message, param="top_logprobs")
    tools = tool_use(body, model.tokenizer)
    sampling = sampling_of(
        body,
        model.defaults,
        max_tokens=model.max_model_len if max_tokens is None else max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=tools.grammar,
    )
    variables: dict[str, object] = {**tools.variables, **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    if body.response_format is not None and model.tokenizer.has_channels:  # which are told of it
        variables.setdefault("response_format", body.response_format.model_dump(by_alias=True, exclude_none=True))
    if not body.messages:
        raise FieldError("messages is empty; a chat needs at least one", param="messages")
    rendered = render_messages(
        body.messages,
        model.tokenizer,
        tools=tools.for_template,
        variables=variables,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message is True,
    )
    _check_size(rendered.text, model, "messages")
    prompt = tuple(model.tokenizer.encode_rendered(rendered))
    begun = as_template_takes(body.messages[-1], "the last message")["content"] if body.continue_final_message else ""
    form = answer_form(model.tokenizer, rendered.text, tools, tells_reasoning=model.tells_reasoning, begun=begun)
    structure, begins_after = sampling.structured_output, form.structure_begins_after
    if structure is not None and begins_after is not None:
        sampling = replace(sampling, structured_output=replace(structure, begins_after=begins_after))
    return PreparedChat(_asked(body, [prompt], sampling, model, "messages", timeout_s), form)


def prepare_completion(body: CompletionRequest, model: ServedModel, timeout_s: float | None) -> Asked:
    """Encode the prompts of a completion; arguments and errors are those of `prepare_chat`."""
    if body.echo:
        raise FieldError("echo is not supported: answers hold new text alone", param="echo")
    if body.suffix:
        raise FieldError("suffix is not supported: text is only ever continued", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise FieldError(f"best_of is {body.best_of}; answers are not ranked here", param="best_of", hint="n")
    sampling = sampling_of(
        body,
        model.defaults,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
    )
    return _asked(body, _prompts_of(body, model, sampling.n), sampling, model, "prompt", timeout_s)


def _prompts_of(body: CompletionRequest, model: ServedModel, n: int) -> list[tuple[int, ...]]:
    given: Sequence[object] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not given:
        raise FieldError("prompt is an empty list", param="prompt")
    if isinstance(given[0], int):
        given = [given]
    if len(given) * n > MOST_SAMPLES:  # before anything is encoded
        raise FieldError(
            f"{len(given)} prompts with {n} answers each are asked for; at most {MOST_SAMPLES} answers are possible",
            param="prompt" if n == 1 else "n",
        )
    return [_ids_of(prompt, index, body, model) for index, prompt in enumerate(given)]


def _ids_of(prompt: object, index: int, body: CompletionRequest, model: ServedModel) -> tuple[int, ...]:
    if isinstance(prompt, str):
        _check_size(prompt, model, "prompt")
        return tuple(model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False))
    assert isinstance(prompt, Sequence), "the protocol has texts and lists of ids"
    outside = next((token for token in prompt if not 0 <= token < model.vocab_size), None)
    if outside is not None:
        raise FieldError(
            f"prompt {index} has the token {shown(outside)}; the vocabulary has ids 0 to {model.vocab_size - 1}",
            param="prompt",
        )
    return tuple(prompt)


def _check_size(text: str, model: ServedModel, param: str) -> None:
    """Refuse a text that cannot fit before time is spent on encoding it."""
    fewest = model.fewest_tokens.of(text)
    if fewest >= model.max_model_len:
        raise FieldError(
            f"{param} has {fewest} tokens or more; the context of {model.max_model_len} leaves no room for a new one",
            param=param,
            hint=f"at most {model.max_model_len - 1} tokens",
        )


def _asked(
    body: SamplingFields,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParameters,
    model: ServedModel,
    param: str,
    timeout_s: float | None,
) -> Asked:
    for index, prompt in enumerate(prompts):
        which = f"{param} {index}" if len(prompts) > 1 else param
        if not prompt:
            raise FieldError(f"{which} has no tokens; at least one is needed to predict the next", param=param)
        if len(prompt) >= model.max_model_len:
            raise FieldError(
                f"{which} has {len(prompt)} tokens; the context of {model.max_model_len} leaves no room for a new one",
                param=param,
                hint=f"at most {model.max_model_len - 1} tokens",
            )
    return Asked(tuple(prompts), sampling, body.priority or 0, timeout_s, body.cache_salt)
