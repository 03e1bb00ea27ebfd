from __future__ import annotations

import pytest
import torch
from benchmarks.memory_floor import codes_of, plain_step_bytes, read_bandwidth, speculative_step_bytes
from tests import tiny
from tests.tiny_codes import store_target_in_codes

from paceline.models.layers import Linear, set_linear_mode
from paceline.ops.native.integers import can_run_integers
from paceline.ops.native.quantized import can_run_quantized


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


@pytest.mark.skipif(not can_run_quantized(), reason="no products with codes on this machine")
def test_codes_are_read_in_place_of_the_weights_they_stand_for() -> None:
    target, drafter = tiny.loaded("llama", linear_mode="native", dtype=torch.bfloat16)
    of_bf16 = plain_step_bytes(target, 0), speculative_step_bytes(target, drafter, 0)
    store_target_in_codes(target.model)
    set_linear_mode(target.model, "quantized")
    of_codes = plain_step_bytes(target, 0), speculative_step_bytes(target, drafter, 0)
    parts = [form.panels.numel() for part in target.model.modules() if (form := codes_of(part)) is not None]
    linears = [part.weight.numel() * 2 for part in target.model.modules() if isinstance(part, Linear)]
    assert len(parts) == len(linears), "each product once"
    assert of_bf16[0] - of_codes[0] == sum(linears) - sum(parts)
    head = codes_of(target.model.lm_head)
    assert head is not None
    assert (
        of_codes[1] - of_codes[0]
        == of_bf16[1] - of_bf16[0] - target.model.lm_head.weight.numel() * 2 + head.panels.numel()
    )


@pytest.mark.skipif(not can_run_integers(), reason="no products in whole numbers on this machine")
def test_a_drafter_in_8_bits_is_read_as_such() -> None:
    target, drafter = tiny.loaded("llama", linear_mode="native", dtype=torch.bfloat16)
    wide = speculative_step_bytes(target, drafter, 0)
    drafter.model.prepare_for_serving("int8")
    linears = sum(part.weight.numel() for part in drafter.model.modules() if isinstance(part, Linear))
    saved = wide - speculative_step_bytes(target, drafter, 0)
    assert 0.8 * linears < saved < linears, "a byte a weight, less the scales"
