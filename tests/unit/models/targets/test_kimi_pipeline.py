"""Every cut of a Kimi target computes what the whole target does, to the last bit: taps 0 to L, logits, written tokens.

The model has 32 layers in blocks of 8, so of its 31 cuts 3 lie between blocks. Two faults of public engines are
planted, each of which keeps logits or a few cuts right and so would pass a weaker test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.tiny_kimi import kimi_target, small_kimi_config
from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId
from paceline.errors import ConfigError
from paceline.models.attends import WholeSequence
from paceline.models.stepwise import StepwiseContext
from paceline.models.taps import TapCollector
from paceline.models.targets import kimi_layer, kimi_stage
from paceline.models.targets.kimi import KimiTarget
from paceline.models.targets.kimi_layer import ResidualStream
from paceline.models.targets.kimi_pipeline import KimiPipeline, cut_target, stage_ranges
from paceline.models.targets.kimi_stage import KimiStage
from paceline.ops.attention_residual import OutputNorm, attention_residual

LAYERS, BLOCK = 32, 8
CUTS = range(1, LAYERS)
SOME_CUTS = (1, 7, 8, 9, 16, 21, 31)
ALIGNED = [cut for cut in CUTS if cut % BLOCK == 0]
ALL_IDS = [CaptureId(capture) for capture in range(LAYERS + 1)]
FEW_EXPERTS = {"first_k_dense_replace": 24}  # in the last block alone, for time
STREAMS: tuple[AuxHiddenStream, ...] = ("prefix", "attn_res")


@pytest.fixture(autouse=True)
def _as_served() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def deep(request: pytest.FixtureRequest) -> KimiTarget:
    return kimi_target(small_kimi_config(LAYERS, BLOCK, **FEW_EXPERTS), dtype=request.param)


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 4), generator=torch.Generator().manual_seed(1))


def taps_and_logits(
    model: KimiTarget | KimiPipeline, tokens: Tensor, stream: AuxHiddenStream, ids: Sequence[CaptureId] = ALL_IDS
) -> tuple[list[Tensor], Tensor]:
    taps = TapCollector(ids, stream)
    if isinstance(model, KimiTarget):
        hidden = model(tokens, torch.zeros_like(tokens), WholeSequence(), taps)
        return taps.collected(), model.logits(hidden)
    model.prepare_taps(ids, stream)
    hidden = model(tokens, WholeSequence(), taps)
    return taps.collected(), model.logits(hidden)


def surviving_cuts(
    target: KimiTarget, tokens: Tensor, cuts: Sequence[int] = CUTS, streams: Sequence[AuxHiddenStream] = STREAMS
) -> list[int]:
    """The two-stage cuts at which every tap of every stream, and the logits, have the bits of the whole target."""
    expected = {stream: taps_and_logits(target, tokens, stream) for stream in streams}
    survivors = []
    for cut in cuts:
        pipeline = KimiPipeline(cut_target(target, [cut]))
        found = {stream: taps_and_logits(pipeline, tokens, stream) for stream in streams}
        if all(_identical(found[stream], expected[stream]) for stream in streams):
            survivors.append(cut)
    return survivors


def _identical(found: tuple[list[Tensor], Tensor], expected: tuple[list[Tensor], Tensor]) -> bool:
    pairs = zip([*found[0], found[1]], [*expected[0], expected[1]], strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_all_31_cuts_give_the_same_taps_and_logits(deep: KimiTarget, tokens: Tensor) -> None:
    assert surviving_cuts(deep, tokens) == list(CUTS)


def test_streams_differ_wherever_there_is_more_than_one_source(deep: KimiTarget, tokens: Tensor) -> None:
    """Else the test above would prove nothing of one of them."""
    prefix, _ = taps_and_logits(deep, tokens, "prefix")
    mixed, _ = taps_and_logits(deep, tokens, "attn_res")
    assert [torch.equal(one, other) for one, other in zip(prefix, mixed, strict=True)] == [True] + [False] * LAYERS


@pytest.mark.parametrize("borders", [[8, 16], [3, 5], [1, 31], [15, 16], [2, 9, 10, 24]])
def test_more_stages_and_middle_ones_that_tap_nothing(deep: KimiTarget, tokens: Tensor, borders: list[int]) -> None:
    pipeline = KimiPipeline(cut_target(deep, borders))
    outside = [capture for capture in ALL_IDS if not borders[0] < capture <= borders[1]]
    for ids in (ALL_IDS, outside, [CaptureId(0)], [CaptureId(LAYERS)]):
        expected = taps_and_logits(deep, tokens, "attn_res", ids)
        assert _identical(taps_and_logits(pipeline, tokens, "attn_res", ids), expected)


@pytest.mark.parametrize("block_size", [None, 1, 3, 8])
def test_other_blocks_at_every_cut_of_eight_layers(block_size: int | None, tokens: Tensor) -> None:
    target = kimi_target(small_kimi_config(8, block_size))
    streams: list[AuxHiddenStream] = ["prefix"] if block_size is None else ["prefix", "attn_res"]
    ids = [CaptureId(capture) for capture in range(9)]
    for cut in range(1, 8):
        pipeline = KimiPipeline(cut_target(target, [cut]))
        for stream in streams:
            expected = taps_and_logits(target, tokens, stream, ids)
            assert _identical(taps_and_logits(pipeline, tokens, stream, ids), expected)


def test_written_tokens_are_the_same_at_every_cut_of_eight_layers(tokens: Tensor) -> None:
    target = kimi_target(small_kimi_config(8, 4), mode="row_invariant")

    def write(model: KimiTarget | KimiPipeline) -> tuple[list[int], Tensor]:
        context = StepwiseContext(target.contract, 1, 32, dtype=torch.float32, device="cpu")
        rows, written, last = tokens[:1], [], torch.zeros(0)
        for _ in range(8):
            if isinstance(model, KimiTarget):
                last = model.logits(model(rows, torch.zeros_like(rows), context))
            else:
                last = model.logits(model(rows, context))
            context.commit(torch.tensor([rows.shape[1]]))
            rows = last[:, -1:].argmax(-1)
            written.append(int(rows))
        return written, last

    expected = write(target)
    for cut in range(1, 8):
        found = write(KimiPipeline(cut_target(target, [cut])))
        assert found[0] == expected[0] and torch.equal(found[1], expected[1])


def test_what_crosses_is_one_prefix_and_the_closed_blocks(deep: KimiTarget, tokens: Tensor) -> None:
    for cut, num_rows in ((1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3), (31, 4)):
        first, second = cut_target(deep, [cut])
        stream = first.run(first.begin(deep.embed(tokens)), WholeSequence(), None)
        handed = first.hand_over(stream, None)
        assert handed.bank_BTJD is not None
        assert handed.bank_BTJD.shape == (2, 4, num_rows, 32) and handed.bank_BTJD.dtype == deep.norm.weight.dtype
        received = second.receive(handed)
        assert received.bank_BTJD is not None and received.bank_BTJD.shape == (2, 4, LAYERS // BLOCK, 32)
        assert (received.delta_BTD is None) == (cut % BLOCK == 0)
        kept = handed.bank_BTJD.clone()
        second.run(received, WholeSequence(), None)
        assert torch.equal(handed.bank_BTJD, kept), "what another stage handed over is not written to"


# Planted faults.


def test_falling_back_to_the_prefix_at_a_boundary_fails_at_every_cut(
    deep: KimiTarget, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a first version of a public engine did: the logits are right, and the tap at the cut is another feature."""
    mix = KimiStage._mixed_tap

    def fall_back(self: KimiStage, folded: Tensor, stream: ResidualStream, capture: int) -> Tensor:
        is_boundary = self.boundary is not None and capture == self.end
        return folded if is_boundary else mix(self, folded, stream, capture)

    monkeypatch.setattr(KimiStage, "_mixed_tap", fall_back)
    assert surviving_cuts(deep, tokens, SOME_CUTS, ["attn_res"]) == []
    assert surviving_cuts(deep, tokens, SOME_CUTS, ["prefix"]) == list(SOME_CUTS), "this stream has no such place"


