"""Which ids are drafted: by number, by coverage, and when none are left out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes import ByteTokenizer
from tests.tiny import EOS_ID, loaded
from tests.tiny_run import ASSISTANT, END, USER, ChatByteTokenizer

from paceline.engine import short_list as module
from paceline.engine.settings import EngineSettings
from paceline.engine.short_list import auto_size, choose_short_list
from paceline.errors import ConfigError, RequestError
from paceline.models.loading import LoadedDrafter, LoadedTarget

VOCAB_SIZE = 6000


def with_counts(counts: dict[int, int], tokenizer: Any = None, **changes: Any) -> tuple[LoadedTarget, LoadedDrafter]:
    target, drafter = loaded(tokenizer=tokenizer, target_changes={"vocab_size": VOCAB_SIZE}, **changes)
    counts_W = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    for token, count in counts.items():
        counts_W[token] = count
    return target, replace(drafter, token_counts_W=counts_W)


def test_a_number_takes_the_most_frequent_ids_and_the_lower_of_equals() -> None:
    target, drafter = with_counts({5000: 7, 4000: 3, 4500: 3, 9: 1})
    chosen = choose_short_list(target, drafter, 3)
    assert chosen is not None
    assert chosen.ids_V.tolist() == [EOS_ID, 4000, 5000], "the stop id comes first, though no text has it"
    assert chosen.coverage == 10 / 14
    more = choose_short_list(target, drafter, 7)
    assert more is not None and more.ids_V.tolist() == [0, 1, EOS_ID, 9, 4000, 4500, 5000] and more.coverage == 1.0


def test_ids_of_the_chat_template_are_listed() -> None:
    target, drafter = with_counts({5000: 7, 4000: 3}, ChatByteTokenizer())
    chosen = choose_short_list(target, drafter, 4)
    assert chosen is not None and chosen.ids_V.tolist() == sorted([END, USER, ASSISTANT, 5000])
    with pytest.raises(ConfigError, match=r"draft_vocab_size is 2; it has to be from 3, .* to 6000"):
        choose_short_list(target, drafter, 2)


def test_a_template_that_refuses_a_turn_without_text_is_no_obstacle() -> None:
    class Refusing(ByteTokenizer):
        has_chat_template = True

        def encode_chat(self, messages: Any) -> list[int]:
            raise RequestError("say something")

    target, drafter = with_counts({5000: 7}, Refusing())
    chosen = choose_short_list(target, drafter, 2)
    assert chosen is not None and chosen.ids_V.tolist() == [EOS_ID, 5000]


def test_auto_is_the_least_multiple_that_covers_enough() -> None:
    even = torch.ones(5000, dtype=torch.int64)
    assert auto_size(even) == 5120, "99.5 % of 5000 equal ids is 4975"
    assert auto_size(torch.tensor([199, 1, 0, 0])) == 1024
    assert auto_size(torch.tensor([1] + [0] * 4000), num_always=1025) == 2048
    border = torch.cat((torch.full((1024,), 995), torch.tensor([5 * 1024]), torch.zeros(4000, dtype=torch.int64)))
    assert auto_size(border) == 1024, "exactly 99.5 %"
    border[1023] -= 1
    assert auto_size(border) == 2048


def test_auto_lists_on_a_cpu_where_it_is_under_half() -> None:
    target, drafter = with_counts({token: 5 for token in range(100, 1000)})
    chosen = choose_short_list(target, drafter, "auto")
    assert chosen is not None and len(chosen.ids_V) == 1024 and chosen.coverage == 1.0
    spread = replace(drafter, token_counts_W=torch.ones(VOCAB_SIZE, dtype=torch.int64))
    assert choose_short_list(target, spread, "auto") is None
    assert choose_short_list(target, replace(drafter, token_counts_W=None), "auto") is None
    weight = SimpleNamespace(device=torch.device("cuda"))
    elsewhere = SimpleNamespace(norm=SimpleNamespace(weight=weight))
    assert choose_short_list(replace(target, model=elsewhere), drafter, "auto") is None


@pytest.mark.parametrize("asked", ["full", VOCAB_SIZE])
def test_all_ids_are_no_list(asked: Any) -> None:
    target, drafter = with_counts({5: 1})
    assert choose_short_list(target, drafter, asked) is None


def test_refusals_name_both_sides() -> None:
    target, drafter = with_counts({5: 1})
    with pytest.raises(ConfigError, match="paceline capture counts") as refused:
        choose_short_list(target, replace(drafter, token_counts_W=None), 100)
    assert "tests/tiny-drafter" in str(refused.value)
    with pytest.raises(ConfigError, match="to 6000, the whole vocabulary"):
        choose_short_list(target, drafter, VOCAB_SIZE + 1)
    target, drafter = with_counts({5: 1}, drafter_family="eagle3", draft_vocab_size=100, has_own_head=True)
    with pytest.raises(ConfigError, match="is 50; the drafter has a vocabulary of its own, 100 of 6000"):
        choose_short_list(target, drafter, 50)
    assert choose_short_list(target, drafter, "auto") is None


@pytest.mark.parametrize("asked", [0, -1, True, 1.5, "some", None])
def test_what_is_no_size(asked: Any) -> None:
    with pytest.raises(ConfigError, match="neither a number of ids nor 'auto' or 'full'"):
        EngineSettings(draft_vocab_size=asked)


def test_the_choice_repeats() -> None:
    counts = torch.randint(0, 4, (VOCAB_SIZE,), generator=torch.Generator().manual_seed(1))
    target, drafter = with_counts({})
    drafter = replace(drafter, token_counts_W=counts)
    first, again = (choose_short_list(target, drafter, 1000) for _ in range(2))
    assert first is not None and again is not None and torch.equal(first.ids_V, again.ids_V)
    assert bool((first.ids_V.diff() > 0).all()) and module.AUTO_COVERAGE == 0.995
