"""Log-probabilities: right numbers, ties by id, and the same after the way to the host."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.log_probabilities import entries_of, row_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_log_softmax(dtype: torch.dtype) -> None:
    logits = (torch.randn(2, 3, 200) * 4).to(dtype)
    tokens = torch.tensor([[7, 199, -1], [0, -1, -1]])
    found = row_logprobs(logits, tokens, 5)
    expected = logits.float().log_softmax(-1)
    assert torch.allclose(found.chosen_BL[0, :2], expected[0, [0, 1], [7, 199]], atol=1e-5)
    assert torch.allclose(found.chosen_BL[1, 0], expected[1, 0, 0], atol=1e-5)
    assert torch.allclose(found.top_BLN, expected.sort(-1, descending=True).values[..., :5], atol=1e-5)
    assert torch.equal(logits.float().gather(2, found.top_ids_BLN), logits.float().topk(5).values)


def test_equal_tokens_come_by_ascending_id_and_impossible_ones_not_at_all() -> None:
    logits = torch.tensor([[[1.0, -torch.inf, 1.0, 2.0, -torch.inf, 1.0]]])
    found = row_logprobs(logits, torch.tensor([[5]]), 32)
    assert found.top_ids_BLN.shape == (1, 1, 6), "no more than the vocabulary has"
    (entry,) = entries_of(found.columns[0].tolist(), [5], 1, "raw")
    assert [token for token, _ in entry.top] == [3, 0, 2, 5]
    assert entry.logprob == entry.top[3][1]


@pytest.mark.parametrize("num_top", [0, 1, 4])
def test_the_way_to_the_host_loses_nothing(num_top: int) -> None:
    logits = torch.randn(2, 3, 300_000 // 1000)
    tokens = torch.tensor([[7, 250, -1], [3, 4, 5]])
    found = row_logprobs(logits, tokens, num_top)
    assert found.columns.shape == (2, found.num_columns)
    for request, count in ((0, 2), (1, 3)):
        emitted = tokens[request, :count].tolist()
        entries = entries_of(found.columns[request].tolist(), emitted, 3, "processed")
        assert [entry.token_id for entry in entries] == emitted
        assert [entry.logprob for entry in entries] == found.chosen_BL[request, :count].tolist()
        for row, entry in enumerate(entries):
            assert entry.mode == "processed"
            assert [token for token, _ in entry.top] == found.top_ids_BLN[request, row].tolist()
            assert [value for _, value in entry.top] == found.top_BLN[request, row].tolist()
