"""Step times of vLLM with random weights, plain and with a DFlash drafter, measured as `benchmarks/gpu_steps.py` does.

    python -m benchmarks.vllm.stepping --out OUT
    python -m benchmarks.vllm.stepping --out OUT --shapes smollm2-135m --kinds plain --batches 1 8

A process for each shape and kind: all start at once, as a start takes minutes, and measure one after another
(`turns.py`). A closed batch of requests with prompts of 128 random tokens gets 192 tokens each, greedily, past any
stop, prefix cache off; `ms` is the wall time of the best of three rounds over 192. All drafts of a random drafter are
refused, so a DFlash line is the cost of a step that verifies 16 rows of every request and drafts again.

vLLM fills its models with dummy weights, with which nearly all rows of a drafting step are equal (`random_weights.py`
says why). They are overwritten as ours are filled; `--weights normal dummy` measures with both, one after the other, in
one process and with one start.

Writes OUT/vllm-steps.jsonl, a line per batch size, as soon as it is known, and a log per process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.random_weights import WEIGHTS
from benchmarks.vllm.turns import say_failed, say_ready, still_starting, turn, wait_for_all
from benchmarks.vllm.weights import fill_models

RESULT = "vllm-steps.jsonl"
KINDS = ("plain", "dflash")
_NUM_DRAFTS, _NUM_DRAFT_LAYERS = 15, 5
_WARM_UP_TOKENS = 16
_MAX_MODEL_LEN, _MAX_NUM_SEQS = 2048, 256
_SLACK = 1.6  # of the cache, over what the requests of the largest batch hold
_PAUSE_S = 0.5
_EXIT_ASKED_TO = 143  # as a shell says it of whom SIGTERM ended

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def main(arguments: Sequence[str]) -> int:
    """Start a process per configuration, or be one of them."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.only is not None:
        return measure_one(options)
    return measure_all(options)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for results, logs and the turns")
    parser.add_argument("--shapes", choices=tuple(CONFIGS), nargs="+", default=list(CONFIGS))
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--weights", choices=WEIGHTS, nargs="+", default=["normal"], help="default normal")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start-timeout", type=float, default=420.0, metavar="SECONDS")
    parser.add_argument("--seconds", type=float, default=1800.0, help="for everything; default 1800")
    parser.add_argument("--only", metavar="NAME", help=argparse.SUPPRESS)  # what a started process is told
    return parser.parse_args(arguments)


def names_of(options: argparse.Namespace) -> list[str]:
    """Configurations, by name."""
    return [f"{shape}.{kind}" for shape in options.shapes for kind in options.kinds]


def measure_all(options: argparse.Namespace) -> int:
    """Start all, see that nobody waits for one that died, and print what they found."""
    names = names_of(options)
    for old in (*options.out.glob("*.ready"), *options.out.glob("*.failed"), options.out / RESULT):
        old.unlink(missing_ok=True)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    signal.signal(signal.SIGTERM, lambda *_arguments: sys.exit(_EXIT_ASKED_TO))  # on the way out all are ended
    try:
        for name in names:
            processes[name] = _start(name, options)
        _wait(processes, options)
    finally:
        for process in processes.values():
            _end(process)
    failed = [name for name, process in processes.items() if process.returncode != 0]
    for name in failed:
        lines = (options.out / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"vllm {name} FAILED:", *lines[-8:], sep="\n  ", flush=True)
    path = options.out / RESULT
    print(path.read_text(encoding="utf-8") if path.exists() else "vllm measured nothing", flush=True)
    return 1 if failed else 0


def _start(name: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.vllm.stepping", *sys.argv[1:], "--only", name]
    # Two that compile the same model at once must not write the same files; a later run finds them again.
    cache = Path(tempfile.gettempdir()) / "paceline-vllm-cache" / name
    cache.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function of ours is sent to its worker
        "VLLM_CACHE_ROOT": str(cache),
        "XDG_CACHE_HOME": str(cache),
    }
    if not os.access(Path.home(), os.W_OK):
        environment["HOME"] = str(cache)
    with (options.out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def _wait(processes: Mapping[str, subprocess.Popen[bytes]], options: argparse.Namespace) -> None:
    """Until all have ended or time is up; whoever dies or takes too long to start is said to have failed."""
    began_s = time.monotonic()
    while True:
        is_over = all(process.poll() is not None for process in processes.values())
        for name, process in processes.items():
            if process.poll() not in (None, 0):
                say_failed(options.out, name)
        if is_over or time.monotonic() - began_s > options.seconds:
            return
        if time.monotonic() - began_s > options.start_timeout:
            for name in still_starting(options.out, list(processes)):
                _end(processes[name])
        time.sleep(_PAUSE_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, if it is still there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure_one(options: argparse.Namespace) -> int:
    """One configuration: start, wait for the others, measure in turn."""
    import vllm

    shape, kind = options.only.split(".")
    began_s = time.monotonic()
    llm = vllm.LLM(**engine_arguments(shape, kind, options))
    for batch in options.batches:  # whatever is compiled or captured at first use
        generate(llm, make_prompts(shape, batch, options.prompt_tokens), _WARM_UP_TOKENS)
    print(f"{options.only} started in {time.monotonic() - began_s:.0f} s", flush=True)
    say_ready(options.out, options.only)
    wait_for_all(options.out, names_of(options), timeout_s=options.start_timeout)
    with turn(options.out):
        for weights in options.weights:
            print("filled:", *llm.collective_rpc(fill_models, args=(weights,)), flush=True)
            for line in measure(llm, shape, kind, options):
                with (options.out / RESULT).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"peer": f"vllm {vllm.__version__}", "weights": weights, **line}) + "\n")
    return 0


