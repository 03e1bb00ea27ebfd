"""The drafter backbone: a layer worked out by hand, the context path, and what a block's rows may depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.unit.models.conftest import CachedContext, drafter_contract, tiny_drafter
from torch import Tensor

from paceline.checkpoint.contract import DrafterContract, TargetLayerId
from paceline.checkpoint.names import drafter_destinations
from paceline.models.attends import BlocksOverContext
from paceline.models.drafters.dflash import DFlashDrafter
from paceline.ops.native.rows import can_run

has_native = pytest.mark.skipif(
    not can_run(torch.empty(1, dtype=torch.bfloat16)), reason="no native operations on this machine"
)
TAP_A, TAP_B = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0], [2.0, 0.0]])
ANCHOR, MASK = [1.0, 2.0], [0.5, -1.0]


def hand_made_contract(*, causal: bool) -> DrafterContract:
    return drafter_contract(
        target_hidden_size=2,
        hidden_size=2,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=2,  # one frequency, which is 1
        rms_norm_eps=1e-6,
        block_size=2,
        target_layer_ids=(TargetLayerId(0), TargetLayerId(1)),
        layer_windows=(None,),
        layer_causal=(causal,),
    )


@torch.no_grad()
def hand_made_drafter(*, causal: bool) -> DFlashDrafter:
    """All projections identity, all gains 1, no MLP."""
    drafter = DFlashDrafter(hand_made_contract(causal=causal))
    for name, parameter in drafter.named_parameters():
        if name.endswith("fc.weight"):
            parameter.copy_(torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0]]))
        elif name.endswith("qkv_proj.weight"):
            parameter.copy_(torch.eye(2).repeat(3, 1))
        elif name.endswith("o_proj.weight"):
            parameter.copy_(torch.eye(2))
        elif "mlp" in name:
            parameter.zero_()
        else:
            assert "norm" in name, name
    return drafter


class Recorder:
    """Keeps what the block hands to attention, and its result before the output projection."""

    def __init__(self, inner: BlocksOverContext) -> None:
        self.inner = inner

    def __call__(self, layer: int, q_BTNH: Tensor, k_BTMH: Tensor, v_BTMH: Tensor) -> Tensor:
        self.k, self.v = k_BTMH, v_BTMH
        self.q = q_BTNH
        self.mixed = self.inner(layer, q_BTNH, k_BTMH, v_BTMH)
        return self.mixed


WEIGHTS = {
    False: [[0.030672, 0.358291, 0.436999, 0.174038], [0.122322, 0.301438, 0.164127, 0.412113]],
    True: [[0.037134, 0.433786, 0.529079, 0.0], [0.122322, 0.301438, 0.164127, 0.412113]],
}
MIXED = {
    False: [[0.425251, 0.858721], [0.519173, 0.189980]],
    True: [[0.381591, 1.306190], [0.519173, 0.189980]],
}
OUT = {
    False: [[0.630999, 1.265638], [1.107127, -0.879924]],
    True: [[0.545277, 1.304865], [1.107127, -0.879924]],
}


def close(found: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found.squeeze(), torch.tensor(expected, dtype=torch.float32), rtol=0, atol=3e-6)


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_a_layer_worked_out_by_hand(causal: bool) -> None:
    drafter = hand_made_drafter(causal=causal)
    backbone = drafter.backbone
    close(backbone.fc(torch.cat((TAP_A, TAP_B), dim=-1)), [[2, 1], [0, 4]])
    features = backbone.context_features([TAP_A, TAP_B])
    close(features, [[1.264911, 0.632455], [0, 1.414213]])
    ((k, v),) = backbone.context_kv(features, torch.tensor([0, 1]))
    close(k, [[1.264910, 0.632455], [-1.190019, 0.764102]])
    assert torch.equal(v.squeeze(1), features)  # values are not turned and not normed again

    visible = torch.tensor([[[True, True, True, not causal], [True, True, True, True]]])
    attend = Recorder(BlocksOverContext([(k[None], v[None])], [visible]))
    out = backbone(torch.tensor([[ANCHOR, MASK]]), torch.tensor([[2, 3]]), attend)
    close(attend.k, [[-1.413374, 0.048701], [-0.447622, 1.341504]])
    close(attend.v, [[0.632455, 1.264911], [0.632455, -1.264910]])
    keys = torch.cat((k, attend.k[0])).squeeze(1)
    scores = (attend.q[0].squeeze(1) @ keys.T / math.sqrt(2)).masked_fill(~visible[0], float("-inf"))
    close(scores.softmax(-1), WEIGHTS[causal])
    close(attend.mixed, MIXED[causal])
    close(out, OUT[causal])


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_the_same_layer_as_it_is_served(causal: bool) -> None:
    drafter = hand_made_drafter(causal=causal)
    context = CachedContext(drafter)
    context.extend([TAP_A[:1], TAP_B[:1]])
    context.extend([TAP_A[1:], TAP_B[1:]])
    hidden = context.draft(torch.tensor([ANCHOR, MASK]))
    close(hidden, OUT[causal])
    # Fill-in: row 1 alone is sampled, and it predicts the token at its own position, 3. Row 0 is the anchor, at 2.
    assert context.length == 2 and drafter.contract.num_draft_tokens == 1
    assert drafter.block_ids(torch.tensor([7]), 1).tolist() == [[7, drafter.contract.mask_token_id]]


def test_taps_are_normed_one_by_one_if_the_contract_says_so() -> None:
    drafter = tiny_drafter(has_tap_norm=True)
    taps = [torch.randn(5, 24) for _ in range(2)]
    features = drafter.backbone.context_features(taps)
    louder = drafter.backbone.context_features([taps[0] * 100, taps[1]])
    torch.testing.assert_close(louder, features, rtol=1e-3, atol=1e-4)  # a tap's own scale is gone
    without = tiny_drafter()
    assert len(without.backbone.fc_norm) == 0
    assert not torch.allclose(
        without.backbone.context_features([taps[0] * 100, taps[1]]), without.backbone.context_features(taps), atol=0.1
    )
    gains = [norm.weight for norm in drafter.backbone.fc_norm]
    assert not torch.equal(gains[0], gains[1])
    assert not torch.allclose(drafter.backbone.context_features(taps[::-1]), features, atol=1e-2)  # order matters


def test_float32_streams_are_cast_to_the_drafters_dtype() -> None:
    drafter = tiny_drafter().to(torch.bfloat16)
    assert drafter.backbone.context_features([torch.randn(3, 24)] * 2).dtype == torch.bfloat16


@torch.no_grad()
def test_context_never_passes_a_layers_input_norm() -> None:
    drafter = tiny_drafter()
    features, positions = torch.randn(5, 24), torch.arange(5)
    before = drafter.backbone.context_kv(features, positions)
    for name, parameter in drafter.named_parameters():
        if "input_layernorm" in name or "q_norm" in name or "mlp" in name:
            parameter.mul_(3.0)
    after = drafter.backbone.context_kv(features, positions)
    for (k, v), (other_k, other_v) in zip(before, after, strict=True):
        assert torch.equal(k, other_k) and torch.equal(v, other_v)


@pytest.mark.parametrize("attention_bias", [True, False])
@pytest.mark.parametrize("is_neox_style", [True, False])
@torch.no_grad()
def test_the_stacked_context_product_agrees_with_one_per_layer(attention_bias: bool, is_neox_style: bool) -> None:
    drafter = tiny_drafter(attention_bias=attention_bias, is_neox_style=is_neox_style)
    features, positions = torch.randn(2, 5, 24), torch.randint(0, 100, (2, 5))
    apart = drafter.backbone.context_kv(features, positions)
    names = set(drafter.checkpoint_parameters())
    drafter.backbone.prepare_for_serving("plain")
    together = drafter.backbone.context_kv(features, positions)
    for (k, v), (other_k, other_v) in zip(apart, together, strict=True):
        assert k.shape == (2, 5, 2, 8)
        torch.testing.assert_close(k, other_k, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(v, other_v, rtol=1e-5, atol=1e-5)
    assert set(drafter.checkpoint_parameters()) == names  # the stack is never written to a file


@pytest.mark.parametrize("has_tap_norm", [True, False])
@pytest.mark.parametrize("num_rows", [5, 70])
@torch.no_grad()
def test_fused_taps_are_written_as_features_are(has_tap_norm: bool, num_rows: int) -> None:
    drafter = tiny_drafter(has_tap_norm=has_tap_norm)
    backbone, taps = drafter.backbone, [torch.randn(1, num_rows, 24) * 3 for _ in range(2)]
    rows, positions = torch.randperm(80)[None, :num_rows], torch.arange(num_rows)[None] + 3
    found = []
    for mode in ("plain", "fused"):
        planes = torch.full((len(backbone.layers), 2, 2, 10, 8, 8), 9.0)
        backbone.prepare_for_serving(mode)  # type: ignore[arg-type]
        backbone.write_taps(taps, rows, positions, planes)
        found.append(planes)
    assert (found[0] != 9.0).any()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def native_drafter(**changes: Any) -> DFlashDrafter:
    drafter = tiny_drafter(**changes).to(torch.bfloat16)
    drafter.backbone.position_table = drafter.backbone.position_table.float()
    drafter.backbone.prepare_for_serving("native")
    return drafter


@has_native
@pytest.mark.parametrize(
    "changes", [{}, {"has_tap_norm": True}, {"attention_bias": True, "attention_value_scale": 0.4}]
)
@pytest.mark.parametrize("num_rows", [1, 5, 70])
@torch.no_grad()
def test_native_taps_are_written_as_features_are(
    changes: dict[str, Any], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = native_drafter(**changes).backbone
    taps = [torch.randn(2, num_rows, 24) * 3 for _ in range(2)]  # of a target in float32
    rows, positions = torch.randperm(159)[: 2 * num_rows].view(2, -1) + 1, torch.randint(140, (2, num_rows))
    one_by_one, at_once = torch.full((2, len(backbone.layers), 2, 2, 20, 8, 8), 9.0).bfloat16()
    backbone.write_context(backbone.context_features(taps), rows, positions, one_by_one)
    monkeypatch.setattr(backbone, "write_context", lambda *_arguments: pytest.fail("it takes the features"))
    assert backbone.writes_at_once(at_once)
    backbone.write_taps(taps, rows, positions, at_once)
    assert torch.equal(at_once[:, 1], one_by_one[:, 1]), "values"
    keys, expected = at_once[:, 0].double(), one_by_one[:, 0].double()
    size = expected.abs().amax(-1, keepdim=True)
    assert ((keys - expected).abs() <= 2**-7 * size).all(), "keys, which are rounded once less"
    backbone.write_taps(taps, rows, positions + 1, at_once)
    assert not ((at_once[:, 0].double() - expected).abs() <= 2**-7 * size).all()


@has_native
@torch.no_grad()
def test_gains_that_change_are_seen_by_the_next_mode_alone() -> None:
    backbone = native_drafter(has_tap_norm=True).backbone
    taps, rows, positions = [torch.randn(1, 3, 24) for _ in range(2)], torch.tensor([[4, 9, 2]]), torch.arange(3)[None]

    def written() -> Tensor:
        planes = torch.zeros(len(backbone.layers), 2, 2, 3, 8, 8).bfloat16()
        backbone.write_taps(taps, rows, positions, planes)
        return planes

    before = written()
    backbone.fc_norm[1].weight.mul_(-1.0)
    assert torch.equal(written(), before)
    backbone.prepare_for_serving("native")
    assert not torch.equal(written(), before)


@has_native
def test_what_one_native_call_leaves_to_others() -> None:
    planes = torch.zeros(2, 2, 2, 3, 8, 8).bfloat16()
    drafter = native_drafter()
    assert drafter.backbone.writes_at_once(planes)
    assert not drafter.backbone.writes_at_once(planes.float())
    assert not native_drafter(is_neox_style=False).backbone.writes_at_once(planes)
    assert not native_drafter(has_qk_norm=False).backbone.writes_at_once(planes), "nothing is stacked"
    drafter.backbone.prepare_for_serving("packed")
    assert not drafter.backbone.writes_at_once(planes)
    wide = tiny_drafter()
    wide.backbone.prepare_for_serving("native")
    assert not wide.backbone.writes_at_once(planes)


@torch.no_grad()
def test_row_invariant_serving_gives_a_position_the_same_keys_in_any_chunk() -> None:
    drafter = tiny_drafter()
    drafter.backbone.prepare_for_serving("row_invariant")
    taps = [torch.randn(20, 24) for _ in range(2)]

    def keys(start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        features = drafter.backbone.context_features([tap[start:end] for tap in taps])
        return drafter.backbone.context_kv(features, torch.arange(start, end))

    whole = keys(0, 20)
    for start, end in ((0, 1), (7, 8), (3, 19)):
        for (k, v), (all_k, all_v) in zip(keys(start, end), whole, strict=True):
            assert torch.equal(k, all_k[start:end]) and torch.equal(v, all_v[start:end])


@pytest.mark.parametrize("changes", [{}, {"has_tap_norm": True}, {"attention_bias": True}])
def test_parameters_are_those_that_files_hold(changes: dict[str, bool]) -> None:
    drafter = tiny_drafter(**changes)
    places = {destination.parameter for destination in drafter_destinations(drafter.contract).values()}
    assert set(drafter.checkpoint_parameters()) == places
