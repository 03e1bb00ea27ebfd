"""Whatever drafts, structured output is valid, and greedily the same as without drafts.

Schemas are random and bounded: every text that they allow ends within the budget, so every request has to end by its
grammar. Models are random and know nothing of JSON; the vocabulary is bytes and some longer pieces.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from tests.fakes import ByteTokenizer, ReplayProposer
from tests.tiny import loaded, tiny_prompts

from paceline.engine.counters import EngineStats
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.grammar import BlockMasks, GrammarCompiler, GrammarState
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.engine.structured import StructuredOutput
from paceline.models.loading import LoadedDrafter, LoadedTarget

NUM_GENERATIONS, NUM_PER_TEST, NUM_SAMPLED = 2000, 250, 50
VOCAB_SIZE, EOS, MAX_TOKENS = 300, 2, 400
PIECES = {
    256: b'{"',
    257: b'":',
    258: b'","',
    259: b"true",
    260: b"nu",
    261: b"ll",
    262: b"12",
    263: b"\xf0\x9f",
    264: b"]}",
}
NAMES = ["a", "b", "id", "naïve", 'q"t', "12", "true"]
SCALARS = ["x", "", "long word", "é\n", 'a"b\\', 0, -7, 12.5, True, False, None]


def random_schema(draws: random.Random, depth: int = 3) -> dict[str, Any]:
    """Objects, arrays, alternatives and scalars, nested at most `depth` deep."""
    kinds = ["integer", "string", "boolean", "null", "enum", "const"]
    if depth > 0:
        kinds += ["object", "array", "anyOf"] * 2
    kind = draws.choice(kinds) if depth < 3 else draws.choice(["object", "object", "array", "anyOf"])
    match kind:
        case "object":
            names = draws.sample(NAMES, draws.randrange(4 if depth == 3 else 3))
            return {
                "type": "object",
                "properties": {name: random_schema(draws, depth - 1) for name in names},
                "required": [name for name in names if draws.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            fewest = draws.randrange(3)
            most = fewest + draws.randrange(2)
            return {"type": "array", "items": random_schema(draws, depth - 1), "minItems": fewest, "maxItems": most}
        case "anyOf":
            return {"anyOf": [random_schema(draws, depth - 1) for _ in range(2)]}
        case "integer":
            low = draws.randrange(-300, 300)
            return {"type": "integer", "minimum": low, "maximum": low + draws.randrange(200)}
        case "string":
            fewest = draws.randrange(3)
            return {"type": "string", "minLength": fewest, "maxLength": fewest + draws.randrange(4)}
        case "enum":
            return {"enum": draws.sample(SCALARS, draws.randrange(1, 5))}
        case "const":
            return {"const": draws.choice([*SCALARS, ["x", {"a": None}]])}
        case _:
            return {"type": kind}


@functools.cache
def models() -> tuple[LoadedTarget, LoadedDrafter]:
    return loaded(
        tokenizer=ByteTokenizer(PIECES),
        target_changes={"num_layers": 2, "vocab_size": VOCAB_SIZE},
        drafter_family="dflash2",
        num_layers=1,
        draft_sample_method="probabilistic",
    )


def requests(first: int, count: int, **changes: Any) -> dict[str, tuple[list[int], SamplingParameters]]:
    """Prompts and parameters of generations `first` to `first + count - 1`, each with a schema of its own."""
    made = {}
    for index in range(first, first + count):
        draws = random.Random(index)
        (prompt,) = tiny_prompts([draws.randrange(1, 9)], seed=index, vocab_size=256)
        wanted = StructuredOutput("json_schema", json.dumps(random_schema(draws), ensure_ascii=draws.random() < 0.5))
        parameters: dict[str, Any] = {"max_tokens": MAX_TOKENS, "seed": index, "structured_output": wanted}
        made[str(index)] = (prompt, SamplingParameters(**(parameters | changes)))
    return made


def run(
    batch: Mapping[str, tuple[list[int], SamplingParameters]],
    *,
    drafter: LoadedDrafter | None = None,
    scripts: Mapping[str, Sequence[int]] | None = None,
    max_num_seqs: int = 50,
    **choices: Any,
) -> tuple[dict[str, RequestResult], EngineStats]:
    """Run requests plainly, with a drafter, or with drafts from scripts."""
    settings = EngineSettings(max_num_seqs=max_num_seqs, max_model_len=MAX_TOKENS + 10, **choices)
    proposer = None
    if scripts is not None:
        proposer = ReplayProposer(lambda slot: scripts[engine.request_in_slot(slot) or ""], 7)
    engine = Engine(models()[0], drafter, settings, proposer=proposer)
    for name, (prompt, sampling) in batch.items():
        engine.add_request(prompt, sampling, request_id=name)
    while engine.has_unfinished():
        engine.step()
    return {name: engine.result(name) for name in batch}, engine.stats()


def script(plain: RequestResult) -> list[int]:
    """The plain result, every sixth token wrong, and on past its end."""
    tokens = [*plain.prompt_ids, *plain.token_ids, ord(","), EOS, ord("}"), EOS]
    first = len(plain.prompt_ids) + 4
    return [
        (token + 1) % VOCAB_SIZE if place >= first and (place - first) % 6 == 0 else token
        for place, token in enumerate(tokens)
    ]


def require_valid(result: RequestResult, sampling: SamplingParameters) -> None:
    assert sampling.structured_output is not None
    schema = json.loads(str(sampling.structured_output.value))
    assert (result.finish_reason, result.error) == ("stop", None), (schema, result.text)
    jsonschema.Draft202012Validator(schema).validate(json.loads(result.text))


def acceptance(results: Iterable[RequestResult]) -> float:
    """Accepted drafts per step."""
    accepted = [record.num_accepted for result in results for record in result.trace.records]
    return sum(accepted) / len(accepted)


@pytest.mark.parametrize("first", range(0, NUM_GENERATIONS, NUM_PER_TEST))
def test_greedy_output_is_valid_and_the_same_with_drafts(first: int) -> None:
    batch = requests(first, NUM_PER_TEST)
    plain, _ = run(batch)
    is_replayed = first > 0  # a random drafter's own drafts are all refused, and slow to make
    if is_replayed:
        drafted, stats = run(batch, scripts={name: script(result) for name, result in plain.items()})
    else:
        drafted, stats = run(batch, drafter=models()[1], max_num_seqs=11)
    for name, (_, sampling) in batch.items():
        require_valid(drafted[name], sampling)
        assert drafted[name].token_ids == plain[name].token_ids
    assert stats.num_impossible_drafts == 0
    if is_replayed:
        assert acceptance(drafted.values()) > 1.5, "drafts have to be accepted for this to mean anything"


@pytest.mark.parametrize("method", ["standard", "block", "match", "coupled"])
def test_sampled_output_is_valid_with_drafts(method: str) -> None:
    batch = requests(NUM_GENERATIONS, NUM_SAMPLED, temperature=1.0)
    drafted, stats = run(batch, drafter=models()[1], verify_method=method)
    for name, (_, sampling) in batch.items():
        require_valid(drafted[name], sampling)
    assert stats.num_impossible_drafts == 0


def test_a_form_behind_free_text_is_valid_and_the_same_with_drafts() -> None:
    batch = {}
    for name, (prompt, sampling) in requests(5000, 30, max_tokens=60).items():
        wanted = replace(sampling.structured_output, begins_after="e")
        batch[name] = (prompt, replace(sampling, structured_output=wanted))
    plain, _ = run(batch)
    drafted, _ = run(batch, scripts={name: script(result) for name, result in plain.items()})
    num_complete = 0
    for name, (_, sampling) in batch.items():
        assert drafted[name].token_ids == plain[name].token_ids
        _, _, text = drafted[name].text.partition("e")
        if drafted[name].finish_reason == "stop":
            num_complete += 1
            require_valid(replace(drafted[name], text=text), sampling)
    assert num_complete > 10


def test_masks_that_forget_the_drafts_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = requests(0, 24)
    plain, _ = run(batch)
    really_masks = GrammarState.masks

    def forgetful(self: GrammarState, draft_ids: Sequence[int], num_rows: int) -> BlockMasks:
        block = really_masks(self, (), num_rows)
        return block._replace(mask_LW=block.mask_LW[:1].expand(num_rows, -1), num_kept_drafts=len(draft_ids))

    monkeypatch.setattr(GrammarState, "masks", forgetful)
    drafted, _ = run(batch, scripts={name: script(result) for name, result in plain.items()})
    assert any(drafted[name].token_ids != plain[name].token_ids for name in batch)


def random_value(draws: random.Random, schema: dict[str, Any]) -> Any:
    """A value that the schema accepts, its properties in the schema's order, the only one that the grammar writes."""
    match schema:
        case {"enum": values}:
            return draws.choice(values)
        case {"const": value}:
            return value
        case {"anyOf": choices}:
            return random_value(draws, draws.choice(choices))
        case {"type": "object"}:
            names = [name for name in schema["properties"] if name in schema["required"] or draws.random() < 0.5]
            return {name: random_value(draws, schema["properties"][name]) for name in names}
        case {"type": "array"}:
            count = draws.randint(schema["minItems"], schema["maxItems"])
            return [random_value(draws, schema["items"]) for _ in range(count)]
        case {"type": "integer"}:
            return draws.randint(schema["minimum"], schema["maximum"])
        case {"type": "string"}:
            length = draws.randint(schema["minLength"], schema["maxLength"])
            return "".join(draws.choice('aé"\\\n\t\x01😀 /\u2028{') for _ in range(length))
        case _:
            return {"boolean": draws.random() < 0.5, "null": None}[schema["type"]]


def test_the_grammar_lets_every_valid_value_pass() -> None:
    compiler = GrammarCompiler(ByteTokenizer(), vocab_size=256, stop_token_ids=(EOS,))
    for seed in range(300):
        draws = random.Random(seed)
        schema = random_schema(draws)
        value = random_value(draws, schema)
        jsonschema.Draft202012Validator(schema).validate(value)
        state = compiler.start(StructuredOutput("json_schema", json.dumps(schema)))
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
        block = state.masks([*text, EOS], len(text) + 1)
        assert block.num_kept_drafts == len(text) + 1, (schema, text[: block.num_kept_drafts])
        assert block.mask_LW[-1, 0] >> EOS & 1, (schema, text)
