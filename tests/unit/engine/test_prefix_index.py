"""The index alone: which block a text lives in as blocks come and go."""

from __future__ import annotations

import pytest

from paceline.engine.prefix_chain import PrefixChain, PrefixIdentity
from paceline.engine.prefix_index import CachedBlock, CachedText, PrefixIndex

TEXT = [1, 2, 3, 4, 5, 6]


def make(num_texts: int = 3) -> tuple[PrefixIndex, PrefixChain, list[CachedText]]:
    """Blocks 1, 2, 3 hold a text of two tokens each."""
    index, chain = PrefixIndex(9, 2), PrefixChain(PrefixIdentity("target", None), 2)
    texts: list[CachedText] = []
    for block in range(1, 1 + num_texts):
        texts.append(enter(index, chain, block, block - 1, texts[-1] if texts else None))
    return index, chain, texts


def enter(
    index: PrefixIndex,
    chain: PrefixChain,
    block: int,
    position: int,
    parent: CachedText | None,
    *,
    has_draft_context: bool = True,
) -> CachedText:
    digest = chain.digests(TEXT, position + 1)[position]
    tokens = TEXT[2 * position : 2 * position + 2]
    text = index.enter(block, digest, parent, tokens, next_id=None, has_draft_context=has_draft_context)
    assert text is not None
    return text


def test_texts_are_found_and_listed_parents_first() -> None:
    index, chain, texts = make()
    assert [hit.block for hit in index.match(chain, TEXT, most_tokens=6)] == [1, 2, 3]
    assert index.match(chain, [1, 2, 9, 9], most_tokens=1) == []
    assert list(index) == texts
    assert [index.text(block) for block in (1, 2, 3, 4)] == [*texts, None]
    assert len(index) == 3


def test_another_text_does_not_get_a_taken_digest() -> None:
    index, chain, (first, *_) = make()
    digest = chain.digests(TEXT, 1)[0]
    assert index.enter(4, digest, None, [7, 8], next_id=None, has_draft_context=True) is None
    assert index.enter(4, digest, first, [1, 2], next_id=None, has_draft_context=True) is None
    assert index.enter(4, digest, None, [1, 2], next_id=3, has_draft_context=True) is None
    assert index.text(4) is None


def test_copies_take_turns() -> None:
    index, chain, (first, *_) = make()
    enter(index, chain, 5, 0, None, has_draft_context=False)
    enter(index, chain, 6, 0, None)
    enter(index, chain, 4, 0, None, has_draft_context=False)
    assert index.best_copy(first) == 6
    index.exchange(first, 6, keep=True)
    assert (first.block, sorted(first.copies)) == (6, [1, 4, 5])
    assert index.drop_copy(1) is first
    assert index.best_copy(first) == 4
    index.exchange(first, 4, keep=False)
    assert (first.block, first.copies) == (4, [5])
    assert [index.text(block) for block in (1, 4, 5, 6)] == [None, first, first, None]
    assert index.match(chain, TEXT, most_tokens=2) == [CachedBlock(4, False)]
    with pytest.raises(AssertionError, match="no copy"):
        index.drop_copy(4)


def test_removal_takes_what_lies_behind() -> None:
    index, chain, texts = make()
    enter(index, chain, 7, 2, texts[1])
    assert index.remove(texts[1]) == texts[1:]
    assert [index.text(block) is None for block in (1, 2, 3, 7)] == [False, True, True, True]
    assert list(index) == texts[:1]
    assert not texts[0].children
    again = enter(index, chain, 2, 1, texts[0])
    assert index.match(chain, TEXT, most_tokens=6)[-1].block == 2
    assert texts[0].children == {again}
