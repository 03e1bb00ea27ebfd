"""Every planted fault is named, by the numbers alone: the recorded config is struck out of each fingerprint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.tiny import tiny_drafter, tiny_target
from tests.unit.models.probing import PROBE, TwoStreams, refusal
from torch import nn

from paceline.checkpoint.contract import DrafterFamily, RopeSettings, TargetLayerId
from paceline.errors import CompatibilityError
from paceline.models.drafters.block_drafter import BlockDrafter
from paceline.models.drafters.table import DRAFTERS, Drafter
from paceline.models.fingerprint import check_fingerprint, record_fingerprint, replay_fingerprint
from paceline.models.probe.alternatives import with_convolution_length
from paceline.models.readings import gains_plus_one, reread
from paceline.models.targets.dense import DenseTarget

FAMILIES: tuple[DrafterFamily, ...] = tuple(DRAFTERS)
BLOCK_FAMILIES: tuple[DrafterFamily, ...] = tuple(family for family in FAMILIES if family != "eagle3")


@pytest.fixture(scope="module")
def target() -> DenseTarget:
    return tiny_target()


def layers(*ids: int) -> tuple[TargetLayerId, ...]:
    return tuple(map(TargetLayerId, ids))


def says(error: CompatibilityError, *texts: str, fix: str) -> None:
    """The message has the texts and the hint has the fix; nothing is named that was not planted."""
    missing = [text for text in texts if text not in error.message]
    assert not missing, (missing, error.message)
    assert error.hint is not None and fix in error.hint, error.hint
    assert "its weights begin to differ" not in error.message, error.message


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("trained", "served", "texts", "fix"),
    [
        (
            (-1, 0, 1),
            (0, 1, 2),
            ["matches layer -1 (the embedding), the config says 0", "matches layer 1"],
            "one layer late",
        ),
        ((0, 1, 2), (-1, 0, 1), ["matches layer 0, the config says -1", "matches layer 2"], "one layer early"),
        ((-1, 0, 2), (-1, 1, 2), ["tap 1 differs by", "it matches layer 0, the config says 1"], "[-1, 0, 2]"),
    ],
)
def test_taps_of_other_layers(
    target: DenseTarget,
    family: DrafterFamily,
    trained: Sequence[int],
    served: Sequence[int],
    texts: list[str],
    fix: str,
) -> None:
    drafter = tiny_drafter(target.contract, family=family, target_layer_ids=layers(0, 1, 2))
    one, other = (reread(drafter, target_layer_ids=layers(*ids)) for ids in (trained, served))
    says(refusal(target, one, other), *texts, fix=fix)


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_taps(target: DenseTarget, family: DrafterFamily) -> None:
    """Trained in another order and sorted later; and trained in this order with fc's columns in another."""
    drafter = tiny_drafter(target.contract, family=family)
    unsorted = reread(drafter, target_layer_ids=layers(0, 2, 1))
    says(refusal(target, unsorted, drafter), "taps 1 and 2 are swapped", fix="columns 1 and 2")
    other = reread(drafter)
    fc = other.backbone.fc if isinstance(other, BlockDrafter) else other.fc
    first, second, third = fc.weight.chunk(3, dim=1)
    fc.weight = nn.Parameter(torch.cat((second, first, third), dim=1), requires_grad=False)
    says(refusal(target, drafter, other), "fit if taps 0 and 1 are swapped", fix="columns 0 and 1 of fc.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dropped_norm_per_tap(target: DenseTarget, family: DrafterFamily) -> None:
    with_norm = tiny_drafter(target.contract, family=family, has_tap_norm=True)
    without = reread(with_norm, has_tap_norm=False)
    says(refusal(target, with_norm, without), "fc_norm is missing", fix='"fc_norm": true')
    says(refusal(target, without, with_norm), "fit without fc_norm", fix='"fc_norm": false')


def test_a_dropped_norm_over_all_taps(target: DenseTarget) -> None:
    plain = tiny_drafter(target.contract, family="eagle3")
    assert plain.contract.eagle3 is not None
    switches = dataclasses.replace(plain.contract.eagle3, norm_before_fc=not plain.contract.eagle3.norm_before_fc)
    pair = {
        bool(d.contract.eagle3 and d.contract.eagle3.norm_before_fc): d for d in (plain, reread(plain, eagle3=switches))
    }
    says(refusal(target, pair[True], pair[False]), "norm over all taps is missing", fix='"norm_before_fc": true')
    says(refusal(target, pair[False], pair[True]), "norm_before_fc should be false", fix='"norm_before_fc": false')


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("trained", "served"), [("attn_res", "prefix"), ("prefix", "attn_res")])
def test_the_other_stream(family: DrafterFamily, trained: Any, served: Any) -> None:
    """The two lie closer together than a coarse quantisation would move either."""
    plain = tiny_target()
    both = TwoStreams(plain.contract)
    both.load_state_dict(plain.state_dict())
    both.requires_grad_(False)
    drafter = tiny_drafter(plain.contract, family=family)
    one, other = (reread(drafter, aux_hidden_stream=stream) for stream in (trained, served))
    error = refusal(both, one, other)
    says(error, f"on the stream {trained}, the config says {served}", fix=f'"aux_hidden_stream": "{trained}"')
    stored = record_fingerprint(both, one, PROBE)
    assert max(c.error for c in replay_fingerprint(both, other, stored).taps) < 0.6, "only the comparison can tell"
    check_fingerprint(both, one, stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_rope(target: DenseTarget, family: DrafterFamily) -> None:
    drafter = tiny_drafter(target.contract, family=family)
    interleaved = reread(drafter, is_neox_style=False)
    says(
        refusal(target, interleaved, drafter),
        "interleaved pairs: is_neox_style should be false",
        fix='"is_neox_style": false',
    )
    says(
        refusal(target, drafter, interleaved), "split halves: is_neox_style should be true", fix='"is_neox_style": true'
    )
    for theta in (5e5, 1e6):
        based = reread(drafter, rope=RopeSettings(theta=theta))
        text = f"theta {theta:.0f}: rope_theta is 10000 in the config"
        says(refusal(target, based, drafter), text, fix=f'"rope_theta": {theta:.0f}')
    both = reread(drafter, rope=RopeSettings(theta=1e6), is_neox_style=False)
    says(refusal(target, both, drafter), "theta 1000000", "interleaved pairs", fix='"rope_theta": 1000000')


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_that_no_list_holds_is_told_from_other_weights(target: DenseTarget, family: DrafterFamily) -> None:
    """Without the recorded config it is known to be RoPE; with it, which."""
    drafter = tiny_drafter(target.contract, family=family)
    scaled = reread(drafter, rope=RopeSettings(theta=1e4, kind="linear", factor=4.0))
    says(refusal(target, scaled, drafter), "agree at position 0 and differ beyond", fix="rope_scaling")
    says(refusal(target, scaled, drafter, hints=True), "RoPE of kind 'linear'", fix='rope_type "linear"')


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("scale", "said"), [(8.0, "8, the root of the width"), (1.7, "1.")])
def test_embedding_scale(target: DenseTarget, family: DrafterFamily, scale: float, said: str) -> None:
    drafter = tiny_drafter(target.contract, family=family)
    scaled = reread(drafter, input_embedding_scale=scale)
    says(refusal(target, scaled, drafter), f"input_embedding_scale {said}", fix="input_embedding_scale")
    says(refusal(target, drafter, scaled), "input_embedding_scale 1; the config says", fix='"input_embedding_scale": 1')


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_layer_behind_the_final_norm(target: DenseTarget, family: DrafterFamily) -> None:
    """What a library gives as its last hidden state was normed; the tap of the last layer is not."""
    last = tiny_drafter(target.contract, family=family, target_layer_ids=layers(0, 1, 3))
    stored = record_fingerprint(target, last, PROBE)
    raw = stored["tap.2"].float()
    stored["tap.2"] = target.norm(raw).to(torch.bfloat16)
    with pytest.raises(CompatibilityError, match=r"tap 2 fits only after the final norm.*post-norm last layer"):
        check_fingerprint(target, last, stored)


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_mask_id(target: DenseTarget, family: DrafterFamily) -> None:
    drafter = tiny_drafter(target.contract, family=family)
    says(
        refusal(target, reread(drafter, mask_token_id=17), drafter),
        "the stored mask row is token 17's",
        "mask_token_id is 3",
        fix='"mask_token_id": 17',
    )


