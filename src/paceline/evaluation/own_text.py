"""What a target says to a set of prompts, greedily: the text that a drafter is scored on where none is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import SamplingParameters
from paceline.evaluation.contract_search import Text
from paceline.evaluation.prompts import Prompt, encode_prompt, single_prompt
from paceline.models.loading import LoadedTarget

_MAX_TOKENS = 40
_MAX_PROMPT_TOKENS = 256
_BATCH = 8

QUESTIONS = (
    "Why is the sky darker at high altitude?",
    "Name three uses of salt other than cooking.",
    "Write a short note that thanks a neighbour for watering plants.",
    "What does a compiler do?",
    "Explain how a lever makes lifting easier.",
    "Give me a simple recipe for vegetable soup.",
    "How do bees find their way home?",
    "What is 17 plus 26? Show the steps.",
    "Write a function in Python that returns the larger of two numbers.",
    "Describe a rainy morning in a small town.",
    "What is the difference between a lake and a pond?",
    "List five things to pack for a day in the mountains.",
    "Why do we put stamps on letters?",
    "Explain what a budget is to a teenager.",
    "Tell a short story about a lost umbrella.",
    "How does a thermos keep tea hot?",
    "Which is heavier, a litre of oil or a litre of water, and why?",
    "Write two sentences that invite a friend to dinner.",
    "What should I check before I buy a used bicycle?",
    "How are shadows made?",
    "Give three reasons to learn a second language.",
    "What is a prime number? Name the first five.",
    "How can I fall asleep more easily?",
    "Explain why ships made of steel float.",
)


def own_questions() -> list[Prompt]:
    """The built-in set."""
    return [single_prompt(text, identity=f"own-{index}") for index, text in enumerate(QUESTIONS)]


def answered(target: LoadedTarget, prompts: Sequence[Prompt], *, max_tokens: int = _MAX_TOKENS) -> list[Text]:
    """Let the target continue each prompt greedily, without a drafter.

    Args:
        target: with or without a chat template; without, prompts are taken as the beginning of a text.
        prompts: of several turns only the first is asked; very long ones are passed over.
        max_tokens: of each answer.
    """
    raw = not target.tokenizer.has_chat_template
    limit = min(_MAX_PROMPT_TOKENS, target.contract.max_position_embeddings - max_tokens - 1)
    asked = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    encoded = [encode_prompt(prompt, target.tokenizer, raw=raw) for prompt in asked]
    kept = [ids for ids in encoded if len(ids) <= limit]
    if not kept:
        return []
    length = max(map(len, kept)) + max_tokens + 1
    engine = Engine(target, None, EngineSettings(max_num_seqs=min(_BATCH, len(kept)), max_model_len=length))
    results = engine.generate(kept, SamplingParameters(max_tokens=max_tokens))
    return [Text(result.prompt_ids + result.token_ids, len(result.prompt_ids)) for result in results]
