from __future__ import annotations

from benchmarks.memory_floor import plain_step_bytes, read_bandwidth, speculative_step_bytes
from tests import tiny


def test_a_read_takes_time() -> None:
    assert 1e8 < read_bandwidth(2**22) < 1e13


def test_tied_embedding_is_read_once_as_the_head() -> None:
    tied, untied = (
        tiny.loaded("llama", target_changes={"tie_word_embeddings": is_tied})[0] for is_tied in (True, False)
    )
    assert plain_step_bytes(tied, 0) == plain_step_bytes(untied, 0)
    contract = tied.contract
    weights = sum(p.numel() for p in tied.model.parameters()) * 4
    assert plain_step_bytes(tied, 0) == weights
    one_token = 4 * 2 * contract.num_layers * contract.num_kv_heads * contract.head_size
    assert plain_step_bytes(tied, 10) == weights + 10 * one_token


def test_a_draft_reads_the_drafter_and_the_head_again() -> None:
    target, drafter = tiny.loaded("llama")
    more = speculative_step_bytes(target, drafter, 0) - plain_step_bytes(target, 0)
    drafter_bytes = 4 * sum(p.numel() for p in drafter.model.parameters())
    assert more == drafter_bytes + 4 * target.model.lm_head.weight.numel()
    assert speculative_step_bytes(target, drafter, 8) > plain_step_bytes(target, 8) + more