def test_mask_embedding(target: DenseTarget) -> None:
    plain = tiny_drafter(target.contract)
    own = tiny_drafter(target.contract, has_mask_embedding=True)
    own.vocabulary.mask_embedding_D = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 0.2
    says(refusal(target, own, plain), "no row of the vocabulary", fix="mask_embedding.pt beside the weights")
    says(refusal(target, plain, own), "token 3's own", fix="remove mask_embedding.pt")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "dflash2"])
def test_offsets_and_target_ids(target: DenseTarget, family: DrafterFamily) -> None:
    right = tiny_drafter(target.contract, family=family, draft_vocab_size=256, has_own_head=True)
    table = right.vocabulary.target_ids_V
    assert table is not None
    absolute, offsets = reread(right), reread(right)
    absolute.vocabulary.target_ids_V = table + torch.arange(256)  # the file held target ids, the reader added its own
    offsets.vocabulary.target_ids_V = table - torch.arange(256)
    says(refusal(target, right, absolute), "if d2t is read as absolute ids", fix="d2t as offsets")
    says(refusal(target, right, offsets), "if d2t is read as offsets", fix="adds the draft id")


@pytest.mark.parametrize("length", [16, 4])
def test_a_convolution_over_other_blocks(target: DenseTarget, length: int) -> None:
    """Recorded by an implementation that lets rows of one request reach another, or cuts a block in two."""
    drafter = tiny_drafter(target.contract, family="dflash2")
    assert isinstance(drafter, BlockDrafter)
    error = refusal(target, with_convolution_length(drafter, length), drafter)
    says(error, f"looks back over blocks of {length} rows, not 8", fix="every 8 rows")


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_what_a_block_may_see(target: DenseTarget, family: DrafterFamily) -> None:
    drafter = tiny_drafter(target.contract, family=family)
    causal = reread(drafter, layer_causal=(True, True))
    says(refusal(target, causal, drafter), "rows of a block are causal", fix="is_causal")
    says(refusal(target, drafter, causal), "rows of a block are bidirectional", fix="is_causal")
    narrow = reread(drafter, layer_windows=(128, 128))
    says(refusal(target, narrow, drafter), "with windows of 128 tokens", fix="sliding_window")
    says(refusal(target, drafter, narrow), "without windows", fix="sliding_window")
    says(
        refusal(target, drafter, reread(drafter, block_size=16)),
        "in blocks of 8 rows, the config says 16",
        fix='"block_size": 8',
    )


