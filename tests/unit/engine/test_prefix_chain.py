"""Digests: one per full block, of everything before it, and of nothing else."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine import prefix_chain
from paceline.engine.prefix_chain import PrefixChain, PrefixIdentity

IDENTITY = PrefixIdentity("target", "drafter")
AHEAD = replace(IDENTITY, reads_ahead=True)
BLOCK = 4


def digests_of(token_ids: list[int], identity: PrefixIdentity = IDENTITY, block_size: int = BLOCK) -> list[bytes]:
    chain = PrefixChain(identity, block_size)
    return chain.digests(token_ids, chain.num_blocks(len(token_ids)))


@given(st.lists(st.integers(0, 2**40), max_size=30), st.integers(0, 30), st.booleans())
def test_a_text_that_grew_has_the_digests_of_one_that_was_there_at_once(text, first, reads_ahead) -> None:
    chain = PrefixChain(AHEAD if reads_ahead else IDENTITY, BLOCK)
    early = chain.digests(text[:first], chain.num_blocks(len(text[:first])))
    grown = chain.digests(text, chain.num_blocks(len(text)))
    assert grown == digests_of(text, chain.identity)
    assert grown[: len(early)] == early
    assert chain.digests(text, len(early)) == early


@pytest.mark.parametrize("changed", range(12))
def test_a_changed_token_changes_its_block_and_all_behind_it(changed: int) -> None:
    text = list(range(100, 112))
    other = [*text[:changed], 7, *text[changed + 1 :]]
    equal = [a == b for a, b in zip(digests_of(text), digests_of(other), strict=True)]
    assert equal == [True] * (changed // BLOCK) + [False] * (3 - changed // BLOCK)


@pytest.mark.parametrize(("num_tokens", "plain", "ahead"), [(0, 0, 0), (3, 0, 0), (4, 1, 0), (5, 1, 1), (8, 2, 1)])
def test_a_block_has_a_digest_once_all_that_its_keys_depend_on_is_known(num_tokens, plain, ahead) -> None:
    assert len(digests_of(list(range(num_tokens)))) == plain
    assert len(digests_of(list(range(num_tokens)), AHEAD)) == ahead


def test_reading_ahead_takes_the_token_behind_a_block_into_its_digest() -> None:
    text, other = [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]
    assert digests_of(text) == digests_of(other)
    assert digests_of(text, AHEAD) != digests_of(other, AHEAD)
    chain = PrefixChain(AHEAD, BLOCK)
    assert chain.next_id(text, 0) == 5
    assert PrefixChain(IDENTITY, BLOCK).next_id(text, 0) is None


def test_no_two_identities_share_a_digest() -> None:
    identities = [
        IDENTITY,
        replace(IDENTITY, target="other"),
        replace(IDENTITY, drafter="other"),
        replace(IDENTITY, drafter=None),
        replace(IDENTITY, drafter="None"),
        replace(IDENTITY, adapter="a"),
        replace(IDENTITY, salt="a"),
        replace(IDENTITY, salt=""),
        AHEAD,
        PrefixIdentity("targetdrafter", ""),
        PrefixIdentity("", "targetdrafter"),
    ]
    digests = [digest for identity in identities for digest in digests_of(list(range(9)), identity)]
    assert len(set(digests)) == 2 * len(identities)
    assert digests_of(list(range(8)), block_size=8)[0] != digests_of(list(range(8)), block_size=4)[1]


def test_an_earlier_digest_stands_before_its_blocks_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    honest = prefix_chain.digest_block

    def watched(parent: bytes, content: bytes) -> bytes:
        seen.append(parent)
        return honest(parent, content)

    monkeypatch.setattr(prefix_chain, "digest_block", watched)
    chain = PrefixChain(IDENTITY, BLOCK)
    found = chain.digests(list(range(12)), 3)
    assert seen == [b"", chain.root, *found[:2]]
    assert all(a != b for a, b in pairwise(found))


def test_a_chain_refuses_another_text_and_blocks_that_are_not_full() -> None:
    chain = PrefixChain(IDENTITY, BLOCK)
    chain.digests([1, 2, 3, 4, 5], 1)
    with pytest.raises(AssertionError, match="only grows"):
        chain.digests([9, 2, 3, 4, 5, 6, 7, 8], 2)
    with pytest.raises(AssertionError, match="whole block"):
        chain.digests([1, 2, 3, 4, 5], 2)
    with pytest.raises(AssertionError, match="whole block"):
        PrefixChain(AHEAD, BLOCK).digests([1, 2, 3, 4], 1)