def two_kernels(
    prefix: Tensor,
    bank: Tensor,
    num_sources: int,
    score: Tensor,
    *,
    eps: float,
    delta_TD: Tensor | None = None,
    write_row: int | None = None,
    norm: OutputNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """The mixture by two kernels, chosen as a public engine chose, by whether there is a delta and no write.

    The second sums backwards, over score vectors rounded to bfloat16 as another public engine stores them: in 16 bits,
    the order of sums alone would hardly ever show.
    """
    if delta_TD is None or write_row is not None:
        return attention_residual(
            prefix, bank, num_sources, score, eps=eps, delta_TD=delta_TD, write_row=write_row, norm=norm
        )
    turned = None if norm is None else OutputNorm(norm.weight_D.flip(-1), norm.eps)
    rounded = score.flip(-1).bfloat16().float()
    folded, mixed = attention_residual(
        prefix.flip(-1), bank.flip(-1), num_sources, rounded, eps=eps, delta_TD=delta_TD.flip(-1), norm=turned
    )
    return folded.flip(-1), mixed.flip(-1)


def with_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kimi_layer, kimi_stage):
        monkeypatch.setattr(module, "attention_residual", two_kernels)


def test_a_kernel_chosen_by_the_delta_is_chosen_alike_at_every_cut(
    deep: KimiTarget, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_two_kernels(monkeypatch)
    assert surviving_cuts(deep, tokens, SOME_CUTS) == list(SOME_CUTS)


def test_without_the_zero_delta_such_a_kernel_differs_behind_most_cuts(
    deep: KimiTarget, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_two_kernels(monkeypatch)
    monkeypatch.setattr(KimiStage, "entry_delta", staticmethod(lambda _prefix: None))
    assert surviving_cuts(deep, tokens, CUTS, ["attn_res"]) == ALIGNED


@pytest.mark.parametrize("fault", ["delta", "bank", "owner"])
def test_other_faults_of_a_hand_over_are_seen(
    fault: str, deep: KimiTarget, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over = KimiStage.hand_over

    def wrong(self: KimiStage, stream: ResidualStream, taps: Any) -> Any:
        handed = hand_over(self, stream, taps)
        if fault == "delta":  # what is pending is lost
            return type(handed)(stream.prefix_BTD, handed.bank_BTJD, handed.taps)
        if fault == "bank":  # a row twice, another lost
            assert handed.bank_BTJD is not None
            bank = handed.bank_BTJD[..., :1, :].expand_as(handed.bank_BTJD)
            return type(handed)(handed.prefix_BTD, bank, handed.taps)
        taken = {capture: tap for capture, tap in handed.taps.items() if capture != self.end}
        return type(handed)(handed.prefix_BTD, handed.bank_BTJD, taken)

    monkeypatch.setattr(KimiStage, "hand_over", wrong)
    cut = 12
    if fault == "owner":  # a tap that nobody takes is missed, not left out
        with pytest.raises(AssertionError, match=r"never reached capture ids \[12\]"):
            surviving_cuts(deep, tokens, [cut])
    else:
        assert surviving_cuts(deep, tokens, [cut]) == []


@pytest.mark.parametrize("borders", [[0], [32], [33], [4, 4], [9, 3], [-1]])
def test_impossible_cuts_are_refused(borders: list[int]) -> None:
    with pytest.raises(ConfigError, match="cuts ascend, from 1 to 31"):
        stage_ranges(LAYERS, borders)


def test_stages_that_are_not_the_whole_target_are_refused() -> None:
    contract = kimi_target(small_kimi_config(4, 2)).contract
    for ranges in ([(0, 2), (3, 4)], [(0, 3), (2, 4)], [(1, 4)], [(0, 3)], [(2, 4), (0, 2)]):
        with pytest.raises(ConfigError, match=r"each of them once, in order|cuts ascend"):
            KimiPipeline([KimiStage(contract, *pair) for pair in ranges])
    with pytest.raises(ConfigError, match="a stage of layers 3 to 4 was asked for"):
        KimiStage(contract, 3, 5)