def test_block_layout(target: DenseTarget) -> None:
    drafter = tiny_drafter(target.contract, family="dspark", layout="anchor_sampling")
    error = refusal(target, drafter, reread(drafter, layout="fill_in"))
    says(error, "block layout 'anchor_sampling', the config says 'fill_in'", fix='"sample_from_anchor": true')


@pytest.mark.parametrize("field", ["norm_before_residual", "norm_output"])
def test_switches_of_eagle3(target: DenseTarget, field: str) -> None:
    drafter = tiny_drafter(target.contract, family="eagle3")
    assert drafter.contract.eagle3 is not None
    flipped = not getattr(drafter.contract.eagle3, field)
    other = reread(drafter, eagle3=dataclasses.replace(drafter.contract.eagle3, **{field: flipped}))
    says(refusal(target, other, drafter), f"{field} {str(flipped).lower()}", fix=f'"{field}": {str(flipped).lower()}')


@pytest.mark.parametrize("family", FAMILIES)
def test_transforms_of_the_logits(target: DenseTarget, family: DrafterFamily) -> None:
    drafter = tiny_drafter(target.contract, family=family)
    halved = reread(drafter, output_multiplier=0.5)
    says(refusal(target, halved, drafter), "output_multiplier 0.5; the config says 1", fix='"output_multiplier": 0.5')
    capped = reread(drafter, final_logit_softcapping=1.5)
    says(refusal(target, capped, drafter), "a soft-cap of about 1.5; the config has none", fix="about 1.5")
    says(refusal(target, drafter, capped), "without a soft-cap", fix='"final_logit_softcapping": null')


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_gains_stored_as_their_distance_from_one(target: DenseTarget, family: DrafterFamily) -> None:
    right = tiny_drafter(target.contract, family=family)
    stored_less = reread(right)
    for name, parameter in list(stored_less.named_parameters()):
        if "norm" in name and parameter.dim() == 1:
            stored_less.get_submodule(name.rpartition(".")[0]).weight = nn.Parameter(parameter - 1, requires_grad=False)
    says(refusal(target, right, stored_less), "gains read as 1 + w", fix="adds 1")
    check_fingerprint(target, gains_plus_one(stored_less), record_fingerprint(target, right, PROBE))


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
@pytest.mark.parametrize(
    ("name", "stage", "weights"),
    [
        ("fc_norm.1", "normed taps", "fc_norm"),
        ("fc", "context features", "fc, fc_norm or hidden_norm"),
        ("layers.0.self_attn.k_norm", "context keys and values", "k_proj"),
        ("layers.1.mlp.down_proj", "hidden rows", "a decoder layer"),
        ("norm", "hidden rows", "the final norm"),
    ],
)
def test_other_weights_are_said_where_they_begin(
    target: DenseTarget, family: DrafterFamily, name: str, stage: str, weights: str
) -> None:
    right = tiny_drafter(target.contract, family=family)
    other = reread(right)
    assert isinstance(other, BlockDrafter)
    weight = other.backbone.get_parameter(f"{name}.weight")
    changed = weight.flip(-1) * 1.3
    other.backbone.get_submodule(name).weight = nn.Parameter(changed, requires_grad=False)
    error = refusal(target, right, other)
    assert f"the drafter's {stage} differ" in error.message and weights in error.message
    assert error.message.count("its weights begin to differ") == 1, "said once, where it begins"


