"""Attention residuals: worked tables of the spec, a slow float64 twin, one path with and without a delta, purity."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from paceline.errors import ShapeError
from paceline.ops.attention_residual import (
    OutputNorm,
    attention_residual,
    attention_residual_reference,
    attention_residual_triton,
    fold_delta,
    score_weights,
    tap_attention_residual,
)
from paceline.ops.rms_norm import rms_norm_reference

EPS = 1e-5


def slow_mixture(prefix_D: Tensor, bank_JD: Tensor, num_sources: int, score_D: Tensor) -> tuple[list[float], Tensor]:
    """One row at a time, in float64; the shares and the mixture."""
    sources = [*bank_JD[:num_sources].double(), prefix_D.double()]
    scores = []
    for source in sources:
        mean_square = sum(float(value) ** 2 for value in source) / len(source)
        scores.append(float((source * score_D.double()).sum()) / math.sqrt(mean_square + EPS))
    total = sum(math.exp(score - max(scores)) for score in scores)
    shares = [math.exp(score - max(scores)) / total for score in scores]
    mixed = torch.zeros_like(sources[0])
    for share, source in zip(shares, sources, strict=True):
        mixed += share * source
    return shares, mixed


# Spec 4.6: width 2, blocks of 2 layers, 3 layers, linear stand-ins for attention (A) and MLP (M).
ATTENTION_SCORES = [(0.3, -0.2), (0.5, 0.4), (-0.6, 0.7)]
MLP_SCORES = [(0.2, 0.6), (-0.4, 0.3), (0.8, -0.5)]
A = [[[0.5, 0.25], [-0.25, 0.5]], [[0.0, 1.0], [1.0, 0.0]], [[0.75, 0.0], [0.0, -0.5]]]
M = [[[1.0, 0.0], [0.0, 1.0]], [[0.5, -0.5], [0.5, 0.5]], [[-1.0, 0.5], [0.25, 1.0]]]
NUM_LAYERS, BLOCK = 3, 2


@dataclass
class Run:
    """What one pass over the toy model left behind."""

    inputs: list[Tensor] = field(default_factory=list)  # normed, of every sub-layer
    prefixes: dict[int, Tensor] = field(default_factory=dict)  # by capture id
    taps: dict[int, Tensor] = field(default_factory=dict)
    bank: Tensor = field(default_factory=lambda: torch.empty(0))


def run_toy_model(dtype: torch.dtype, *, cuts: tuple[int, ...] = (), spare_rows: int = 0) -> Run:
    """All layers; a cut hands over the folded prefix and the written bank rows, as a pipeline does."""

    def vector(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    run = Run()
    prefix, delta = torch.tensor([[1.0, -0.5]], dtype=dtype), None
    bank = torch.full((1, 2 + spare_rows, 2), torch.nan, dtype=dtype)
    attention_norm, mlp_norm = OutputNorm(vector(1, 2), EPS), OutputNorm(vector(0.5, 1), EPS)
    for layer in range(NUM_LAYERS):
        if layer in cuts:
            prefix, delta = fold_delta(prefix, delta), None
            received = bank[:, : math.ceil(layer / BLOCK)]
            bank = torch.full((1, 2 + 3 * spare_rows, 2), torch.nan, dtype=dtype)
            bank[:, : received.shape[1]] = received
        num_sources, writes = math.ceil(layer / BLOCK), layer % BLOCK == 0
        score = score_weights(vector(1, 1), vector(*ATTENTION_SCORES[layer])[None])
        run.prefixes[layer] = fold_delta(prefix, delta)
        run.taps[layer] = tap_attention_residual(run.prefixes[layer], bank, num_sources, score, eps=EPS)
        row = num_sources if writes else None
        prefix, x = attention_residual(
            prefix, bank, num_sources, score, eps=EPS, delta_TD=delta, write_row=row, norm=attention_norm
        )
        attended = x @ torch.tensor(A[layer], dtype=dtype).T
        if writes:
            prefix, delta = attended, None
        else:
            delta = attended
        score = score_weights(vector(1, 0.5), vector(*MLP_SCORES[layer]))
        prefix, y = attention_residual(
            prefix, bank, num_sources + writes, score, eps=EPS, delta_TD=delta, norm=mlp_norm
        )
        delta = y @ torch.tensor(M[layer], dtype=dtype).T
        run.inputs += [x, y]
    score = score_weights(vector(1, 1), vector(0.4, 0.1))
    run.prefixes[NUM_LAYERS], output = attention_residual(prefix, bank, 2, score, eps=EPS, delta_TD=delta)
    run.taps[NUM_LAYERS] = tap_attention_residual(run.prefixes[NUM_LAYERS], bank, 2, score, eps=EPS)
    assert torch.equal(run.taps[NUM_LAYERS], output), "the last tap is the model's output"
    run.bank = bank
    return run


def near(found: Tensor, *expected: float) -> None:
    torch.testing.assert_close(found, torch.tensor([expected], dtype=found.dtype), rtol=0, atol=1e-6)


def test_the_worked_example() -> None:
    run = run_toy_model(torch.float64)
    expected_inputs = [
        (1.264901, -1.264901),
        (0.513706, -0.971794),
        (0.970173, -2.057905),
        (-0.413454, -1.147251),
        (-0.253700, -2.782527),
        (0.520010, -0.958268),
    ]
    for found, expected in zip(run.inputs, expected_inputs, strict=True):
        near(found, *expected)
    expected_taps = [(1, -0.5), (0.940445, -0.997424), (-0.240793, -1.320483), (0.072752, -0.557492)]
    expected_prefixes = [(1, -0.5), (0.829931, -1.920470), (-0.861075, -1.730649), (-1.189419, 0.562998)]
    for capture_id in range(NUM_LAYERS + 1):
        near(run.taps[capture_id], *expected_taps[capture_id])
        near(run.prefixes[capture_id], *expected_prefixes[capture_id])
    near(run.bank[:, 0], 1, -0.5)
    near(run.bank[:, 1], -0.861075, -1.730649)
    near(rms_norm_reference(run.taps[3], torch.ones(2), EPS).double(), 0.182995, -1.402279)
    cosines = [float(torch.cosine_similarity(run.taps[i], run.prefixes[i])) for i in (1, 2, 3)]
    assert cosines == pytest.approx([0.940, 0.961, -0.541], abs=5e-4)


def test_the_worked_example_in_bfloat16() -> None:
    run = run_toy_model(torch.bfloat16)
    for capture_id, prefix, tap in (
        (1, (0.828125, -1.921875), (0.94140625, -0.99609375)),
        (2, (-0.8671875, -1.734375), (-0.24609375, -1.3203125)),
        (3, (-1.1953125, 0.55859375), (0.07080078, -0.55859375)),
    ):
        assert run.prefixes[capture_id].tolist() == [list(prefix)]
        torch.testing.assert_close(run.taps[capture_id].float(), torch.tensor([tap]), rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_cut_gives_the_same_bits(dtype: torch.dtype) -> None:
    whole = run_toy_model(dtype)
    for cuts in ((1,), (2,), (1, 2)):
        cut = run_toy_model(dtype, cuts=cuts, spare_rows=2)
        for capture_id in range(NUM_LAYERS + 1):
            assert torch.equal(cut.taps[capture_id], whole.taps[capture_id])
            assert torch.equal(cut.prefixes[capture_id], whole.prefixes[capture_id])
        assert torch.equal(cut.bank[:, :2], whole.bank)


def random_inputs(rows: int, bank_rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    prefix, delta = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    return prefix, delta, (torch.randn(rows, bank_rows, width) * 2).to(dtype), torch.randn(width)


@pytest.mark.parametrize("num_sources", [0, 1, 3])
def test_the_reference_agrees_with_a_slow_float64_twin(num_sources: int) -> None:
    prefix, delta, bank, score = random_inputs(5, 3, 7, torch.float32)
    folded, mixed = attention_residual(prefix, bank, num_sources, score, eps=EPS, delta_TD=delta)
    assert torch.equal(folded, prefix + delta)
    gain = torch.randn(7)
    _, normed = attention_residual(
        prefix, bank, num_sources, score, eps=EPS, delta_TD=delta, norm=OutputNorm(gain, 1e-3)
    )
    for row in range(5):
        shares, expected = slow_mixture(folded[row], bank[row], num_sources, score)
        assert len(shares) == num_sources + 1
        torch.testing.assert_close(mixed[row].double(), expected, rtol=1e-5, atol=1e-5)
        expected = expected / (expected.square().mean() + 1e-3).sqrt() * gain.double()
        torch.testing.assert_close(normed[row].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_delta_is_a_delta_of_zero(dtype: torch.dtype) -> None:
    prefix, _, bank, score = random_inputs(5, 3, 24, dtype)
    prefix[0, :3] = torch.tensor([-0.0, 0.0, -0.0])
    for num_sources, norm in ((0, None), (2, None), (3, OutputNorm(torch.randn(24), EPS))):
        found = attention_residual(prefix, bank, num_sources, score, eps=EPS, norm=norm)
        for zero in (0.0, -0.0):
            filled = attention_residual(
                prefix, bank, num_sources, score, eps=EPS, delta_TD=torch.full_like(prefix, zero), norm=norm
            )
            for ours, theirs in zip(found, filled, strict=True):
                assert torch.equal(ours, theirs)
                assert torch.equal(ours.signbit(), theirs.signbit()), "a zero keeps its sign, too"


def test_without_a_bank_the_mixture_is_the_prefix() -> None:
    prefix, _, bank, score = random_inputs(4, 0, 9, torch.float32)
    assert torch.equal(tap_attention_residual(prefix, bank, 0, score, eps=EPS), prefix)


def test_rows_that_were_never_written_are_never_read_and_strides_do_not_matter() -> None:
    prefix, delta, bank, score = random_inputs(5, 2, 24, torch.float32)
    expected = attention_residual(prefix, bank, 2, score, eps=EPS, delta_TD=delta)
    larger = torch.full((5, 9, 24), torch.nan)
    larger[:, :2] = bank
    for other in (larger, larger[:, :3]):
        found = attention_residual(prefix, other, 2, score, eps=EPS, delta_TD=delta)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    _, leaked = attention_residual(prefix, larger, 3, score, eps=EPS, delta_TD=delta)
    assert leaked.isnan().all(), "the check above would see it"


def test_a_row_is_written_after_the_mixture_and_without_changing_it() -> None:
    prefix, delta, bank, score = random_inputs(5, 4, 8, torch.bfloat16)
    bank[:, 2:] = torch.nan
    before = bank.clone()
    expected = attention_residual(prefix, bank, 2, score, eps=EPS, delta_TD=delta)
    found = attention_residual(prefix, bank, 2, score, eps=EPS, delta_TD=delta, write_row=2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert torch.equal(bank[:, 2], found[0])
    bank[:, 2] = torch.nan
    assert torch.equal(bank.nan_to_num(7.0), before.nan_to_num(7.0)), "no other row changed"


def test_a_tap_is_a_pure_read() -> None:
    prefix, _, bank, score = random_inputs(5, 2, 8, torch.float32)
    before = prefix.clone(), bank.clone()
    tap = tap_attention_residual(prefix, bank, 2, score, eps=EPS)
    _, normed = attention_residual(prefix, bank, 2, score, eps=EPS, norm=OutputNorm(torch.ones(8), EPS))
    assert (tap - normed).abs().max() > 0.01, "not the consumer's normed input"
    tap_without_bank = tap_attention_residual(prefix, bank, 0, score, eps=EPS)
    tap.fill_(9.0), tap_without_bank.fill_(9.0)
    kept = fold_delta(prefix, None)
    kept.fill_(9.0)
    assert torch.equal(prefix, before[0]) and torch.equal(bank, before[1])


def test_leading_dimensions_are_rows() -> None:
    prefix, delta, bank, score = random_inputs(6, 3, 8, torch.float32)
    flat = attention_residual(prefix, bank.clone(), 2, score, eps=EPS, delta_TD=delta, write_row=2)
    folded, mixed = attention_residual(
        prefix.view(2, 3, 8), bank.view(2, 3, 3, 8), 2, score, eps=EPS, delta_TD=delta.view(2, 3, 8), write_row=2
    )
    assert torch.equal(folded.view(6, 8), flat[0]) and torch.equal(mixed.view(6, 8), flat[1])
    assert torch.equal(bank[:, 2], flat[0]), "written through the view"


def test_a_rows_bits_do_not_depend_on_other_rows() -> None:
    for width in (7, 24, 65, 320):
        prefix, delta, bank, score = random_inputs(13, 4, width, torch.float32)
        norm = OutputNorm(torch.randn(width), EPS)
        _, whole = attention_residual(prefix, bank, 4, score, eps=EPS, delta_TD=delta, norm=norm)
        for row in (0, 1, 12):
            one = slice(row, row + 1)
            _, alone = attention_residual(prefix[one], bank[one], 4, score, eps=EPS, delta_TD=delta[one], norm=norm)
            assert torch.equal(alone[0], whole[row])


def test_gradients_with_a_written_row() -> None:
    prefix, delta, bank, score = (t.double() for t in random_inputs(2, 2, 3, torch.float32))
    delta[0] = 0.0
    gain = torch.randn(3, dtype=torch.float64)

    def layer(prefix: Tensor, delta: Tensor, bank: Tensor, score: Tensor, gain: Tensor) -> Tensor:
        bank = bank.clone()
        folded, x = attention_residual(
            prefix, bank, 1, score, eps=EPS, delta_TD=delta, write_row=1, norm=OutputNorm(gain, EPS)
        )
        _, y = attention_residual(folded * x, bank, 2, score, eps=EPS)
        return y

    leaves = [t.requires_grad_() for t in (prefix, delta, bank, score, gain)]
    assert torch.autograd.gradcheck(layer, leaves)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bank_TJD": torch.zeros(2, 3, 5)}, "bank has shape"),
        ({"bank_TJD": torch.zeros(1, 3, 4)}, "bank has shape"),
        ({"delta_TD": torch.zeros(2, 5)}, "delta has shape"),
        ({"score_D": torch.zeros(1, 4)}, "score has shape"),
        ({"num_sources": 4}, "at least 4 rows"),
        ({"num_sources": -1}, "no fewer than 0"),
        ({"write_row": 0}, "row 0 to write, right behind the 2 valid"),
        ({"write_row": 3, "num_sources": 3}, "row 3 to write"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "prefix_TD": torch.zeros(2, 4),
        "bank_TJD": torch.zeros(2, 3, 4),
        "num_sources": 2,
        "score_D": torch.zeros(4),
    }
    with pytest.raises(ShapeError, match=message):
        attention_residual(**(arguments | changes), eps=EPS)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "bank_rows", "num_sources", "width"), [(1, 1, 0, 1), (3, 3, 2, 7), (2, 9, 8, 24), (2, 5, 1, 300)]
)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_delta", [True, False])
def test_the_kernel_agrees_with_the_reference(
    kernel_device: torch.device,
    dtype: torch.dtype,
    rows: int,
    bank_rows: int,
    num_sources: int,
    width: int,
    has_norm: bool,
    has_delta: bool,
) -> None:
    prefix, delta, bank, score = random_inputs(rows, bank_rows, width, dtype)
    bank[:, num_sources:] = torch.nan
    norm = OutputNorm(torch.randn(width), EPS) if has_norm else None
    there = [t.to(kernel_device) for t in (prefix, delta, bank, score)]
    norm_there = OutputNorm(norm.weight_D.to(kernel_device), EPS) if norm is not None else None
    expected = attention_residual_reference(
        prefix, bank, num_sources, score, EPS, delta if has_delta else None, num_sources, norm
    )
    found = attention_residual_triton(
        there[0], there[2], num_sources, there[3], EPS, there[1] if has_delta else None, num_sources, norm_there
    )
    # The interpreter cuts the folded sum down to bf16 where a GPU rounds, and its scores carry that on.
    unit = 2**-4 if kernel_device.type == "cpu" and has_delta else 2**-6
    tolerance = 2e-5 if dtype == torch.float32 else unit
    for ours, theirs in zip((*found, there[2][:, num_sources]), (*expected, bank[:, num_sources]), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(there[2].isnan().cpu(), bank.isnan()), "only one row was written"
    assert torch.equal(there[0].cpu(), prefix), "the prefix is not changed in place"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [True, False])
def test_the_kernel_knows_no_difference_between_no_delta_and_zero(
    kernel_device: torch.device, dtype: torch.dtype, has_norm: bool
) -> None:
    prefix, _, bank, score = (t.to(kernel_device) for t in random_inputs(3, 4, 24, dtype))
    prefix[0, :2] = torch.tensor([-0.0, 0.0])
    norm = OutputNorm(torch.randn(24).to(kernel_device), EPS) if has_norm else None
    wide_bank = torch.full((3, 7, 24), torch.nan, dtype=dtype, device=kernel_device)
    wide_bank[:, :4] = bank
    for num_sources in (0, 1, 4):
        without = attention_residual_triton(prefix, bank, num_sources, score, EPS, None, None, norm)
        for zero in (0.0, -0.0):
            delta = torch.full_like(prefix, zero)
            filled = attention_residual_triton(prefix, wide_bank, num_sources, score, EPS, delta, None, norm)
            for ours, theirs in zip(without, filled, strict=True):
                assert torch.equal(ours, theirs) and torch.equal(ours.signbit(), theirs.signbit())
