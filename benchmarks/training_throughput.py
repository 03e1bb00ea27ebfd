"""Target tokens per second that training gets through, eager and compiled, beside the machine's matrix ceiling.

    python -m benchmarks.training_throughput --device cuda --out docs/results
    python -m benchmarks.training_throughput --device cuda --profile    # where the time of a step goes

Random weights of SmolLM2's shape, drafters of the shape that `examples/train_smollm2_*.toml` ask for, conversations of
seeded random lengths: neither weights nor text change the time of a step. Only tokens of the conversations count, not
padding. The share of the ceiling is the step's own products (no recomputation, no padding counted twice) over what one
large bf16 product reaches on the same device in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from benchmarks.command_line import positive, report, say
from benchmarks.command_line import run as run_main
from benchmarks.results import text_table
from tokenizers import Tokenizer
from tokenizers.models import BPE

from paceline.checkpoint.contract import DrafterContract, RopeSettings, TargetContract
from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.configuration.load import load_settings
from paceline.configuration.run import TrainRun
from paceline.errors import EXIT_DONE
from paceline.models.building import empty_target
from paceline.models.drafters.table import Drafter
from paceline.models.loading import LoadedTarget, resolve_device
from paceline.training.batches import anchor_generators
from paceline.training.contract import drafter_contract
from paceline.training.data import Batch, BatchOrder, Conversations
from paceline.training.features import TargetFeatures
from paceline.training.objective import Objective
from paceline.training.optimizer import make_optimizer
from paceline.training.starting import starting_drafter
from paceline.training.step import StepSettings, train_step

NAME = "training-throughput"

_EXAMPLES = Path(__file__).parents[1] / "examples"
_FAMILIES = ("dflash", "dflash2", "dspark", "eagle3")
_PROTOTYPE = 140_000.0  # tokens/s of the prototype that this project was calibrated with: eager, one H200, DFlash2
_RATE = 1e-4
_PROMPT_TOKENS = 48
_BATCHES = 16
_WARM_UP = 8
_CEILING_SIZE = {"cuda": 8192, "cpu": 1024}


def smollm2_contract() -> TargetContract:
    """SmolLM2-135M's sizes."""
    return TargetContract(
        architecture="LlamaForCausalLM",
        name="smollm2-135m shape",
        origin="random weights",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        rope=RopeSettings(theta=100_000.0),
        max_position_embeddings=8192,
        has_qk_norm=False,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        stop_token_ids=(2,),
        bos_token_id=1,
        dtype="bfloat16",
    )


def random_target(contract: TargetContract, device: torch.device, dtype: torch.dtype) -> LoadedTarget:
    """Weights at N(0, 0.02), gains at 1."""
    nothing = TextTokenizer(Tokenizer(BPE()), chat_template=None, special_tokens={}, origin="no tokenizer is needed")
    model = empty_target(contract, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)
    return LoadedTarget(model, contract, nothing, "plain")


def random_conversations(count: int, longest: int, vocab_size: int) -> Conversations:
    """Lengths spread around 240 tokens, none beyond `longest`; a fixed prompt, and answers to the end."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.normal(240, 90, count), _PROMPT_TOKENS + 16, longest).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    supervised = np.ones(starts[-1], bool)
    for start in starts[:-1]:
        supervised[start : start + _PROMPT_TOKENS] = False
    return Conversations(draw.integers(3, vocab_size, starts[-1]).astype(np.int32), supervised, starts)


def step_flops(target: TargetContract, drafter: DrafterContract, batch: Batch, num_anchors: int) -> float:
    """Products of one step: target forward; drafter forward and backward; both heads, and the head's backward."""
    tokens = float(batch.lengths_B.sum())
    head_rows = float(len(batch.lengths_B) * num_anchors * drafter.num_draft_tokens)
    rows = float(len(batch.lengths_B) * num_anchors * drafter.block_size)
    layer = _layer_weights(target.hidden_size, target.num_heads, target.num_kv_heads, target.head_size)
    body = target.num_layers * (layer + 3 * target.hidden_size * target.intermediate_size)
    own = drafter.num_layers * (
        _layer_weights(drafter.hidden_size, drafter.num_heads, drafter.num_kv_heads, drafter.head_size)
        + 3 * drafter.hidden_size * drafter.intermediate_size
    )
    context = drafter.num_taps * drafter.target_hidden_size * drafter.hidden_size
    context += drafter.num_layers * 2 * drafter.hidden_size * drafter.num_kv_heads * drafter.head_size
    head = target.hidden_size * target.vocab_size
    return 2 * (body * tokens + 3 * (context * tokens + own * rows) + 3 * head * head_rows)


