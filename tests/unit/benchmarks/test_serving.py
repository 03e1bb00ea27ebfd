from __future__ import annotations

import pytest
import torch
from benchmarks.serving import SetToServe, serve, serve_sets
from tests import tiny

from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult, SamplingParameters
from paceline.errors import NumericError
from paceline.models.layers import set_linear_mode


def test_results_come_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = tiny.loaded()
    prompts = tiny.tiny_prompts([5, 7, 6])
    samplings = [SamplingParameters(max_tokens=count, ignore_eos=True) for count in (9, 1, 4)]
    results = serve(Engine(target, drafter, EngineSettings(max_num_seqs=2)), prompts, samplings, "tiny")
    assert [list(result.prompt_ids) for result in results] == prompts
    assert [len(result.token_ids) for result in results] == [9, 1, 4]
    captured = capsys.readouterr()
    assert captured.out == "" and "tiny: 3 of 3 prompts" in captured.err


def test_broken_numbers_end_the_run() -> None:
    target, _ = tiny.loaded()
    with torch.no_grad():
        target.model.norm.weight.fill_(torch.nan)
    set_linear_mode(target.model, target.linear_mode)  # what serving prepared from the weights follows them
    engine = Engine(target, None, EngineSettings(max_num_seqs=2))
    with pytest.raises(NumericError, match="tiny: a request ended in an error"):
        serve(engine, tiny.tiny_prompts([5]), [SamplingParameters(max_tokens=4)], "tiny")


def sets_of(*sizes: int) -> dict[str, SetToServe]:
    """Set i is named by its letter; its prompt j may get 3 + i + j tokens."""
    sets = {}
    for index, size in enumerate(sizes):
        prompts = tiny.tiny_prompts([5 + prompt for prompt in range(size)], seed=index)
        samplings = [SamplingParameters(max_tokens=3 + index + prompt, ignore_eos=True) for prompt in range(size)]
        sets["abc"[index]] = SetToServe(prompts, samplings)
    return sets


def test_sets_share_the_slots_and_come_one_by_one() -> None:
    target, drafter = tiny.loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=8))
    sets, found, num_running = sets_of(2, 3, 1), dict[str, list[RequestResult]](), []

    def take(name: str, results: list[RequestResult]) -> None:
        found[name] = results
        num_running.append(engine.stats().num_running)

    assert serve_sets(engine, sets, take, label="all") == []
    assert sorted(found) == ["a", "b", "c"] and num_running[0] > 0 and num_running[-1] == 0
    for name, results in found.items():
        assert [list(result.prompt_ids) for result in results] == sets[name].prompts
        assert [len(result.token_ids) for result in results] == [one.max_tokens for one in sets[name].samplings]
        alone = serve(Engine(target, drafter), sets[name].prompts, sets[name].samplings, name)
        assert [result.token_ids for result in results] == [result.token_ids for result in alone]


def test_after_the_time_sets_that_began_are_finished_and_others_left_out() -> None:
    target, drafter = tiny.loaded()
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=1))
    calls: list[None] = []

    def is_time_up() -> bool:
        calls.append(None)
        return len(calls) > 2

    done: list[str] = []
    left_out = serve_sets(
        engine, sets_of(2, 3, 1), lambda name, _: done.append(name), label="all", is_time_up=is_time_up
    )
    assert (done, left_out) == (["a"], ["b", "c"])
    assert not engine.has_unfinished() and engine.stats().num_free_slots == 1
    left_out = serve_sets(engine, sets_of(1), lambda name, _: done.append(name), label="all", is_time_up=lambda: True)
    assert (done, left_out) == (["a"], ["a"])
