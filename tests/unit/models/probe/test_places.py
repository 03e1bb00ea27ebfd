"""The places of a target are its layer boundaries and the normed end."""

from __future__ import annotations

import torch
from tests.tiny import tiny_target
from tests.unit.models.probing import PROBE, TwoStreams

from paceline.checkpoint.contract import CaptureId
from paceline.models.attends import WholeSequence
from paceline.models.probe.places import Place, states_of_text


def test_every_boundary_and_the_normed_end() -> None:
    target = tiny_target()
    states = states_of_text(target, PROBE, slice(30, 39), ["prefix"])
    assert len(states) == 6 and all(state.shape == (9, 64) for state in states.values())
    assert torch.equal(states[Place("prefix", CaptureId(0))], target.embed_tokens.weight[torch.tensor(PROBE[30:39])])
    whole = target(torch.tensor([PROBE]), torch.arange(40).unsqueeze(0), WholeSequence())[0, 30:39]
    torch.testing.assert_close(states[Place("prefix", CaptureId(4), is_normed=True)], whole)
    assert not torch.allclose(states[Place("prefix", CaptureId(4))], whole)


def test_every_stream_that_is_asked_for() -> None:
    plain = tiny_target()
    both = TwoStreams(plain.contract)
    both.load_state_dict(plain.state_dict())
    both.requires_grad_(False)
    states = states_of_text(both, PROBE, slice(30, 39), ["attn_res", "prefix"])
    assert len(states) == 12
    one, other = (states[Place(stream, CaptureId(2))] for stream in ("prefix", "attn_res"))
    assert 0.2 < float((one - other).norm() / one.norm()) < 0.3


def test_words_for_places() -> None:
    assert str(Place("prefix", CaptureId(0))) == "layer -1 (the embedding)"
    assert str(Place("prefix", CaptureId(23))) == "layer 22"
    assert str(Place("prefix", CaptureId(30), is_normed=True)) == "layer 29 after the final norm"
