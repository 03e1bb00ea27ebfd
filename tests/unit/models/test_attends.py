"""Attention without a cache: padded sequences and blocks over context are what plain attention gives row by row."""

from __future__ import annotations

import torch

from paceline.models.attends import BlocksOverContext, WholeSequence
from paceline.ops.attention import attention_reference


def test_whole_sequence_is_causal_and_ignores_padding() -> None:
    q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    y = WholeSequence()(3, q, k, v)
    assert y.shape == q.shape
    triangle = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = attention_reference(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), triangle).transpose(1, 2)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    k[:, 4:], v[:, 4:] = 1e3, -1e3  # right padding of a row of 4 real tokens
    torch.testing.assert_close(WholeSequence()(0, q, k, v)[:, :4], y[:, :4])


def test_documents_of_a_row_do_not_see_each_other() -> None:
    q, k, v = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 1, 1, 1, 1, 1]], dtype=torch.int32)
    y = WholeSequence(documents)(0, q, k, v)
    for row, start, end in ((0, 0, 3), (0, 3, 5), (1, 0, 1), (1, 1, 7)):
        alone = WholeSequence()(0, *(x[row : row + 1, start:end] for x in (q, k, v)))
        torch.testing.assert_close(y[row : row + 1, start:end], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[0, 5:], v[0, 5:].repeat_interleave(2, dim=1))  # padding sees itself


def test_blocks_see_context_then_their_own_rows_in_that_order() -> None:
    context_k, context_v = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    q, k, v = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2, 8)
    visible = torch.rand(1, 3, 8) < 0.5
    visible[:, torch.arange(3), 5 + torch.arange(3)] = True
    y = BlocksOverContext([(context_k, context_v)], [visible])(0, q, k, v)
    keys = torch.cat((context_k, k), dim=1).transpose(1, 2)
    values = torch.cat((context_v, v), dim=1).transpose(1, 2)
    expected = attention_reference(q.transpose(1, 2), keys, values, visible[:, None]).transpose(1, 2)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


def test_each_layer_has_its_own_keys_and_mask() -> None:
    context = [(torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)) for _ in range(2)]
    everything = torch.ones(1, 1, 3, dtype=torch.bool)
    itself = torch.tensor([[[False, False, True]]])
    attend = BlocksOverContext(context, [everything, itself])
    q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 8)
    torch.testing.assert_close(attend(1, q, k, v), v.repeat_interleave(2, dim=2))  # one key: its value, whole
    assert not torch.allclose(attend(0, q, k, v), attend(1, q, k, v))
