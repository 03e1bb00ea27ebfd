"""At how many cuts a Kimi target computes what it computes in one piece, to the last bit; and with planted faults.

    python -m benchmarks.partition_invariance --out docs/results
    python -m benchmarks.partition_invariance --device cuda --stages 2 --out docs/results    through a GPU's kernels

A random target of 32 layers in blocks of 8 runs whole, and cut in two before every layer but the first; of three
stages, every pair of cuts, with no capture id in the middle stage. A cut counts if taps 0 to 32 and the logits are
identical, of two stages in both streams. Then two faults of public engines are planted. `prefix at the boundary`: the
tap at a stage's end falls back to the running sum; `cosine` is how far that is from the mixture that it stands for.
`two kernels, no zero delta`: the mixture has a second kernel, which sums backwards over score vectors that are rounded
to bfloat16, for calls with a delta and without a write, and a stage that starts inside a block hands its first layer no
delta; the row before has both kernels and the zero delta.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.command_line import DTYPES, positive, report, run, say
from benchmarks.random_kimi import kimi_config, random_kimi
from benchmarks.results import text_table

from paceline.errors import EXIT_DONE

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.checkpoint.contract import AuxHiddenStream, CaptureId
    from paceline.models.targets.kimi import KimiTarget
    from paceline.ops.attention_residual import OutputNorm

NAME = "partition-invariance"
STREAMS: tuple[AuxHiddenStream, ...] = ("prefix", "attn_res")
Found = tuple[list["Tensor"], "Tensor"]  # taps and logits


def main(arguments: Sequence[str]) -> int:
    """Run every dtype and print the table."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    rows = [row for dtype in options.dtype for row in measure(dtype, options)]
    print(text_table(rows))
    facts = [f"width {options.hidden_size}", f"{options.num_tokens} tokens"]
    name = NAME if options.device == "cpu" else f"{NAME}-gpu"  # one machine, and so one file, for each
    report(name, rows, options, arguments, device=options.device, facts=facts)
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default cpu")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="one or both; default both")
    parser.add_argument(
        "--stages", type=int, choices=(2, 3), nargs="+", default=[2, 3], help="one or both; default both"
    )
    parser.add_argument("--num-layers", type=positive, default=32, help="default 32")
    parser.add_argument("--block-size", type=positive, default=8, help="layers per block; default 8")
    parser.add_argument("--hidden-size", type=positive, default=64, help="a multiple of 32; default 64")
    parser.add_argument("--num-tokens", type=positive, default=8, help="of the sequence; default 8")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads; default 2")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.json, such as docs/results")
    return parser.parse_args(arguments)


