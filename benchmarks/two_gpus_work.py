"""What one process of `two_gpus` does: answer prompts from the folders, time steps of weights made on the device."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import EXIT_DONE

if TYPE_CHECKING:
    from paceline.checkpoint.contract import TargetContract
    from paceline.distributed.world import World
    from paceline.models.loading import LoadedDrafter, LoadedTarget

_DRAFTS, _PROMPT_TOKENS, _WARM_UP_TOKENS = 7, 24, 20
_CONTEXT, _STEP_LENGTH = 224, 512  # positions of a timed step, and those that a request may have
_NUM_LAST_LINES = 8
_SUM_ROWS, _SUM_WIDTH, _NUM_SUMS, _NUM_CHAINS = (1, 16, 32, 512), 4096, 64, 9
Row = dict[str, Any]


def write_models(folder: Path, shape: str) -> None:
    """A target and a drafter of random float32 weights, and a tokenizer of a word per id, in `folder`."""
    import torch
    from benchmarks.random_kimi import published_tensors
    from benchmarks.step_shapes import kimi_shapes, make_drafter, make_target
    from tokenizers import Tokenizer, models

    from paceline.checkpoint.export import split_fused, write_drafter_folder
    from paceline.checkpoint.names import dense_target_destinations, drafter_destinations
    from paceline.checkpoint.weights import save_safetensors

    target = make_target(shape, torch.device("cpu"), dtype=torch.float32, linear_mode="plain")
    at = folder / "target"
    at.mkdir(parents=True)
    if target.contract.kimi is not None:
        config = {"architectures": ["KimiLinearForCausalLM"], **kimi_shapes()[shape]}
        tensors = published_tensors(target.model)
    else:
        config = dense_config(target.contract)
        weights = dict(target.model.named_parameters())
        tensors = split_fused(weights, dense_target_destinations(target.contract))
    (at / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_safetensors(at / "model.safetensors", tensors, {})
    words = {f"w{index}": index for index in range(target.contract.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(at / "tokenizer.json"))
    (at / "tokenizer_config.json").write_text('{"unk_token": "w0"}', encoding="utf-8")
    drafter = make_drafter(target)
    tensors = split_fused(drafter.model.checkpoint_parameters(), drafter_destinations(drafter.contract))
    write_drafter_folder(folder / "drafter", drafter.contract, tensors, None, {})


def dense_config(contract: TargetContract) -> dict[str, Any]:
    """The config.json of a dense shape."""
    return {
        "architectures": [contract.architecture],
        "model_type": "qwen3" if contract.has_qk_norm else "llama",
        "num_hidden_layers": contract.num_layers,
        "hidden_size": contract.hidden_size,
        "intermediate_size": contract.intermediate_size,
        "num_attention_heads": contract.num_heads,
        "num_key_value_heads": contract.num_kv_heads,
        "head_dim": contract.head_size,
        "vocab_size": contract.vocab_size,
        "rms_norm_eps": contract.rms_norm_eps,
        "rope_theta": contract.rope.theta,
        "max_position_embeddings": contract.max_position_embeddings,
        "tie_word_embeddings": contract.tie_word_embeddings,
        "eos_token_id": list(contract.stop_token_ids),
        "bos_token_id": contract.bos_token_id,
        "torch_dtype": "float32",
    }


def work(options: argparse.Namespace) -> int:
    """One process; the first of several writes what came out, row by row."""
    from benchmarks.two_gpus import SPREADS

    from paceline.distributed.world import join_world

    spreads = [one for one in options.spreads if SPREADS[one][0] * SPREADS[one][1] == options.worker]
    with join_world(options.device) as world:

        def tell(row: Row) -> None:
            if world.rank == 0:
                with (options.folder / f"{options.worker}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")

        for part in ("tokens", "steps"):
            if part not in options.parts:
                continue
            shapes, cases = (options.shapes, tokens_of) if part == "tokens" else (options.step_shapes, steps_of)
            for shape in shapes:
                for spread in spreads:
                    for drafter in options.drafters:
                        head = {"part": part, "shape": shape, "spread": spread, "drafter": drafter}
                        _guarded(world, head, tell, lambda head=head, cases=cases: cases(world, options, head, tell))
        if "sums" in options.parts and world.size > 1:
            for mode in ("nccl", "symmetric") if world.device.type == "cuda" else ("gloo",):
                head = {"part": "sums", "spread": f"tp {world.size}", "mode": mode}
                _guarded(world, head, tell, lambda head=head: sums_of(world, head, tell))
    return EXIT_DONE


def sums_of(world: World, head: Row, tell: Callable[[Row], None]) -> None:
    """What a sum over ranks costs inside a recorded step: a chain of them, each over the result of the one before."""
    import torch

    from paceline.distributed.mesh import Layout, Mesh
    from paceline.engine.recordings import CudaRecording, Recording, Repeated

    tensor = Mesh.of(world, Layout((), world.size), 1).tensor
    is_cuda, like = world.device.type == "cuda", torch.zeros(1, dtype=torch.bfloat16, device=world.device)
    for num_rows in _SUM_ROWS:
        partial_RD = like.new_zeros(num_rows, _SUM_WIDTH)
        total = (
            (lambda x: tensor.total(x, in_order=False)) if head["mode"] != "symmetric" else _symmetric_sum(tensor, like)
        )

        def chain(total: Any = total, partial_RD: Any = partial_RD) -> Any:
            x_RD = partial_RD
            for _ in range(_NUM_SUMS):
                x_RD = total(x_RD)
            return x_RD

        chain()
        recording: Recording = Repeated(chain)
        if is_cuda:
            recording = CudaRecording(chain, torch.cuda.graph_pool_handle(), world.device)
        spans_s = []
        for _ in range(_NUM_CHAINS):
            world.gathered(0)
            began_s = time.perf_counter()
            recording.replay()
            if is_cuda:
                torch.cuda.synchronize()
            spans_s.append(time.perf_counter() - began_s)
        microseconds = sorted(spans_s)[len(spans_s) // 2] / _NUM_SUMS * 1e6
        tell({**head, "shape": f"{num_rows} x {_SUM_WIDTH}", "us_each": microseconds})


def _symmetric_sum(tensor: Any, like: Any) -> Callable[[Any], Any]:
    """Each rank reads the others' memory: a launch of its own, to be held against the library's."""
    import torch
    import torch.distributed._symmetric_memory as symmetric

    name = tensor.group.group_name
    buffer = symmetric.empty(max(_SUM_ROWS) * _SUM_WIDTH, dtype=like.dtype, device=like.device)
    symmetric.rendezvous(buffer, name)

    def total(x: Any) -> Any:
        return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", name)

    return total


def _guarded(world: World, head: Row, tell: Callable[[Row], None], case: Callable[[], None]) -> None:
    """A case that fails on every rank alike costs its rows alone; one that fails on some, the launch."""
    began_s = time.monotonic()
    try:
        case()
    except Exception as error:
        lines = traceback.format_exc().splitlines()[-_NUM_LAST_LINES:]
        print(f"rank {world.rank}, {head}:\n  " + "\n  ".join(lines), file=sys.stderr, flush=True)
        tell({**head, "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]})
    finally:
        _release(world)
        print(f"rank {world.rank}, {head}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)


def _release(world: World) -> None:
    import gc

    import torch

    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def can_share(shape: str, tensor_size: int) -> bool:
    """Whether a shape's layers can be shared out."""
    from benchmarks.random_dense import DENSE_SHAPES

    from paceline.distributed.sharding import require_shares
    from paceline.errors import ConfigError

    if shape not in DENSE_SHAPES:
        return True  # those here have even numbers of everything
    try:
        require_shares(DENSE_SHAPES[shape], tensor_size)
    except ConfigError:
        return False
    return True


