"""What a training run would read, hold in memory and compute, counted before any weight is loaded.

Counts of operations are those of matrix products alone (two per multiply-add); the time divides them by a product that
is timed here and now, at the share of it that training reaches. It says minutes or days, not seconds.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from paceline.cli.mask_memory import dense_bytes, flex_bytes

if TYPE_CHECKING:
    from paceline.checkpoint.contract import DrafterContract, TargetContract
    from paceline.configuration.run import TrainRun
    from paceline.training.flex_attend import FlexBlocks

_SAVED_PER_LAYER = 20  # activations that a decoder layer keeps for its gradient, in widths per row
_EVALUATED_ROWS = 8192  # whose scores exist at the same time while drafts are drawn in an evaluation
_SHARE_OF_PEAK = 0.3  # of a bare matrix product's speed, in training as a whole
_MIB = 2**20


def num_drafter_parameters(contract: DrafterContract) -> int:
    """Trained parameters of a drafter."""
    from paceline.checkpoint.names import drafter_slots

    return sum(math.prod(slot.shape) for slot in drafter_slots(contract))


def num_target_parameters(contract: TargetContract) -> int:
    """Parameters of a target; of a dense one, norms and biases are left out."""
    from paceline.checkpoint.kimi_names import kimi_slots

    if contract.kimi is not None:
        return sum(math.prod(slot.shape) for slot in kimi_slots(contract))
    width = contract.hidden_size
    attention = 2 * width * contract.head_size * (contract.num_heads + contract.num_kv_heads)
    tables = (1 if contract.tie_word_embeddings else 2) * contract.vocab_size * width
    return contract.num_layers * (attention + 3 * width * contract.intermediate_size) + tables


def num_active_parameters(contract: TargetContract) -> int:
    """Those of them that one token meets: of a mixture, the experts that are not chosen are left out."""
    experts = contract.kimi.experts if contract.kimi is not None else None
    if experts is None:
        return num_target_parameters(contract)
    one = 3 * experts.intermediate_size * (experts.latent_size or contract.hidden_size)
    num_mixtures = sum(map(experts.has_experts, range(contract.num_layers)))
    return num_target_parameters(contract) - num_mixtures * (experts.num_experts - experts.num_experts_per_token) * one


def estimate_run(run: TrainRun, *, offline: bool) -> dict[str, object]:
    """Read the data and add up what the run would need.

    Args:
        run: its settings.
        offline: never touch the network to find the target's files.

    Returns:
        Statistics and estimates by name; sizes and times carry their unit in the name.

    Raises:
        PacelineError: the target or the data cannot be read, or the settings do not fit the target.
    """
    import numpy

    from paceline.checkpoint.locate import locate_target
    from paceline.checkpoint.target_config import read_target_contract
    from paceline.checkpoint.tokenizer import open_tokenizer
    from paceline.training.batches import StepBatches
    from paceline.training.chats import chat_encoder
    from paceline.training.continuing import open_start, read_history, require_apart
    from paceline.training.contract import drafter_contract
    from paceline.training.preparing import read_data

    path = locate_target(run.target.name, offline=offline)
    target = read_target_contract(path, run.target.name)
    drafter = drafter_contract(run, target)
    start = run.drafter.start_from
    if start is not None:
        require_apart(run.output, start)
        open_start(start, drafter, target)
        read_history(run, start)
    reads_chats = any(file.suffix == ".jsonl" for file in run.data.files)
    tokenizer = open_tokenizer(path) if reads_chats else None
    encoder = None if tokenizer is None else chat_encoder(tokenizer, run.data)
    data = read_data(run, target.vocab_size, encoder)
    train, batches = data.train, StepBatches(run, data.train)
    lengths = numpy.minimum(numpy.diff(train.starts), run.data.max_length)
    mean_row = float(lengths.sum()) / batches.num_rows
    rows = run.schedule.batch_size * run.schedule.accumulation
    operations = _operations_per_step(run, target, drafter, rows, mean_row)
    terms = memory_terms(run, target, drafter, mean_row)
    return {
        "num_conversations": len(train),
        "num_held_out": sum(map(len, data.held_out.values())),
        "num_supervised_tokens": int(train.taught(run.data.max_length).sum()),
        "mean_length_tokens": round(float(lengths.mean()), 1),
        "num_epochs": round(rows * run.schedule.num_steps / batches.num_rows, 2),
        "num_target_parameters": num_target_parameters(target),
        "num_trained_parameters": num_drafter_parameters(drafter),
        "attention": "dense" if planned_attention(run, drafter) is None else "flex",
        **{f"memory_{name}_mib": round(size / _MIB) for name, size in terms.items()},
        "memory_mib": round(_peak(terms) / _MIB),
        "teraflop_per_step": round(operations / 1e12, 3),
        "time_minutes": _minutes(run, operations),
    }


def _operations_per_step(
    run: TrainRun, target: TargetContract, drafter: DrafterContract, rows: int, mean_row: float
) -> float:
    tokens = rows * mean_row
    blocks = rows * min(run.schedule.num_anchors, mean_row)
    table = target.vocab_size * target.hidden_size
    body = num_active_parameters(target) - (1 if target.tie_word_embeddings else 2) * table
    joined = drafter.num_taps * drafter.target_hidden_size * drafter.hidden_size
    head = drafter.draft_vocab_size * drafter.hidden_size
    layers = num_drafter_parameters(drafter) - joined - (head if drafter.has_own_head else 0)
    if drafter.family == "eagle3":  # one pass over everything, then a row per block and further draft
        keys, passed = 0, tokens + blocks * (drafter.num_draft_tokens - 1)
    else:
        keys = 2 * drafter.hidden_size * drafter.num_kv_heads * drafter.head_size * drafter.num_layers
        passed = blocks * drafter.block_size
    # Head: our logits, their recomputation and the gradient that goes through; a gradient of its own if it is trained;
    # the target's logits where they are compared.
    compares = bool({"kl", "l1"} & run.objective.loss_weights.keys()) or drafter.confidence is not None
    head_passes = 3 + drafter.has_own_head + compares
    scored = blocks * drafter.num_draft_tokens
    return 2 * body * tokens + 6 * (joined + keys) * tokens + 6 * layers * passed + 2 * head * head_passes * scored


def memory_terms(run: TrainRun, target: TargetContract, drafter: DrafterContract, mean_row: float) -> dict[str, float]:
    """Bytes by what holds them; the last ones, `step_...` and `evaluation_...`, never exist at the same time, nor do an
    evaluation's masks and scores.

    What the allocator leaves unused between blocks and what CUDA itself takes, half a gigabyte or so, are not in it.

    Args:
        run: its settings; the device is taken by its name, so that a run can be planned on another machine.
        target: its sizes.
        drafter: its sizes.
        mean_row: tokens of a row, a conversation or several packed ones.
    """
    import torch

    from paceline.models.loading import resolve_dtype

    is_gpu = _is_gpu(run.device)
    weight = resolve_dtype(run.target.dtype, torch.device("cuda" if is_gpu else "cpu")).itemsize
    is_mixed = is_gpu or weight < 4
    activation = 2 if is_mixed else 4
    trained, width, layers = num_drafter_parameters(drafter), drafter.hidden_size, drafter.num_layers
    rows, length = run.schedule.batch_size, run.data.max_length
    anchors = min(run.schedule.num_anchors, mean_row)
    slots = rows * anchors * drafter.block_size + (rows * length if drafter.family == "eagle3" else 0)
    flex = planned_attention(run, drafter)
    if flex is None:
        masks = dense_bytes(drafter, rows, length, anchors, activation, is_trained=True)
    else:
        masks = flex_bytes(drafter, flex, rows)
    num_measured = run.evaluate.batch_size if run.evaluate.num_conversations else 0
    evaluated = num_measured * length * drafter.num_draft_tokens
    kept_per_token = (drafter.num_taps + 1) * target.hidden_size
    read_per_token = width + 2 * layers * drafter.num_kv_heads * drafter.head_size
    return {
        "target_weights": num_target_parameters(target) * weight,
        "drafter_values": trained * 4,
        "drafter_gradients": trained * 4,
        "drafter_moments": trained * 8,
        "drafter_cast": trained * 2 if is_mixed else 0,  # the bf16 copies that autocast makes
        "step_features": rows * length * kept_per_token * activation,
        "step_target_layer": rows * length * (4 * target.hidden_size + 3 * target.intermediate_size) * activation,
        "step_context": rows * length * read_per_token * activation,
        "step_drafter_layers": slots * width * _SAVED_PER_LAYER * layers * activation,
        "step_masks": masks,
        "step_scores": 3 * run.objective.chunk_rows * target.vocab_size * 4,
        "evaluation_features": run.evaluate.batch_size * length * kept_per_token * activation,
        # By dense masks whatever training takes, and from every token.
        "evaluation_masks": dense_bytes(drafter, num_measured, length, length, activation, is_trained=False),
        "evaluation_scores": min(_EVALUATED_ROWS, evaluated) * target.vocab_size * activation,
    }


def planned_attention(run: TrainRun, drafter: DrafterContract) -> FlexBlocks | None:
    """What the run would attend by; a GPU that is not here is taken to have Triton beside it.

    Raises:
        ConfigError: flex attention was asked for and cannot be had.
    """
    import torch

    from paceline.training.attention_choice import judge_attention

    is_gpu = _is_gpu(run.device)
    is_elsewhere = is_gpu and not torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    return judge_attention(run, drafter, device, has_triton=True if is_elsewhere else None)[0]


def _peak(terms: dict[str, float]) -> float:
    step = sum(size for name, size in terms.items() if name.startswith("step_"))
    always = sum(size for name, size in terms.items() if not name.startswith(("step_", "evaluation_")))
    # An evaluation's masks are gone before its scores are computed.
    evaluation = terms["evaluation_features"] + max(terms["evaluation_masks"], terms["evaluation_scores"])
    return always + max(step, evaluation)


def _is_gpu(device: str) -> bool:
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _minutes(run: TrainRun, operations: float) -> float | None:
    """Of the whole run on this machine; None where it does not have the run's device."""
    import torch

    is_gpu = _is_gpu(run.device)
    if is_gpu and not torch.cuda.is_available():
        return None
    speed = _product_speed(run.device, is_gpu) * _SHARE_OF_PEAK
    return round(operations * run.schedule.num_steps / speed / 60, 1)


def _product_speed(device: str, is_gpu: bool) -> float:
    """Operations per second of a matrix product in the precision that training uses on this device."""
    import torch

    from paceline.models.loading import resolve_device

    place = resolve_device(device)
    size = 4096 if is_gpu else 768
    left = torch.ones((size, size), dtype=torch.bfloat16 if is_gpu else torch.float32, device=place)
    (left @ left).sum().item()  # the first call pays for set-up; reading the sum waits for the device
    began = time.perf_counter()
    products = [left @ left for _ in range(5)]
    products[-1].sum().item()
    return 5 * 2 * size**3 / (time.perf_counter() - began)