def measure(dtype: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """All rows of one dtype."""
    import torch

    target = make_target(options, getattr(torch, dtype))
    generator = torch.Generator().manual_seed(1)
    vocab_size = target.contract.vocab_size
    ids_BT = torch.randint(0, vocab_size, (1, options.num_tokens), generator=generator).to(options.device)
    cuts = [[cut] for cut in range(1, options.num_layers)]
    pairs = [list(pair) for pair in itertools.combinations(range(1, options.num_layers), 2)]
    rows: list[dict[str, object]] = []

    def add(stages: int, fault: str | None, survivors: Sequence[object], of: int, **more: object) -> None:
        where = "cpu" if options.device == "cpu" else "gpu"
        row: dict[str, object] = {"where": where, "dtype": dtype, "stages": stages, "num_cuts": of}
        rows.append({**row, "num_identical": len(survivors), "planted_fault": fault, "cosine": None, **more})
        say(f"{dtype}, {stages} stages, {fault or 'no fault'}: {len(survivors)} of {of}")

    if 2 in options.stages:
        add(2, None, surviving(target, ids_BT, cuts, STREAMS), len(cuts))
    if 3 in options.stages:
        add(3, None, surviving(target, ids_BT, pairs, ("attn_res",), skip_middle=True), len(pairs))
    if 2 not in options.stages:
        return rows
    cosines: list[float] = []
    with prefix_at_the_boundary(cosines):
        survivors = surviving(target, ids_BT, cuts, ("attn_res",))
    spread = f"{min(cosines):.2f} to {max(cosines):.2f}, median {statistics.median(cosines):.2f}"
    add(2, "prefix at the boundary", survivors, len(cuts), cosine=spread)
    with two_kernels():
        add(2, "two kernels", surviving(target, ids_BT, cuts, STREAMS), len(cuts))
        with no_zero_delta():
            add(2, "two kernels, no zero delta", surviving(target, ids_BT, cuts, ("attn_res",)), len(cuts))
    return rows


def make_target(options: argparse.Namespace, dtype: Any) -> KimiTarget:
    """A random target with every feature of Kimi-K3."""
    import torch

    config = kimi_config(options.num_layers, options.block_size, options.hidden_size)
    return random_kimi(config, dtype, torch.device(options.device))


def surviving(
    target: KimiTarget,
    ids_BT: Tensor,
    cuts: Sequence[list[int]],
    streams: Sequence[AuxHiddenStream],
    *,
    skip_middle: bool = False,
) -> list[list[int]]:
    """The cuts at which the pipeline has the bits of the whole target.

    Args:
        target: whole.
        ids_BT: a sequence.
        cuts: first layers of all stages but the first.
        streams: that must agree.
        skip_middle: tap nothing inside the second of three stages.
    """
    import torch

    from paceline.checkpoint.contract import CaptureId
    from paceline.models.targets.kimi_pipeline import KimiPipeline, cut_target

    whole: dict[tuple[object, ...], Found] = {}
    survivors = []
    for borders in cuts:
        ids = [CaptureId(capture) for capture in target.capture_ids]
        if skip_middle:
            ids = [capture for capture in ids if not borders[0] < capture <= borders[1]]
        pipeline, is_identical = KimiPipeline(cut_target(target, borders)), True
        for stream in streams:
            key = (stream, *(ids if skip_middle else ()))
            if key not in whole:
                whole[key] = found_by(target, ids_BT, ids, stream)
            (taps, logits), (others, expected) = found_by(pipeline, ids_BT, ids, stream), whole[key]
            pairs = zip([*taps, logits], [*others, expected], strict=True)
            is_identical &= all(torch.equal(one, other) for one, other in pairs)
        if is_identical:
            survivors.append(borders)
    return survivors


def found_by(model: Any, ids_BT: Tensor, ids: Sequence[CaptureId], stream: AuxHiddenStream) -> Found:
    """Taps and logits of a whole target or of a pipeline."""
    import torch

    from paceline.models.attends import WholeSequence
    from paceline.models.taps import TapCollector
    from paceline.models.targets.kimi import KimiTarget

    taps = TapCollector(ids, stream)
    with torch.no_grad():
        if isinstance(model, KimiTarget):
            logits = model.logits(model(ids_BT, ids_BT, WholeSequence(), taps))
        else:
            model.prepare_taps(ids, stream)
            logits = model.logits(model(ids_BT, WholeSequence(), taps))
    return taps.collected(), logits


@contextmanager
def prefix_at_the_boundary(cosines: list[float]) -> Iterator[None]:
    """Plant the first fault; collects how far the fallback is from the mixture, over all tokens of a cut."""
    from torch.nn.functional import cosine_similarity

    from paceline.models.targets.kimi_stage import KimiStage

    mix: Callable[..., Tensor] = KimiStage._mixed_tap

    def fall_back(self: KimiStage, folded_BTD: Tensor, *arguments: Any) -> Tensor:
        mixed_BTD = mix(self, folded_BTD, *arguments)
        if self.boundary is None or arguments[-1] != self.end:
            return mixed_BTD
        cosines.append(float(cosine_similarity(folded_BTD.float(), mixed_BTD.float(), dim=-1).mean()))
        return folded_BTD

    with patch.object(KimiStage, "_mixed_tap", fall_back):
        yield


@contextmanager
def two_kernels() -> Iterator[None]:
    """Give the mixture a second kernel, of other rounding, where there is a delta and no write."""
    from paceline.models.targets import kimi_layer, kimi_stage

    with (
        patch.object(kimi_layer, "attention_residual", _either),
        patch.object(kimi_stage, "attention_residual", _either),
    ):
        yield


@contextmanager
def no_zero_delta() -> Iterator[None]:
    """Plant the second fault."""
    from paceline.models.targets.kimi_stage import KimiStage

    with patch.object(KimiStage, "entry_delta", staticmethod(lambda _prefix: None)):
        yield


def _either(
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
    from paceline.ops.attention_residual import OutputNorm, attention_residual

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


if __name__ == "__main__":
    sys.exit(run(main))
