"""Worked examples of XPress's mixer and LiLiCorr's lattice, beside loops that say the same slowly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.candidate_lattice import NUM_FEATURES, candidate_features, fold_mixer, mix_rows, slot_bias


def close(found: Tensor, expected: list) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-6)


def test_the_worked_mixer() -> None:
    mixer = fold_mixer(torch.tensor([[[0.1, 0.9], [0.3, 0.2]]]))
    close(mixer, [[[1.1, 0.0], [0.3, 1.2]]])
    close(mix_rows(torch.tensor([[[2.0], [5.0]]]), mixer), [[[2.2], [6.6]]])


def test_rows_are_mixed_channel_by_channel_and_never_with_later_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    raw, x = torch.randn(3, 5, 5, generator=generator), torch.randn(2, 5, 3, generator=generator)
    mixed = mix_rows(x, fold_mixer(raw))
    for block in range(2):
        for row in range(5):
            for channel in range(3):
                expected = float(x[block, row, channel])
                expected += sum(float(raw[channel, row, k] * x[block, k, channel]) for k in range(row + 1))
                assert float(mixed[block, row, channel]) == pytest.approx(expected, abs=1e-5)
    later = x.clone()
    later[:, 3:] = 9.0
    torch.testing.assert_close(mix_rows(later, fold_mixer(raw))[:, :3], mixed[:, :3])
    short = mix_rows(x[:, :3], fold_mixer(raw))
    torch.testing.assert_close(short, mixed[:, :3])
    assert not torch.allclose(mix_rows(x, fold_mixer(raw.transpose(1, 2))), mixed), "the other triangle is another head"
    with pytest.raises(ShapeError, match="block rows"):
        mix_rows(x, fold_mixer(raw[:, :4, :4]))
    with pytest.raises(ShapeError, match="mixer"):
        fold_mixer(raw[:, :4])


def test_the_worked_features() -> None:
    """Probabilities .6 and .3, the best two of a vocabulary whose rest has a tenth."""
    logits = torch.tensor([[[0.02, 0.3, 0.08, 0.6]]]).log() + 7.0
    ids, features = candidate_features(logits, 2)
    assert ids.tolist() == [[[3, 1]]]
    close(features[0, 0], [[-0.510826, 0.6, 0.0, 0.0, 1.0], [-1.203973, 0.3, -0.693147, 1.0, 0.0]])


def test_features_of_any_slot_agree_with_a_slow_loop() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(1)).double()
    ids, features = candidate_features(logits, 4)
    assert features.shape == (2, 3, 4, NUM_FEATURES) and features.dtype == torch.float32
    for request in range(2):
        for slot in range(3):
            row = logits[request, slot].tolist()
            total = math.log(sum(map(math.exp, row)))
            best = sorted(range(11), key=lambda token: -row[token])[:4]
            assert ids[request, slot].tolist() == best
            for rank, token in enumerate(best):
                lp = row[token] - total
                slow = [lp, math.exp(lp), row[token] - row[best[0]], rank / 3, float(rank == 0)]
                assert features[request, slot, rank].tolist() == pytest.approx(slow, abs=1e-5)
    tied, _ = candidate_features(torch.zeros(1, 1, 5), 3)
    assert tied.tolist() == [[[0, 1, 2]]]


WORKED = {(0, 0): 3.5, (0, 1): 2.0, (0, 2): 1.0, (1, 0): 4.0, (1, 1): 3.5, (2, 0): 5.0}


def test_the_worked_bias() -> None:
    bias = slot_bias(torch.arange(7.0)[None], torch.tensor([0.5]), num_slots=3, num_candidates=2)
    assert bias.shape == (1, 6, 6)
    for (query, key), expected in WORKED.items():
        assert torch.equal(bias[0, 2 * query : 2 * query + 2, 2 * key : 2 * key + 2], torch.full((2, 2), expected))


def test_fewer_slots_keep_the_offset_of_the_trained_block() -> None:
    relative, same = torch.randn(3, 15), torch.randn(3)
    whole = slot_bias(relative, same, num_slots=7, num_candidates=2)
    assert torch.equal(slot_bias(relative, same, num_slots=4, num_candidates=2), whole[:, :8, :8])
    # the planted fault: an offset that follows the number of slots
    cut = slot_bias(relative[:, 3:-3], same, num_slots=4, num_candidates=2)
    assert torch.equal(cut, whole[:, :8, :8]), "cut on both sides it is the same table"
    assert not torch.equal(slot_bias(relative[:, :9], same, num_slots=4, num_candidates=2), whole[:, :8, :8])
    for width, num_slots in ((14, 3), (7, 4), (7, 0)):
        with pytest.raises(ShapeError, match="relative_slot_bias"):
            slot_bias(torch.zeros(1, width), same[:1], num_slots=num_slots, num_candidates=2)