def tokens_of(world: World, options: argparse.Namespace, head: Row, tell: Callable[[Row], None]) -> None:
    """Greedy answers in float32, opened from the folder."""
    from benchmarks.random_dense import random_prompts
    from benchmarks.two_gpus import SPREADS

    from paceline.distributed.opening import DecodeSettings, open_target

    (tensor_size, num_stages), folder = SPREADS[head["spread"]], options.folder / head["shape"]
    if not can_share(head["shape"], tensor_size):
        return
    is_drafted = head["drafter"] != "none"
    settings = DecodeSettings(
        str(folder / "target"),
        str(folder / "drafter") if is_drafted else None,
        num_stages=num_stages,
        tensor_size=tensor_size,
        dtype="float32",
        linear_mode="plain",
        num_draft_tokens=_DRAFTS if is_drafted else None,
        num_places=options.num_prompts,
        max_model_len=_PROMPT_TOKENS + max(_WARM_UP_TOKENS, options.new_tokens) + 32,
        offline=True,
    )
    opened = open_target(world, settings)
    prompts = random_prompts(options.num_prompts, _PROMPT_TOKENS, opened.contract.vocab_size)
    timed = _timed_answers(world, opened.decoder, prompts, options.new_tokens)
    tell({**head, "num_prompts": len(prompts), **timed})
    opened.close()


