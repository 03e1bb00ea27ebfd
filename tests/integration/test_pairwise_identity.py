"""Greedy drafting changes nothing, whatever else a request asks for: every pair of options occurs in some combination.

In row-invariant arithmetic the results of a batch with drafts are compared with those of each request alone without:
token ids, text, ends, errors and log-probabilities, bit for bit. Drafters are random (next to nothing is accepted) and
replays of the right text, with and without mistakes (nearly everything is); at the end, the shipped drafter on its own
target.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from allpairspy import AllPairs
from tests.fakes import ByteTokenizer, ReplayProposer
from tests.tiny import loaded, tiny_prompts

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.structured import StructuredOutput
from paceline.evaluation.prompts import encode_prompt, single_prompt
from paceline.models.loading import LoadedDrafter, LoadedTarget, load_drafter, load_target
from paceline.ops import target_distribution

MAX_TOKENS = 14
# Two letters, some with a full stop: texts that stop strings, bad words and forms can find something in.
PIECES = {
    index: bytes([97 + index % 16]) + (b"." if index % 5 == 0 else bytes([97 + index // 16 % 16]))
    for index in range(256, 512)
}
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","y"]}},"required":["a","b"]}'
FORMS: dict[str, StructuredOutput | None] = {
    "free": None,
    "schema": StructuredOutput("json_schema", SCHEMA),
    "object": StructuredOutput("json_object"),
    "array": StructuredOutput("json_schema", '{"type":"array","items":{"type":"boolean"},"maxItems":2}'),
    "regex": StructuredOutput("regex", "[a-d.]{4,30}"),
    "choice": StructuredOutput("choice", ("alpha", "beta.", "gamma")),
    "lark": StructuredOutput("grammar", 'start: "a" | "b" start'),
    "after a full stop": StructuredOutput("regex", "[e-h]{3,9}", begins_after="."),
}
ENDS: dict[str, dict[str, Any]] = {
    "own": {},
    "ignored": {"ignore_eos": True},
    "texts": {"stop": ("c.", "ab", "zz")},
    "texts shown": {"stop": (".",), "include_stop_str_in_output": True},
    "ids": {"stop_token_ids": tuple(range(260, 512, 9))},
}
FACTORS: dict[str, Sequence[Any]] = {
    "form": list(FORMS),
    "drafter": [
        "dflash",
        "dflash2",
        "dspark",
        "dspark of half the vocabulary",
        "eagle3",
        "replay",
        "replay with mistakes",
        "replay of nonsense",
    ],
    "end": list(ENDS),
    "logprobs": [{}, {"logprobs": 0}, {"logprobs": 3}, {"logprobs": 2, "logprobs_mode": "processed"}],
    "verify_method": ["standard", "block", "match", "coupled"],
    "num_draft_tokens": [1, 3, 7],
    "draft_length": [None, "fixed", "adaptive", "off"],
    "batch": [1, 3, 8],
    "draft_method": ["greedy", "probabilistic"],
    "bias": [{}, {"logit_bias": {300: 4.0, 98: 3.0, 2: -5.0, 123: 1.5}}],
    "allowed": [{}, {"allowed_token_ids": tuple(index for index in range(512) if index % 7 != 3)}],
    "min_tokens": [{}, {"min_tokens": 6}],
    "repetition": [{}, {"repetition_penalty": 1.3}],
    "frequency": [{}, {"frequency_penalty": 0.7}],
    "presence": [{}, {"presence_penalty": -0.4}],
    "bad_words": [{}, {"bad_words": ("a.", "b", "ck")}],
}


@dataclass(frozen=True)
class Combination:
    """One row of the covering set."""

    index: int
    values: tuple[tuple[str, Any], ...]

    def __getattr__(self, name: str) -> Any:
        """The value of a factor."""
        return dict(self.values)[name]

    @property
    def sampling(self) -> SamplingParameters:
        """What the request asks for."""
        changes: dict[str, Any] = {**ENDS[self.end]}
        for name in ("logprobs", "bias", "allowed", "min_tokens", "repetition", "frequency", "presence", "bad_words"):
            changes |= getattr(self, name)
        return SamplingParameters(
            max_tokens=MAX_TOKENS, structured_output=FORMS[self.form], draft_length=self.draft_length, **changes
        )

    @property
    def prompt(self) -> list[int]:
        """Short or long, half of them with repeated tokens."""
        (prompt,) = tiny_prompts([3 + 5 * (self.index % 4)], seed=self.index)
        return prompt + prompt[:2] * (self.index % 2)


COMBINATIONS = [
    Combination(index, tuple(zip(FACTORS, row, strict=True))) for index, row in enumerate(AllPairs(FACTORS.values()))
]


@functools.cache
def target() -> LoadedTarget:
    return loaded("qwen3", tokenizer=ByteTokenizer(PIECES))[0]


@functools.cache
def drafter(name: str) -> LoadedDrafter:
    family, _, is_reduced = name.partition(" of ")
    return loaded(
        "qwen3", drafter_family=family, **({"draft_vocab_size": 256, "has_own_head": True} if is_reduced else {})
    )[1]


@functools.cache
def plain(index: int) -> RequestResult:
    """The request alone, without anything that drafts."""
    combination = COMBINATIONS[index]
    (result,) = plain_engine().generate([combination.prompt], combination.sampling)
    return result


@functools.cache
def plain_engine() -> Engine:
    return Engine(target(), None, EngineSettings(max_num_seqs=1, max_model_len=64))


def companions(combination: Combination) -> list[Combination]:
    """The combination amid others, never in the same place."""
    size = combination.batch
    order = [(combination.index + 11 * offset) % len(COMBINATIONS) for offset in range(size)]
    turn = combination.index % size
    return [COMBINATIONS[index] for index in order[turn:] + order[:turn]]


def run(combination: Combination) -> list[tuple[Combination, RequestResult]]:
    """A batch with drafts, in fewer slots than requests."""
    batch = companions(combination)
    settings = EngineSettings(
        max_num_seqs=max(1, len(batch) - 2),
        max_model_len=64,
        num_draft_tokens=combination.num_draft_tokens,
        draft_sample_method=None if combination.verify_method == "coupled" else combination.draft_method,
        verify_method=combination.verify_method,
    )
    if not combination.drafter.startswith("replay"):
        engine = Engine(target(), drafter(combination.drafter), settings)
    else:
        scripts = {str(one.index): script(one, combination.drafter) for one in batch}

        def script_of_slot(slot: int) -> Sequence[int] | None:
            return scripts.get(engine.request_in_slot(slot) or "")

        proposer = ReplayProposer(script_of_slot, combination.num_draft_tokens)
        engine = Engine(target(), None, settings, proposer=proposer)
    for one in batch:
        engine.add_request(one.prompt, one.sampling, request_id=str(one.index))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().num_impossible_drafts == 0
    return [(one, engine.result(str(one.index))) for one in batch]


def script(one: Combination, kind: str) -> list[int]:
    """The right text; mistakes in every third token; or other tokens throughout. It goes on behind the text's end."""
    text = [*one.prompt, *plain(one.index).token_ids, *range(300, 308)]
    wrong = {"replay": 10**9, "replay with mistakes": 3, "replay of nonsense": 1}[kind]
    return [token if place % wrong or not place else (token + 1 + place) % 512 for place, token in enumerate(text)]


