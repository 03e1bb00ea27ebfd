"""What the engine gave, in the form of the API: log-probabilities, usage, statistics of drafting, whole answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from paceline.checkpoint.answer_parts import AnswerReader, FoundCall, read_whole
from paceline.engine.request import RequestResult, TokenLogprobs
from paceline.serving.protocol import (
    AnsweredCall,
    AnswerMessage,
    ChatChoice,
    ChatLogprob,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokensDetails,
    RequestMetrics,
    SpeculativeDecodingMetrics,
    TopLogprob,
    Usage,
)
from paceline.trace.acceptance import AcceptanceSummary

if TYPE_CHECKING:
    from paceline.serving.model import MetricsLevel
    from paceline.serving.token_texts import TokenTexts


def shown_entries(
    entries: Sequence[TokenLogprobs], finish_reason: str | None, hidden_ids: Collection[int]
) -> Sequence[TokenLogprobs]:
    """Log-probabilities of the tokens that are part of the text: a stop token that ended it is not.

    Args:
        entries: of the tokens delivered now.
        finish_reason: of the answer, if it ended with them.
        hidden_ids: stop tokens whose text is not delivered.
    """
    ends_hidden = finish_reason == "stop" and bool(entries) and entries[-1].token_id in hidden_ids
    return entries[:-1] if ends_hidden else entries


def chat_logprobs(entries: Sequence[TokenLogprobs], texts: TokenTexts) -> ChatLogprobs:
    """Of a chat's answer."""

    def one(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=texts.text_of(token_id), logprob=logprob, bytes=list(texts.bytes_of(token_id)))

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **one(entry.token_id, entry.logprob).model_dump(), top_logprobs=[one(*pair) for pair in entry.top]
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    entries: Sequence[TokenLogprobs], texts: TokenTexts, *, num_top: int, offset: int = 0
) -> CompletionLogprobs:
    """Of a completion.

    Args:
        entries: one per token.
        texts: of the tokens.
        num_top: how many of the likeliest were asked for; with 0 there is no list of them.
        offset: characters of the answer before the first of these tokens.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += texts.num_characters(entry.token_id)
    top: list[dict[str, float]] = []
    for entry in entries:
        listed = {texts.name_of(entry.token_id): entry.logprob}
        for token_id, logprob in entry.top:
            listed.setdefault(texts.name_of(token_id), logprob)  # a vocabulary may spell a text with several tokens
        top.append(listed)
    return CompletionLogprobs(
        tokens=[texts.name_of(entry.token_id) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=top if num_top > 0 else None,
        text_offset=offsets,
    )


def usage_of(results: Sequence[RequestResult], n: int) -> Usage:
    """Tokens of a request whose answers are all there, in order.

    Args:
        results: of each prompt its n answers.
        n: as asked for.
    """
    of_prompts = results[::n]
    num_prompt, num_new = sum(len(one.prompt_ids) for one in of_prompts), sum(len(one.token_ids) for one in results)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_new,
        total_tokens=num_prompt + num_new,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(one.num_cached_tokens for one in of_prompts)),
    )


def drafting_metrics(
    results: Sequence[RequestResult], num_draft_tokens: int, level: MetricsLevel
) -> RequestMetrics | None:
    """What drafting did for a request with one answer; None for others, and where nothing was drafted.

    Args:
        results: all answers.
        num_draft_tokens: most drafts per step.
        level: how much is told.
    """
    if level == "none" or len(results) != 1:
        return None
    records = [record for record in results[0].trace.records if record.num_draft_tokens > 0]
    if not records:
        return None
    summary = AcceptanceSummary.from_steps(records)
    is_detailed = level == "detailed"
    return RequestMetrics(
        speculative_decoding=SpeculativeDecodingMetrics(
            mean_acceptance_length=summary.acceptance_length,
            draft_acceptance_rate=summary.draft_acceptance_rate,
            acceptance_histogram=[
                sum(record.num_accepted == depth for record in records) for depth in range(num_draft_tokens + 1)
            ],
            num_spec_steps=summary.num_steps,
            num_accepted_draft_tokens=summary.num_accepted,
            num_draft_tokens=summary.num_draft_tokens,
            num_spec_tokens=num_draft_tokens,
            per_step_accepted=[record.num_accepted for record in records] if is_detailed else None,
            per_step_drafted=[record.num_draft_tokens for record in records] if is_detailed else None,
        )
    )


def chat_choice(
    index: int, result: RequestResult, texts: TokenTexts, hidden_ids: Collection[int], reader: AnswerReader
) -> ChatChoice:
    """One whole answer of a chat.

    Args:
        index: of the answer.
        result: of the engine.
        texts: of tokens.
        hidden_ids: stop tokens whose text is not delivered.
        reader: a new one.
    """
    thought, text, found = read_whole(reader, result.text)
    tool_calls = [answered_call(call, f"{result.request_id}-{place}") for place, call in enumerate(found)]
    return ChatChoice(
        index=index,
        message=AnswerMessage(
            content=text if text or not found else None,
            reasoning_content=thought or None,
            tool_calls=tool_calls or None,
        ),
        logprobs=None
        if result.logprobs is None
        else chat_logprobs(shown_entries(result.logprobs, result.finish_reason, hidden_ids), texts),
        finish_reason=finish_reason(result.finish_reason, has_calls=bool(found)),
        stop_reason=result.stop_reason,
    )


def completion_choice(
    index: int, result: RequestResult, texts: TokenTexts, hidden_ids: Collection[int], num_top: int
) -> CompletionChoice:
    """One whole answer to a prompt; the arguments are those of `chat_choice` and `completion_logprobs`."""
    return CompletionChoice(
        index=index,
        text=result.text,
        logprobs=None
        if result.logprobs is None
        else completion_logprobs(
            shown_entries(result.logprobs, result.finish_reason, hidden_ids), texts, num_top=num_top
        ),
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
    )


def answered_call(call: FoundCall, name: str) -> AnsweredCall:
    """A call with an id that is its own: the target's, where that gives one."""
    return AnsweredCall(id=call.id or f"call-{name}", function={"name": call.name, "arguments": call.arguments})


def finish_reason(reason: str, *, has_calls: bool) -> str:
    """An answer that ended by itself and holds calls waits for what they give."""
    return "tool_calls" if has_calls and reason == "stop" else reason