def _timed_answers(world: World, decoder: Any, prompts: list[list[int]], num_tokens: int) -> Row:
    """A closed batch, after one whose steps have the same shapes."""
    from paceline.distributed.places import DecodeRequest

    def answer(num_tokens: int) -> Any:
        requests = [DecodeRequest(tuple(ids), max_tokens=num_tokens, ignore_eos=True) for ids in prompts]
        return decoder.generate(requests)

    answer(min(_WARM_UP_TOKENS, num_tokens))
    world.gathered(0)
    began_s = time.perf_counter()
    results = answer(num_tokens)
    world.gathered(0)
    seconds = time.perf_counter() - began_s
    num_passes = max(len(result.steps) for result in results)
    return {
        "num_passes": num_passes,
        "ms_per_pass": seconds / max(1, num_passes) * 1e3,
        "token_ids": [list(result.token_ids) for result in results],
    }


def steps_of(world: World, options: argparse.Namespace, head: Row, tell: Callable[[Row], None]) -> None:
    """Step times in bf16, of every mode and batch."""
    from benchmarks.random_dense import DENSE_SHAPES
    from benchmarks.two_gpus import SPREADS

    contract, (tensor_size, num_stages) = DENSE_SHAPES[head["shape"]], SPREADS[head["spread"]]
    if num_stages > 1 and head["drafter"] == "none":
        _pass_times(world, contract, options, head, tell)
    if num_stages > 1 or not can_share(head["shape"], tensor_size):
        return
    from benchmarks.step_driver import time_steps

    target, mesh = device_target(world, contract, tensor_size)
    drafter = None if head["drafter"] == "none" else whole_drafter(contract, target)
    for mode in options.modes:
        engine = _engine(world, contract, target, drafter, mesh, is_recorded=mode == "recorded", options=options)
        num_timed = options.timed if mode == "recorded" else max(3, options.timed // 4)
        num_warm_up = max(3, num_timed // 3)
        for batch in options.batches:
            time_steps(engine, batch=batch, context=_CONTEXT, num_warm_up=3, num_timed=1)  # compiles, and records
            before = engine.stats().num_replayed_steps
            times = time_steps(engine, batch=batch, context=_CONTEXT, num_warm_up=num_warm_up, num_timed=num_timed)
            played = engine.stats().num_replayed_steps - before
            found = {"step_ms": times.median_ms, "p10_ms": times.p10_ms, "p90_ms": times.p90_ms}
            tell({**head, "batch": batch, "mode": mode, **found, "replayed": played / (num_warm_up + num_timed)})
        engine.close()
        del engine
        _release(world)


def _engine(
    world: World,
    contract: TargetContract,
    target: LoadedTarget,
    drafter: LoadedDrafter | None,
    mesh: Any,
    *,
    is_recorded: bool,
    options: argparse.Namespace,
) -> Any:
    from paceline.distributed.decoding import DecodeSizes
    from paceline.distributed.tensor_decoding import TensorDecoder
    from paceline.engine.engine import Engine, EngineSettings

    graphs = is_recorded and world.device.type == "cuda"
    if mesh is None:
        settings = EngineSettings(
            max_num_seqs=max(options.batches),
            max_model_len=_STEP_LENGTH,
            cuda_graphs=graphs,
            verify_method="coupled",
            draft_vocab_size="full",
        )
        return Engine(target, drafter, settings)
    num_drafts = 0 if drafter is None else drafter.num_draft_tokens
    sizes = DecodeSizes(max(options.batches), _STEP_LENGTH, num_draft_tokens=num_drafts, cuda_graphs=graphs)
    return TensorDecoder(mesh, contract, target, sizes, drafter).engine


def device_target(world: World, contract: TargetContract, tensor_size: int) -> tuple[LoadedTarget, Any]:
    """A random target in bf16, or this rank's share of one and its place."""
    import torch
    from benchmarks.random_dense import numbering_tokenizer, random_target
    from benchmarks.random_weights import fill

    if tensor_size == 1:
        return random_target(contract, world.device, dtype=torch.bfloat16), None
    from paceline.distributed.mesh import Layout, Mesh
    from paceline.distributed.sharding import sharded_stage, share_of
    from paceline.models.building import materialise
    from paceline.models.layers import set_linear_mode
    from paceline.models.loading import LoadedTarget

    mesh = Mesh.of(world, Layout((), tensor_size), contract.num_layers)
    with torch.device("meta"):
        stage: Any = sharded_stage(contract, 0, contract.num_layers, mesh.tensor)
    materialise(stage, torch.bfloat16, world.device)
    stage.settle(world.device)
    fill(stage, seed=0)
    mode: Any = "fused" if world.device.type == "cuda" else "plain"
    set_linear_mode(stage.eval(), mode)
    tokenizer = numbering_tokenizer(contract.vocab_size)
    return LoadedTarget(stage, share_of(contract, tensor_size), tokenizer, mode), mesh


def whole_drafter(contract: TargetContract, target: LoadedTarget) -> LoadedDrafter:
    """A drafter of the whole target's sizes, beside a share of it."""
    from benchmarks.random_dense import dflash_contract
    from benchmarks.random_weights import fill

    from paceline.models.building import empty_drafter
    from paceline.models.loading import LoadedDrafter

    drafter, weight = dflash_contract(contract), target.model.norm.weight
    model = empty_drafter(drafter, weight.dtype, weight.device)
    fill(model, seed=1)
    model.prepare_for_serving(target.linear_mode)
    return LoadedDrafter(model, drafter, drafter.num_draft_tokens, target.model)


def _pass_times(
    world: World, contract: TargetContract, options: argparse.Namespace, head: Row, tell: Callable[[Row], None]
) -> None:
    """Two stages of bf16 weights, plainly: the time of a closed batch over its passes."""
    import torch
    from benchmarks.random_dense import random_prompts
    from benchmarks.random_weights import fill

    from paceline.distributed.decoding import Decoder, DecodeSizes
    from paceline.distributed.mesh import Layout, Mesh
    from paceline.distributed.sharding import sharded_stage
    from paceline.distributed.stage_pass import StagePass
    from paceline.models.building import materialise

    mesh = Mesh.of(world, Layout.even(contract.num_layers, 2), contract.num_layers)
    with torch.device("meta"):
        stage: Any = sharded_stage(contract, *mesh.layers, mesh.tensor)
    materialise(stage, torch.bfloat16, world.device)
    stage.settle(world.device)
    fill(stage, seed=mesh.stage)
    stage_pass = StagePass(mesh, contract, stage.eval())
    for batch in options.batches:
        decoder = Decoder(mesh, contract, stage_pass, DecodeSizes(batch, _STEP_LENGTH))
        prompts = random_prompts(batch, _PROMPT_TOKENS, contract.vocab_size)
        timed = _timed_answers(world, decoder, prompts, options.new_tokens)
        del timed["token_ids"]
        tell({**head, "batch": batch, "mode": "eager", **timed})
