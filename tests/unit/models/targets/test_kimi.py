"""Kimi targets against slow formulas, transformers and a worked example; what a tap is in each stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.slow_kimi import slow_kimi
from tests.tiny_kimi import (
    VARIANTS,
    fill_kimi,
    k3_tiny_config,
    kimi_contract,
    kimi_target,
    kimi_tensors,
    small_kimi_config,
    write_kimi,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, RopeSettings
from paceline.checkpoint.target_config import read_target_contract
from paceline.errors import CompatibilityError
from paceline.models.attends import WholeSequence
from paceline.models.building import empty_target
from paceline.models.layers import set_linear_mode
from paceline.models.sequence_attend import sequence_attend
from paceline.models.taps import TapCollector
from paceline.models.target_weights import fill_target
from paceline.models.targets.kimi import KimiTarget
from paceline.models.targets.kimi_attention import DeltaAttention
from paceline.models.targets.kimi_layer import KimiLayer, ResidualStream
from paceline.models.targets.kimi_stage import BoundaryScores

TOLERANCE = 1e-4
EXACT = 1e-8  # of two computations in float64


def tokens(num_rows: int = 2, length: int = 9, vocab_size: int = 64, seed: int = 3) -> Tensor:
    return torch.randint(0, vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(seed))


def run(target: KimiTarget, ids: Tensor, stream: AuxHiddenStream = "prefix") -> tuple[Tensor, list[Tensor]]:
    taps = TapCollector([CaptureId(capture) for capture in target.capture_ids], stream)
    hidden = target(ids, torch.zeros_like(ids), WholeSequence(), taps)
    return target.logits(hidden), taps.collected()


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max())


# Against formulas and the outside implementation.


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_taps_follow_the_formulas(variant: str) -> None:
    """In float64, where no near tie between experts and no cancellation can hide or pretend a difference."""
    config = small_kimi_config(8, 4, **VARIANTS[variant])
    target, ids = kimi_target(config, dtype=torch.float64), tokens(1, 7)
    expected = slow_kimi(config, kimi_tensors(target), ids[0].tolist(), latent_eps=config["rms_norm_eps"])
    for stream in sorted(target.aux_hidden_streams):
        logits, taps = run(target, ids, stream)
        assert distance(logits[0], expected.logits) < EXACT
        states = expected.prefix if stream == "prefix" else expected.mixed
        assert max(distance(tap[0], state) for tap, state in zip(taps, states, strict=True)) < EXACT


@pytest.mark.parametrize("fault", ["prefix", "score", "rate", "bank", "gate", "bias"])
def test_a_planted_fault_is_seen_by_the_formulas(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_kimi_config(8, 4)
    target, ids = kimi_target(config, dtype=torch.float64), tokens(1, 7)
    expected = slow_kimi(config, kimi_tensors(target), ids[0].tolist(), latent_eps=1e-5)
    first = target.layers[1]
    assert isinstance(first, KimiLayer) and isinstance(first.self_attn, DeltaAttention)
    if fault == "prefix":  # the new block goes on from the old sum
        mix = KimiLayer._mix

        def go_on(self: KimiLayer, stream: ResidualStream, *arguments: Any) -> tuple[Tensor, Tensor]:
            is_mlp_side = arguments[1] is self.post_attention_layernorm
            if is_mlp_side and self.layer == 4:
                stream = ResidualStream(stream.prefix_BTD * 1.01, None, stream.bank_BTJD)
            return mix(self, stream, *arguments)

        monkeypatch.setattr(KimiLayer, "_mix", go_on)
    elif fault == "score":
        first.mlp_res, first.self_attention_res = first.self_attention_res, first.mlp_res
    elif fault == "rate":
        first.self_attn.decay.A_log += 0.1
    elif fault == "bank":
        monkeypatch.setattr("paceline.models.targets.kimi_layer.num_closed_blocks", lambda layer, size: layer // size)
    elif fault == "gate":
        first.self_attn.decay.lower_bound = -4.0
    else:
        mixture = first.mlp
        mixture.gate.correction_bias.neg_()
    logits, _ = run(target, ids)
    assert distance(logits[0], expected.logits) > 1e6 * EXACT


LINEAR_ONLY: dict[str, Any] = {
    "q_lora_rank": None,
    "hidden_act": "silu",
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "attn_res_block_size": None,
    "linear_attn_config": {"use_full_rank_gate": False, "gate_lower_bound": None},
    "paceline": {"latent_norm_eps": 1e-6},  # transformers' norms on latents have their class's own
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": 48},
        {"num_expert_group": 2},
        {"routed_scaling_factor": 2.446, "moe_renormalize": False},
        {"first_k_dense_replace": 3, "num_shared_experts": 2},
    ],
    ids=["plain", "query-rank", "groups", "scaled", "dense-first"],
)
@torch.no_grad()
def test_logits_agree_with_transformers_from_one_checkpoint(changes: dict[str, Any], tmp_path: Path) -> None:
    config = k3_tiny_config(**{**LINEAR_ONLY, **changes})
    folder = write_kimi(tmp_path, config, kimi_tensors(kimi_target(config), rates="four"))
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    contract = read_target_contract(folder, "tiny")
    ours = empty_target(contract, torch.float32, torch.device("cpu"))
    fill_target(ours, contract, folder)
    ids = tokens(2, 70, 512)
    found = ours.logits(ours(ids, torch.zeros_like(ids), WholeSequence()))
    assert float((found - theirs(ids).logits).abs().max()) < TOLERANCE


def test_the_epsilon_of_latent_norms_is_the_knobs() -> None:
    config = small_kimi_config(4, None)
    same = {"paceline": {"latent_norm_eps": config["rms_norm_eps"]}}
    plain, _ = run(kimi_target(config), tokens())
    assert torch.equal(run(kimi_target({**config, **same}), tokens())[0], plain)
    other, _ = run(kimi_target({**config, "paceline": {"latent_norm_eps": 1e-2}}), tokens())
    assert float((other - plain).abs().max()) > 10 * TOLERANCE


# A worked example: three layers of width 2, sub-layers replaced by matrices.


class Stub(nn.Module):
    """A sub-layer that is a matrix."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(rows), requires_grad=False)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return (x.double() @ self.weight.double().t()).to(x.dtype)