def engine_arguments(shape: str, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """What vLLM is started with; config files are written, weights are not."""
    config = CONFIGS[shape]
    arguments: dict[str, Any] = {
        "model": _write(options.out / f"{shape}-target", config),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_seqs": _MAX_NUM_SEQS,
        "enable_prefix_caching": False,
        "attention_backend": "FLASH_ATTN",
        # Others start at the same time, so what is free says nothing: the cache is as large as it has to be.
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": cache_bytes(config, options, is_drafted=kind == "dflash"),
    }
    if kind == "dflash":
        drafter = _write(options.out / f"{shape}-drafter", drafter_config(config))
        arguments["speculative_config"] = {
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": _NUM_DRAFTS,
        }
    return arguments


def drafter_config(config: dict[str, Any]) -> dict[str, Any]:
    """A DFlash drafter of five layers of the target's own width, tapping five of its layers."""
    depth = config["num_hidden_layers"]
    return _COMMON | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": _NUM_DRAFT_LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "block_size": _NUM_DRAFTS + 1,
        "num_target_layers": depth,
        "dflash_config": {
            "mask_token_id": 5,
            "target_layer_ids": [1, depth // 4, depth // 2, 3 * depth // 4, depth - 3],
        },
        **{name: config[name] for name in _SIZES},
    }


def cache_bytes(config: dict[str, Any], options: argparse.Namespace, *, is_drafted: bool) -> int:
    """Keys and values of the largest batch, or of one full context, with some slack."""
    num_layers = config["num_hidden_layers"] + (_NUM_DRAFT_LAYERS if is_drafted else 0)
    each = options.prompt_tokens + options.new_tokens + 2 * (_NUM_DRAFTS + 1)
    num_positions = max(_MAX_MODEL_LEN, max(options.batches) * each)
    return int(_SLACK * num_positions * num_layers * 2 * config["num_key_value_heads"] * config["head_dim"] * 2)


def _write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def make_prompts(shape: str, count: int, num_tokens: int) -> list[dict[str, list[int]]]:
    """Random ids."""
    chosen = random.Random(0)
    vocab_size = CONFIGS[shape]["vocab_size"]
    return [{"prompt_token_ids": [chosen.randrange(10, vocab_size) for _ in range(num_tokens)]} for _ in range(count)]


def generate(llm: Any, prompts: Sequence[Any], num_tokens: int) -> tuple[float, int]:
    """Answer a closed batch; returns seconds and how many tokens came."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began_s, sum(len(one.outputs[0].token_ids) for one in outputs)


def measure(llm: Any, shape: str, kind: str, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """A line per batch size, then the counters of drafting."""
    for batch in options.batches:
        prompts = make_prompts(shape, batch, options.prompt_tokens)
        generate(llm, prompts, _WARM_UP_TOKENS)
        rounds = [generate(llm, prompts, options.new_tokens) for _ in range(options.rounds)]
        best_s, num_tokens = min(rounds)
        yield {
            "shape": shape,
            "kind": kind,
            "batch": batch,
            "ms": 1e3 * best_s / options.new_tokens,
            "rounds_ms": [round(1e3 * seconds / options.new_tokens, 4) for seconds, _ in rounds],
            "tokens_per_second": num_tokens / best_s,
        }
    if kind == "dflash":
        yield {"shape": shape, "kind": kind, "counters": _counters(llm)}


def _counters(llm: Any) -> dict[str, object]:
    """What vLLM counted of drafts, where it says so: a random drafter should have next to nothing accepted."""
    try:
        found = {one.name: getattr(one, "value", None) for one in llm.get_metrics() if "spec_decode" in one.name}
    except Exception as error:  # counters are a courtesy: the times stand without them
        return {"error": str(error)}
    return {name: value for name, value in found.items() if value is not None}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