def differences(found: RequestResult, expected: RequestResult) -> list[str]:
    names = ("token_ids", "text", "finish_reason", "stop_reason", "error", "logprobs")
    return [name for name in names if getattr(found, name) != getattr(expected, name)]


def test_the_set_covers_every_pair_with_sixty_combinations_or_more() -> None:
    assert len(COMBINATIONS) >= 60
    names = list(FACTORS)
    for first in range(len(names)):
        for second in range(first):
            seen = {(str(row.values[first][1]), str(row.values[second][1])) for row in COMBINATIONS}
            assert len(seen) == len(FACTORS[names[first]]) * len(FACTORS[names[second]])


@pytest.mark.parametrize("index", range(len(COMBINATIONS)))
def test_drafting_changes_nothing(index: int) -> None:
    combination = COMBINATIONS[index]
    for one, result in run(combination):
        assert differences(result, plain(one.index)) == [], f"request {one.index}: {one.values}"
        assert result.verify_method == combination.verify_method and result.is_lossless
        assert result.logprobs is None or len(result.logprobs) == len(result.token_ids)


def test_the_combinations_do_something() -> None:
    """Stops, forms and budgets all end requests; few are impossible; right drafts are accepted."""
    results = [plain(combination.index) for combination in COMBINATIONS]
    reasons = [result.finish_reason for result in results]
    assert min(reasons.count("stop"), reasons.count("length")) > 10
    assert reasons.count("error") < len(reasons) / 4
    replayed = [one for one in COMBINATIONS if one.drafter == "replay" and one.draft_length != "off"]
    accepted = [record.num_accepted for one in replayed for _, result in run(one) for record in result.trace.records]
    assert sum(accepted) > len(accepted)


def test_a_forgotten_draft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: rules see the text before the block only."""
    apply_rules = target_distribution.apply_token_rules
    penalised = [one for one in COMBINATIONS if one.repetition and one.frequency and one.drafter == "replay"]
    for one in penalised:
        plain(one.index)

    def forgetful(logits_BLV: Any, draft_ids_BK: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        return apply_rules(logits_BLV, torch.full_like(draft_ids_BK, -1), *arguments, **options)

    monkeypatch.setattr(target_distribution, "apply_token_rules", forgetful)
    assert penalised and any(differences(result, plain(one.index)) for row in penalised for one, result in run(row))


SHIPPED = Path(__file__).parents[2] / "drafters" / "smollm2-135m-instruct-dflash"
PERSON = '{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}},"required":["name","age"]}'


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="a source archive comes without the drafter")
def test_a_trained_drafter_changes_nothing_on_a_real_target() -> None:
    real = load_target(
        "smollm2-135m-instruct", dtype="float32", device="cpu", linear_mode="row_invariant", offline=True
    )
    questions = ["Describe a person as JSON.", "Name three colours."]
    prompts = [encode_prompt(single_prompt(text, identity=text), real.tokenizer) for text in questions]
    each = [
        SamplingParameters(max_tokens=10, structured_output=StructuredOutput("json_schema", PERSON), logprobs=1),
        SamplingParameters(max_tokens=10, repetition_penalty=1.2, bad_words=("red",), logit_bias={314: 1.0}),
    ]
    expected = Engine(real, None, EngineSettings(max_num_seqs=1, max_model_len=96)).generate(prompts, each)
    settings = EngineSettings(max_num_seqs=2, max_model_len=96, num_draft_tokens=4, verify_method="block")
    engine = Engine(real, load_drafter(str(SHIPPED), real, offline=True), settings)
    found = engine.generate(prompts[::-1], each[::-1])[::-1]
    assert [differences(one, other) for one, other in zip(found, expected, strict=True)] == [[], []]
    assert engine.stats().num_accepted > 5