def worked_example(dtype: torch.dtype) -> KimiTarget:
    config = small_kimi_config(3, 2, hidden_size=2, num_experts=None)
    config["linear_attn_config"] = {**config["linear_attn_config"], "kda_layers": [1, 2], "full_attn_layers": [3]}
    target = KimiTarget(kimi_contract(config))
    attention_proj = [(0.3, -0.2), (0.5, 0.4), (-0.6, 0.7)]
    mlp_proj = [(0.2, 0.6), (-0.4, 0.3), (0.8, -0.5)]
    attention = [[[0.5, 0.25], [-0.25, 0.5]], [[0.0, 1.0], [1.0, 0.0]], [[0.75, 0.0], [0.0, -0.5]]]
    mlp = [[[1.0, 0.0], [0.0, 1.0]], [[0.5, -0.5], [0.5, 0.5]], [[-1.0, 0.5], [0.25, 1.0]]]
    fill_kimi(target, 0)
    with torch.no_grad():
        target.embed_tokens.weight[0] = torch.tensor([1.0, -0.5])
        for index, layer in enumerate(target.layers):
            assert isinstance(layer, KimiLayer)
            layer.self_attention_res.norm.copy_(torch.tensor([1.0, 1.0]))
            layer.mlp_res.norm.copy_(torch.tensor([1.0, 0.5]))
            layer.self_attention_res.proj.copy_(torch.tensor([attention_proj[index]]))
            layer.mlp_res.proj.copy_(torch.tensor([mlp_proj[index]]))
            layer.input_layernorm.weight.copy_(torch.tensor([1.0, 2.0]))
            layer.post_attention_layernorm.weight.copy_(torch.tensor([0.5, 1.0]))
            layer.self_attn, layer.mlp = Stub(attention[index]), Stub(mlp[index])  # type: ignore[assignment]
        target.norm.weight.fill_(1.0)
        assert target.output_attn_res is not None
        target.output_attn_res.norm.fill_(1.0)
        target.output_attn_res.proj.copy_(torch.tensor([[0.4, 0.1]]))
    return target.requires_grad_(False).to(dtype)


PREFIXES = [(1.0, -0.5), (0.829931, -1.920470), (-0.861075, -1.730649), (-1.189419, 0.562998)]
MIXTURES = [(1.0, -0.5), (0.940445, -0.997424), (-0.240793, -1.320483), (0.072752, -0.557492)]
PREFIXES_BF16 = [(1.0, -0.5), (0.828125, -1.921875), (-0.8671875, -1.734375), (-1.1953125, 0.55859375)]
MIXTURES_BF16 = [(1.0, -0.5), (0.94140625, -0.99609375), (-0.24609375, -1.3203125), (0.07080078, -0.55859375)]