def _layer_weights(width: int, num_heads: int, num_kv_heads: int, head_size: int) -> int:
    return width * head_size * (2 * num_heads + 2 * num_kv_heads)


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of one large product."""
    size = _CEILING_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = _seconds(lambda: a @ b, device, repeats=10)
    return 2 * size**3 / statistics.median(seconds)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    found = []
    for _ in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - began)
    return found[2:]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Case:
    """A drafter of one family over the random target, ready to step."""

    def __init__(self, run: TrainRun, target: LoadedTarget, data: Conversations, *, compiled: bool) -> None:
        self.device = target.model.norm.weight.device
        is_gpu = self.device.type == "cuda"
        self.contract = drafter_contract(run, target.contract)
        self.drafter: Drafter = starting_drafter(run, self.contract, target, data, self.device)
        self.optimizer = make_optimizer(self.drafter, weight_decay=0.01, betas=(0.9, 0.95))
        weights = run.objective.loss_weights
        objective = Objective(
            kl=weights.get("kl", 0.0),
            ce=weights.get("ce", 0.0),
            l1=weights.get("l1", 0.0),
            gamma=run.objective.gamma,
            chunk_rows=run.objective.chunk_rows,
            compiled=compiled,
        )
        self.settings = StepSettings(objective, run.schedule.num_anchors, 1.0, mixed_precision=is_gpu)
        self.features = TargetFeatures(target.model, self.contract.target_layer_ids, is_compiled=compiled)
        order = BatchOrder(np.diff(data.starts), run.schedule.batch_size, 0)
        self.batches = [data.batch(order(step), run.data.max_length) for step in range(order.batches_per_epoch)]

    def batch(self, number: int) -> Batch:
        """The batch of a step."""
        return self.batches[number % len(self.batches)]

    def step(self, number: int) -> int:
        """One optimizer step; the number of its tokens."""
        result = train_step(
            self.drafter,
            self.features,
            self.optimizer,
            [self.batch(number)],
            anchor_generators(0, number),
            _RATE,
            self.settings,
        )
        _wait(self.device)
        return result.num_tokens


def measure(case: Case, num_steps: int, ceiling: float, target: TargetContract) -> dict[str, object]:
    """Warm up on every batch shape, then time steps one by one."""
    began = time.perf_counter()
    widths: set[int] = set()
    for number in range(len(case.batches)):
        width = case.batch(number).token_ids_BS.shape[1]
        if width not in widths or number < _WARM_UP:
            case.step(number)
            widths.add(width)
    warm_up = time.perf_counter() - began
    seconds, tokens, flops = [], 0, 0.0
    for number in range(num_steps):
        began = time.perf_counter()
        tokens += case.step(number)
        seconds.append(time.perf_counter() - began)
        flops += step_flops(target, case.contract, case.batch(number), case.settings.num_anchors)
    return {
        "tokens_per_second": tokens / sum(seconds),
        "step_ms": 1e3 * statistics.median(seconds),
        "floor_ms": 1e3 * flops / num_steps / ceiling,
        "share_of_ceiling": flops / sum(seconds) / ceiling,
        "over_prototype": tokens / sum(seconds) / _PROTOTYPE,
        "warm_up_s": warm_up,
    }


def main(arguments: Sequence[str]) -> int:
    """Time every family, eager and compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads; default 2")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.json, such as docs/results")
    parser.add_argument("--families", nargs="+", choices=_FAMILIES, default=list(_FAMILIES))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--num-anchors", type=positive, nargs="+", default=[32], help="blocks per conversation")
    parser.add_argument("--max-length", type=positive, default=384)
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--profile", action="store_true", help="print the operations of three steps")
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_num_threads(options.threads)
    ceiling = matmul_ceiling(device, dtype)
    say(f"one large product: {ceiling / 1e12:.4g} TFLOP/s")
    contract = smollm2_contract()
    data = random_conversations(options.batch_size * _BATCHES, options.max_length, contract.vocab_size)
    rows: list[dict[str, object]] = []
    for family, mode, num_anchors in itertools.product(options.families, options.modes, options.num_anchors):
        overrides = [
            f"schedule.batch_size={options.batch_size}",
            f"schedule.num_anchors={num_anchors}",
            f"data.max_length={options.max_length}",
        ]
        run = load_settings(TrainRun, _EXAMPLES / f"train_smollm2_{family}.toml", overrides)
        target = random_target(contract, device, dtype)
        is_compiled = mode == "compiled"
        case = Case(run, target, data, compiled=is_compiled)
        sizes: dict[str, object] = {"batch": options.batch_size, "anchors": num_anchors}
        rows.append({"family": family, "mode": mode} | sizes | measure(case, options.steps, ceiling, contract))
        print(text_table(rows[-1:]), flush=True)
        if options.profile:
            show_profile(case)
    print(text_table(rows))
    facts = [f"{ceiling / 1e12:.4g} TFLOP/s in one large product"]
    report(NAME, rows, options, arguments, device=str(device), facts=facts)
    return EXIT_DONE


def show_profile(case: Case) -> None:
    """The operations of three steps, the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    is_gpu = case.device.type == "cuda"
    with record(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]) as found:
        for number in range(3):
            case.step(number)
    key = "self_cuda_time_total" if is_gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90), flush=True)


if __name__ == "__main__":
    sys.exit(run_main(main))
