"""10,000 random requests, many of them impossible: each ends in a result or in one clear error, and nothing breaks.

Values are in range, at its edges, beyond it, or of another type; so are prompts. Every request is served among others,
and probes in between have to come out as in an engine that has seen nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fakes import ByteTokenizer, TableProposer, table_target
from tests.tiny import tiny_drafter_contract

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.structured import StructuredOutput
from paceline.errors import RequestError

VOCAB, MAX_MODEL_LEN, STOP_ID = 128, 40, 2
NUM_REQUESTS, PER_ROUND, PROBE_EVERY = 10_000, 20, 200

TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(25)) * 2
TABLE[:, 97:109] += 2.0  # letters, so that texts and forms have something to find
DRAFTS = TABLE.unsqueeze(1) + torch.randn(VOCAB, 3, VOCAB, generator=torch.Generator().manual_seed(26))

ENGINES: list[dict[str, Any]] = [
    {"max_num_seqs": 7},
    {"max_num_seqs": 1, "verify_method": "block", "method": "probabilistic"},
    {"max_num_seqs": 5, "verify_method": "match", "method": "greedy", "prefill_chunk_size": 4},
    {"max_num_seqs": 16, "verify_method": "coupled", "method": "probabilistic", "draft_length": "adaptive"},
    {"max_num_seqs": 20, "verify_method": "standard", "method": "probabilistic", "prefill_chunk_size": 1},
]
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    10**30,
    -(2**63) - 1,
    10**5000,
    0.5,
    -0.0,
    1e-300,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "7",
    b"7",
    (),
    [],
    {},
    [None],
    ("",),
    ("a", 3),
    [[1]],
    {1: 2},
    {"a": 1},
    {3: math.nan},
    {-1: 1.0},
    {VOCAB: 1.0},
    {5: 1000.0},
    1 + 2j,
    object(),
    len,
]


def make_engine(method: str | None = None, **settings: Any) -> Engine:
    target = table_target(TABLE, tokenizer=ByteTokenizer(), stop_token_ids=(STOP_ID,))
    proposer = None
    if method is not None:
        is_coupled = settings.get("verify_method") == "coupled"
        contract = tiny_drafter_contract(target.contract)
        proposer = TableProposer(DRAFTS, contract, method=method, is_coupled=is_coupled)
    return Engine(target, None, EngineSettings(max_model_len=MAX_MODEL_LEN, **settings), proposer=proposer)


def text(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefgh .") for _ in range(rng.randint(1, 4)))


def ids(rng: random.Random, least: int = 0) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(least, 6)))


def form(rng: random.Random) -> StructuredOutput:
    """Raises what a wrong form raises."""
    schemas = ['{"type":"integer"}', "true", "false", "{", '{"type":"nothing"}', '{"enum":["a","b"]}', '{"$ref":"#/x"}']
    values: dict[str, list[Any]] = {
        "json_schema": [*schemas, 5],
        "json_object": ["", "{}"],
        "regex": ["[a-f]{2,5}", "(", "a*", "", "\\d+", "é{3}", "(?=a)b"],
        "choice": [("ab", "c"), (), ("",), "ab", ("\u00e9",), ["a"]],
        "grammar": ['start: "a" start | "b"', "start: nothing", "x"],
        "xml": ["<a>"],
    }
    kind = rng.choice(list(values))
    return StructuredOutput(kind, rng.choice(values[kind]), rng.choice([None, None, None, "a", "", 3]))


SOUND: dict[str, Callable[[random.Random], Any]] = {
    "max_tokens": lambda rng: rng.choice([1, 2, 3, 5, 8, 12, 1000, 2**62]),
    "temperature": lambda rng: rng.choice([0, 0.0, 1e-6, 0.005, 0.3, 1, 1.7, 100.0, 1e30]),
    "top_k": lambda rng: rng.choice([0, 1, 3, VOCAB, 10**6]),
    "top_p": lambda rng: rng.choice([1.0, 0.9, 0.3, 1e-9]),
    "min_p": lambda rng: rng.choice([0.0, 0.05, 1.0, 1]),
    "seed": lambda rng: rng.choice([None, 0, -(2**63), 2**63 - 1, rng.randrange(2**32)]),
    "stop": lambda rng: tuple(text(rng) for _ in range(rng.randint(0, 3))),
    "stop_token_ids": ids,
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "include_stop_str_in_output": lambda rng: rng.random() < 0.5,
    "min_tokens": lambda rng: rng.choice([0, 1, 2]),
    "logit_bias": lambda rng: {token: rng.uniform(-100, 100) for token in ids(rng)},
    "allowed_token_ids": lambda rng: ids(rng, least=1),
    "repetition_penalty": lambda rng: rng.choice([1.0, 1.3, 0.5, 1e6, 1e-6]),
    "frequency_penalty": lambda rng: rng.choice([0.0, 2.0, -2.0, 0.3]),
    "presence_penalty": lambda rng: rng.choice([0, 2, -2, 0.4]),
    "bad_words": lambda rng: tuple(text(rng) for _ in range(rng.randint(0, 3))),
    "logprobs": lambda rng: rng.choice([None, 0, 1, 5, 32]),
    "logprobs_mode": lambda rng: rng.choice(["raw", "processed"]),
    "n": lambda rng: rng.choice([1, 1, 1, 2, 3]),
    "structured_output": form,
    "draft_length": lambda rng: rng.choice([None, "off", "fixed", "adaptive"]),
}


def make_sampling(rng: random.Random) -> SamplingParameters:
    """A few settings; in every second request one of them is anything at all."""
    names = rng.sample(list(SOUND), rng.randint(0, 6))
    values: dict[str, Any] = {"max_tokens": rng.randint(1, 8)} | {name: SOUND[name](rng) for name in names}
    if rng.random() < 0.5:
        values[rng.choice(list(SOUND))] = rng.choice(ODD)
    return SamplingParameters(**values)


def make_prompt(rng: random.Random) -> Any:
    prompt: list[Any] = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, 5, 9, MAX_MODEL_LEN - 1]))]
    if rng.random() < 0.15:
        prompt[rng.randrange(len(prompt))] = rng.choice([-1, VOCAB, 2**70, 1.5, "a", None, True, math.nan])
    elif rng.random() < 0.1:
        return rng.choice([[], (), None, "abc", 7, {1: 2}, {3}, [0] * MAX_MODEL_LEN, torch.tensor([3, 4]), b"ab"])
    return prompt


def submit(engine: Engine, rng: random.Random) -> list[tuple[str, SamplingParameters]]:
    """Names of the requests that this one came to; RequestError if it was refused."""
    sampling = make_sampling(rng)
    prompt = make_prompt(rng)
    if rng.random() < 0.5:
        return [(name, sampling) for name in engine.add_samples(prompt, sampling)]
    return [(engine.add_request(prompt, sampling), sampling)]


def check(result: RequestResult, sampling: SamplingParameters) -> None:
    """Whatever came out agrees with itself and with what was asked for."""
    tokens = result.token_ids
    assert result.finish_reason in ("stop", "length", "error")
    assert (result.error is None) == (result.finish_reason != "error")
    assert len(tokens) <= min(sampling.max_tokens, MAX_MODEL_LEN - len(result.prompt_ids))
    assert all(0 <= token < VOCAB for token in tokens)
    if sampling.allowed_token_ids is not None:
        assert set(tokens) <= set(sampling.allowed_token_ids)
    if result.finish_reason == "stop" and sampling.structured_output is None:  # a complete form ends at once
        assert len(tokens) >= sampling.min_tokens
    if sampling.logprobs is None:
        assert result.logprobs is None
    else:
        assert result.logprobs is not None
        assert [entry.token_id for entry in result.logprobs] == list(tokens)
        assert all(entry.logprob <= 1e-6 and len(entry.top) <= sampling.logprobs for entry in result.logprobs)
    records = result.trace.records
    assert len(tokens) == sum(len(record.emitted_ids) for record in records) + (result.trace.first_token_id is not None)


PROBES = [
    ([97, 98, 99], SamplingParameters(max_tokens=12, ignore_eos=True, frequency_penalty=0.3, logprobs=1)),
    ([100, 101], SamplingParameters(max_tokens=12, temperature=0.8, top_p=0.9, seed=77, repetition_penalty=1.2)),
]


def outcome(result: RequestResult) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.stop_reason


@pytest.mark.parametrize("index", range(len(ENGINES)))
def test_random_requests_end_well_and_leave_the_engine_sound(index: int) -> None:
    engine, rng = make_engine(**ENGINES[index]), random.Random(4000 + index)
    expected = [outcome(make_engine(**ENGINES[index]).generate([prompt], sampling)[0]) for prompt, sampling in PROBES]
    num_refused = num_tokens = num_ended = 0
    for start in range(0, NUM_REQUESTS // len(ENGINES), PER_ROUND):
        names: list[tuple[str, SamplingParameters]] = []
        for _ in range(PER_ROUND):
            try:
                names += submit(engine, rng)
            except RequestError as error:
                num_refused += 1
                assert 10 < len(error.message) < 600
        probes = []
        if start % PROBE_EVERY == 0:
            probes = [engine.add_request(prompt, sampling) for prompt, sampling in PROBES]
        while engine.has_unfinished():
            engine.step()
        for name, sampling in names:
            result = engine.result(name)
            check(result, sampling)
            num_tokens += len(result.token_ids)
        found = [engine.result(name) for name in probes]
        num_tokens += sum(len(result.token_ids) for result in found)
        num_ended += len(names) + len(found)
        assert [outcome(result) for result in found] in ([], expected)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_slots == engine.settings.max_num_seqs
    assert (stats.num_finished, stats.num_output_tokens) == (num_ended, num_tokens)
    assert stats.num_impossible_drafts == 0
    assert 0.2 < num_refused / (NUM_REQUESTS / len(ENGINES)) < 0.7