def test_the_worked_example_of_attention_residuals() -> None:
    target, ids = worked_example(torch.float64), torch.zeros(1, 1, dtype=torch.int64)
    for stream, expected in (("prefix", PREFIXES), ("attn_res", MIXTURES)):
        taps = TapCollector([CaptureId(capture) for capture in range(4)], stream)
        hidden = target(ids, ids, WholeSequence(), taps)
        torch.testing.assert_close(
            torch.cat(taps.collected())[:, 0], torch.tensor(expected).double(), rtol=0, atol=1e-6
        )
        torch.testing.assert_close(hidden[0, 0], torch.tensor([0.182995, -1.402279]).double(), rtol=0, atol=1e-6)
    stream = target.run(target.begin(target.embed(ids)), WholeSequence(), None)  # type: ignore[arg-type]
    assert stream.bank_BTJD is not None
    bank = torch.tensor([(1.0, -0.5), (-0.861075, -1.730649)]).double()
    torch.testing.assert_close(stream.bank_BTJD[0, 0], bank, rtol=0, atol=1e-6)


def test_the_worked_example_in_a_bfloat16_stream() -> None:
    """The stream and the sub-layers' outputs are rounded; the weights of the example are not."""
    target, ids = worked_example(torch.float32), torch.zeros(1, 1, dtype=torch.int64)
    for stream, expected in (("prefix", PREFIXES_BF16), ("attn_res", MIXTURES_BF16)):
        taps = TapCollector([CaptureId(capture) for capture in range(4)], stream)
        target.finish(target.run(target.begin(target.embed(ids).bfloat16()), WholeSequence(), taps), taps)
        assert torch.equal(torch.cat(taps.collected())[:, 0], torch.tensor(expected).bfloat16()), stream


# What a tap is.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [4, 3, None])
def test_the_last_tap_is_what_the_final_norm_reads(block_size: int | None, dtype: torch.dtype) -> None:
    target, ids = kimi_target(small_kimi_config(8, block_size), dtype=dtype), tokens()
    stream: AuxHiddenStream = "prefix" if block_size is None else "attn_res"
    taps = TapCollector([CaptureId(8)], stream)
    state = target.run(target.begin(target.embed(ids)), WholeSequence(), taps)
    hidden = target.finish(state, taps)
    assert torch.equal(taps.collected()[0], hidden)
    if block_size is not None:  # and the tap is formed as those before it are
        folded = target.tapped(state, 8, "prefix")
        module = target.output_attn_res
        assert module is not None
        target.layers.append(nn.Module())
        target.layers[8].self_attention_res = module
        target._scores = lambda layer: module()  # type: ignore[method-assign]
        assert torch.equal(target._mixed_tap(folded, state, 8), hidden)