def test_a_head_and_a_selector_of_other_weights(target: DenseTarget) -> None:
    right = tiny_drafter(target.contract, has_own_head=True)
    other = reread(right)
    assert other.vocabulary.lm_head is not None
    other.vocabulary.lm_head.weight = nn.Parameter(other.vocabulary.lm_head.weight.flip(0), requires_grad=False)
    assert "draft logits differ" in refusal(target, right, other).message
    for family, parameter in (
        ("dflash2", "candidate_selector.successor_codebook"),
        ("dspark", "markov_head.markov_w2.weight"),
    ):
        right = tiny_drafter(target.contract, family=family)
        other = reread(right)
        owner, _, name = parameter.rpartition(".")
        weight = nn.Parameter(other.get_parameter(parameter).flip(0) * 3, requires_grad=False)
        setattr(other.get_submodule(owner), name, weight)
        assert "heads that couple positions" in refusal(target, right, other).message


def test_two_faults_are_both_named(target: DenseTarget) -> None:
    """Stages are computed from stored inputs, so the first fault does not drown the second."""
    drafter = tiny_drafter(target.contract)
    other = reread(drafter, target_layer_ids=layers(-1, 1, 2), is_neox_style=False, mask_token_id=9)
    error = refusal(target, drafter, other)
    says(
        error,
        "matches layer 0, the config says -1",
        "is_neox_style should be true",
        "token 3's",
        fix="target_layer_ids",
    )


def test_a_field_without_a_reading_is_named_from_the_recorded_config(target: DenseTarget) -> None:
    drafter = tiny_drafter(target.contract)
    mixed = reread(drafter, layer_causal=(True, False))
    error = refusal(target, mixed, drafter, hints=True)
    says(error, "layer_causal", "(True, False)", fix="recorded" if "recorded" in (error.hint or "") else "config")


@pytest.mark.parametrize("make", [lambda d: d, gains_plus_one])
def test_no_reading_changes_the_drafter(target: DenseTarget, make: Callable[[Drafter], Drafter]) -> None:
    drafter = tiny_drafter(target.contract)
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    refusal(target, tiny_drafter(target.contract, seed=3), make(drafter))
    assert all(torch.equal(parameter, before[name]) for name, parameter in drafter.named_parameters())


def test_a_recorded_field_comes_before_other_weights(target: DenseTarget) -> None:
    """An epsilon far off changes hidden rows as other weights would; the record says what it is."""
    drafter = tiny_drafter(target.contract, family="dflash2", rms_norm_eps=1e-6)
    other = reread(drafter, rms_norm_eps=1e-2)
    error = refusal(target, drafter, other, hints=True)
    assert error.message.startswith("the fingerprint was recorded with rms_norm_eps 1e-06, the config says 0.01")
    assert error.hint is not None and error.hint.startswith("rms_norm_eps 1e-06 in tests/tiny-drafter")


def test_a_rope_that_differs_in_neither_kind_nor_theta(target: DenseTarget) -> None:
    rope = RopeSettings(1e4, "yarn", 4.0, 64)
    drafter = tiny_drafter(target.contract, rope=rope)
    error = refusal(target, drafter, reread(drafter, rope=dataclasses.replace(rope, factor=8.0)), hints=True)
    says(error, "RoPE of factor 4.0; the config says 8.0", fix='"factor": 4.0')
