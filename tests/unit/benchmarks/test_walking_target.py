"""Texts of the taught target: each goes on by its stride, the last token does not say which, and they can be learnt."""

from __future__ import annotations

import itertools

import torch
from benchmarks.random_kimi import kimi_config, random_kimi
from benchmarks.walking_target import VOCAB_SIZE, teach, walks


def test_a_text_goes_on_by_the_stride_that_it_begins_with() -> None:
    texts = walks(200, 20, torch.Generator().manual_seed(0))
    assert texts.min() >= 4 and texts.max() < VOCAB_SIZE
    successors: dict[tuple[int, int], set[int]] = {}
    followers: dict[int, set[int]] = {}
    for text in texts.tolist():
        for here, there in itertools.pairwise(text[1:]):
            successors.setdefault((text[0], here), set()).add(there)
            followers.setdefault(here, set()).add(there)
    assert {len(found) for found in successors.values()} == {1}
    assert max(map(len, followers.values())) == 8, "one for each stride"
    assert texts[0, 1:17].unique().numel() == 16, "no text comes back soon"


def test_lessons_teach() -> None:
    config = kimi_config(2, 1, 32, vocab_size=VOCAB_SIZE, q_lora_rank=12)
    model = random_kimi(config, torch.float32, torch.device("cpu"), seed=0)
    before = model.lm_head.weight.clone()
    right = teach(model, 12, seed=0)
    assert 0.0 <= right <= 1.0 and not torch.equal(model.lm_head.weight, before)
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