@pytest.mark.parametrize("stream", ["prefix", "attn_res"])
def test_reading_a_tap_changes_nothing(stream: AuxHiddenStream) -> None:
    target, ids = kimi_target(small_kimi_config(8, 3)), tokens()
    bare = target.logits(target(ids, ids, WholeSequence()))
    logits, taps = run(target, ids, stream)
    assert torch.equal(logits, bare)
    state = target.begin(target.embed(ids))
    for layer in range(8):
        state = target.layers[layer](state, WholeSequence())
        kept = [part.clone() for part in (state.prefix_BTD, state.delta_BTD, state.bank_BTJD) if part is not None]
        if layer < 7:
            tap = target.tapped(state, layer + 1, stream)
            assert torch.equal(tap, taps[layer + 1])
            assert tap.data_ptr() not in {part.data_ptr() for part in (state.prefix_BTD, state.bank_BTJD)}
            tap.fill_(float("nan"))  # whoever gets it may do with it what he likes
        again = [part for part in (state.prefix_BTD, state.delta_BTD, state.bank_BTJD) if part is not None]
        closed = -(-(layer + 1) // 3)
        for one, other in zip(kept, again, strict=True):
            if one.dim() == 4:  # rows past the closed blocks were never written
                one, other = one[..., :closed, :], other[..., :closed, :]
            assert torch.equal(one, other)


def test_a_mixture_tap_has_the_vectors_of_the_layer_that_would_read_it() -> None:
    """Changing a layer's two vectors changes the tap in front of it, and none before."""
    target, ids = kimi_target(small_kimi_config(8, 4)), tokens()
    _, before = run(target, ids, "attn_res")
    for capture in range(1, 9):
        module = target.output_attn_res if capture == 8 else target.layers[capture].self_attention_res
        assert module is not None
        kept = module.proj.clone()
        module.proj += 1.0
        _, after = run(target, ids, "attn_res")
        module.proj.copy_(kept)
        same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        assert same[: capture + 1] == [True] * capture + [False]


def test_rows_of_the_bank_that_were_not_written_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    target, ids = kimi_target(small_kimi_config(8, 3)), tokens()
    expected = {stream: run(target, ids, stream) for stream in ("prefix", "attn_res")}

    def with_nan(self: KimiTarget, prefix: Tensor) -> Tensor:
        return torch.full((*prefix.shape[:-1], 7, prefix.shape[-1]), float("nan"), dtype=prefix.dtype)

    monkeypatch.setattr(KimiTarget, "_new_bank", with_nan)
    for stream, (logits, taps) in expected.items():
        again, others = run(target, ids, stream)
        assert torch.equal(again, logits)
        assert all(torch.equal(one, other) for one, other in zip(taps, others, strict=True))


# The module as others handle it.


def test_parts_that_must_be_exact_stay_in_float32() -> None:
    target = kimi_target(k3_tiny_config(), dtype=torch.bfloat16)
    exact = {name for name, parameter in target.named_parameters() if parameter.dtype == torch.float32}
    kinds = {name.split(".", 2)[2] for name in exact}
    assert kinds == {
        "self_attn.convolution.weight",
        "self_attn.decay.A_log",
        "self_attn.decay.dt_bias",
        "self_attn.o_norm.weight",
        "mlp.gate.weight",
        "mlp.gate.correction_bias",
    }
    assert torch.equal(target.layers[0].self_attn.decay.dt_bias, kimi_target().layers[0].self_attn.decay.dt_bias)
    empty = empty_target(target.contract, torch.bfloat16, torch.device("cpu"))
    assert {name for name, parameter in empty.named_parameters() if parameter.dtype == torch.float32} == exact


def test_a_boundary_is_nan_until_it_is_set() -> None:
    with torch.device("meta"):
        boundary = BoundaryScores(8)
    boundary.to(torch.bfloat16).to_empty(device="cpu")
    assert not boundary.is_set() and bool(boundary.norm.isnan().all()) and bool(boundary.proj.isnan().all())
    boundary.set(torch.ones(8), torch.ones(1, 8))
    assert boundary.is_set() and boundary.norm.dtype == torch.bfloat16


def test_default_ids_and_positions() -> None:
    target = kimi_target()
    assert target.default_capture_ids() == (2, 4, 5) and list(target.capture_ids) == list(range(9))
    assert target.position_table.shape == (4096, 0)
    ids = tokens(1, 5)
    logits = target.logits(target(ids, ids, WholeSequence()))
    assert torch.equal(logits, target.logits(target(ids, ids + 1000, WholeSequence()))), "positions mean nothing"


def test_callers_that_keep_keys_and_values_alone_are_refused() -> None:
    target, ids = kimi_target(small_kimi_config(4, 2)), tokens()
    with pytest.raises(CompatibilityError, match="function keeps keys and values alone"):
        target(ids, ids, lambda *_, **__: ids)


@pytest.mark.parametrize("mode", ["packed", "row_invariant", "fused"])
def test_other_arithmetics_agree_with_the_plain_one(mode: str) -> None:
    target, ids = kimi_target(small_kimi_config(8, 4), dtype=torch.bfloat16), tokens()
    plain = target.logits(target(ids, ids, sequence_attend(target)))
    set_linear_mode(target, mode)  # type: ignore[arg-type]
    other = target.logits(target(ids, ids, sequence_attend(target)))
    assert float((other - plain).abs().max()) < 2**-3 * float(plain.abs().max())
    assert torch.nn.functional.cosine_similarity(other.flatten().float(), plain.flatten().float(), dim=0) > 0.999


def test_a_contract_says_what_a_drafter_would_take_over() -> None:
    contract = kimi_contract(k3_tiny_config(rope_theta=50_000.0))
    assert contract.rope == RopeSettings(theta=50_000.0) and contract.head_size == 32
    assert contract.aux_hidden_streams == {"prefix", "attn_res"}
    assert kimi_contract(k3_tiny_config(attn_res_block_size=None)).aux_hidden_streams == {"prefix"}
