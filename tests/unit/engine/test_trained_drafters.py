"""Trained drafters on the tiny K3: plain decoding's text in any order of admission, whatever of a block is kept.

They know the first tokens of every answer by heart, so that blocks are kept whole, in part and not at all.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path

import pytest
from tests.hybrid_runs import GREEDY, UNDRAFTED, checked, k3_target, prompts_of, require_empty, run, stepwise_text
from tests.trained_kimi import FAMILIES, train_by_heart

from paceline.engine.engine import Engine
from paceline.models.loading import LoadedDrafter, load_drafter

PROMPTS = dict(zip("abcd", prompts_of([9, 21, 5, 14]), strict=True))
_KNOWN = 13  # tokens of each answer that were learnt


@functools.cache
def trained(family: str) -> LoadedDrafter:
    target = k3_target()
    texts = [[*prompt, *stepwise_text(target, prompt, _KNOWN)] for prompt in PROMPTS.values()]
    with tempfile.TemporaryDirectory() as folder:
        drafter = train_by_heart(Path(folder), family, target, texts, drafter_block_size=5)
        return load_drafter(str(drafter), target)


def texts_of(engine: Engine, order: str, undrafted: str = "", steps_between: int = 0) -> dict[str, tuple[int, ...]]:
    """Answers to requests that arrive one after the other."""
    for name in order:
        engine.add_request(PROMPTS[name], UNDRAFTED if name in undrafted else GREEDY, name)
        for _ in range(steps_between):
            engine.step()
    return {name: tuple(result.token_ids) for name, result in zip(order, run(engine, list(order)), strict=True)}


@pytest.mark.parametrize(
    "family",
    [family if family == "dspark-latent" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
def test_greedy_text_is_plain_decodings(family: str) -> None:
    target, drafter = k3_target(), trained(family)
    assert (drafter.contract.latent is not None) == (family == "dspark-latent")
    expected = {name: stepwise_text(target, prompt, GREEDY.max_tokens) for name, prompt in PROMPTS.items()}
    engine = checked(target, drafter, max_num_seqs=3)
    assert texts_of(engine, "abcd") == expected
    records = list(itertools.chain.from_iterable(engine.result(name).trace.records for name in "abcd"))
    kept = {record.num_verified_accepted for record in records}
    assert len(kept) >= 3 and {0, drafter.num_draft_tokens} <= kept, f"blocks were kept by {sorted(kept)} drafts only"
    require_empty(engine)
    for order, undrafted, steps_between in (("dbca", "b", 0), ("cabd", "cd", 2)):
        engine = checked(target, drafter, max_num_seqs=2)
        assert texts_of(engine, order, undrafted, steps_between) == expected
        require_empty(engine)
