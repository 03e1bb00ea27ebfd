"""A Kimi target over two GPUs, by tensor and by pipeline parallelism, against one: the same tokens, and their time.

    python -m benchmarks.two_gpus --out docs/results
    python -m benchmarks.two_gpus --device cpu --shape tiny-k3 --new-tokens 6        over gloo, as a trial

A random target and a random DFlash drafter are written to a folder in float32. One process, and then two under
torchrun, open it as `paceline generate --tp 2` and `--pp 2` do, and answer prompts greedily, with the drafter and
without: after a few tokens for warming up, in measured time. `num_equal` counts prompts whose tokens are those of one
GPU; `ms_per_pass` is the time of the whole batch over its passes, prompts included. The decoder of several ranks is
eager and asks the host; nothing here is a recorded step. Each launch has its own time limit, and one that fails is told
while the others go on; exit code 3 if a token differs or a launch failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import positive, run, say
from benchmarks.growing_result import GrowingResult
from benchmarks.results import ROOT, describe_machine, make_result, text_table

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE

NAME = "gpu-two"
SPREADS = {"one": (1, 1), "tp 2": (2, 1), "pp 2": (1, 2)}  # ranks that share a layer, and stages
NOTES = {
    "one": None,
    "tp 2": "collectives outside of recorded steps; dense targets are not shared",
    "pp 2": "collectives outside of recorded steps; taps are handed on from stage to stage",
}
_DRAFTS, _PROMPT_TOKENS, _WARM_UP_TOKENS = 7, 24, 4


def main(arguments: Sequence[str]) -> int:
    """Launch every spread, compare, print the table."""
    options = parse(arguments)
    if options.worker is not None:
        return work(options)
    rows: list[dict[str, Any]] = []
    result = _result(options, arguments)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        began_s = time.monotonic()
        write_models(folder, options.shape)
        say(f"models written in {time.monotonic() - began_s:.1f} s")
        alone: dict[str, list[list[int]]] = {}
        for spread in options.spreads:
            found = launch(spread, folder, options)
            failed |= found is None
            for drafter, told in (found or {}).items():
                tokens = told.pop("token_ids")
                alone.setdefault(drafter, tokens) if spread == "one" else None
                known = alone.get(drafter)
                equal = None if known is None else sum(a == b for a, b in zip(tokens, known, strict=True))
                failed |= equal is not None and equal < len(tokens)
                rows.append({"spread": spread, "drafter": drafter, "num_equal": equal, **told, "note": NOTES[spread]})
                result.put(rows[-1])
                print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    result.finish()
    print(text_table(rows), flush=True)
    return EXIT_CHECK_SAYS_NO if failed or not rows else EXIT_DONE


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--shape", default="k3-mini", help="of the target, a Kimi one; default k3-mini")
    parser.add_argument("--spreads", nargs="+", choices=tuple(SPREADS), default=list(SPREADS), help="default all")
    parser.add_argument("--num-prompts", type=positive, default=6, help="default 6")
    parser.add_argument("--new-tokens", type=positive, default=48, help="of each; default 48")
    parser.add_argument("--case-seconds", type=float, default=45.0, help="for one launch; default 45")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"also write FOLDER/{NAME}.json as rows come")
    parser.add_argument("--worker", choices=tuple(SPREADS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def write_models(folder: Path, shape: str) -> None:
    """A target and a drafter of random float32 weights, and a tokenizer of a word per id, in `folder`."""
    import torch
    from benchmarks.random_kimi import published_tensors
    from benchmarks.step_shapes import kimi_shapes, make_drafter, make_target
    from tokenizers import Tokenizer, models

    from paceline.checkpoint.export import split_fused, write_drafter_folder
    from paceline.checkpoint.names import drafter_destinations
    from paceline.checkpoint.weights import save_safetensors

    device = torch.device("cpu")
    target = make_target(shape, device, dtype=torch.float32, linear_mode="plain")
    drafter = make_drafter(target)
    at = folder / "target"
    at.mkdir()
    config = {"architectures": ["KimiLinearForCausalLM"], **kimi_shapes()[shape]}
    (at / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_safetensors(at / "model.safetensors", published_tensors(target.model), {})
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(at / "tokenizer.json"))
    (at / "tokenizer_config.json").write_text('{"unk_token": "w0"}', encoding="utf-8")
    tensors = split_fused(drafter.model.checkpoint_parameters(), drafter_destinations(drafter.contract))
    write_drafter_folder(folder / "drafter", drafter.contract, tensors, None, {})


def launch(spread: str, folder: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]] | None:
    """What the processes of a spread found, by drafter; None if they failed."""
    ranks = SPREADS[spread][0] * SPREADS[spread][1]
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "benchmarks.two_gpus", "--worker", spread, "--folder", str(folder), "--device", options.device]
    command += ["--num-prompts", str(options.num_prompts), "--new-tokens", str(options.new_tokens)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    found = folder / f"{spread}.json"
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=options.case_seconds, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        say(f"{spread}: not done after {options.case_seconds:g} s")
        return None
    if done.returncode or not found.exists():
        say(f"{spread}: exit code {done.returncode}\n" + "\n".join(done.stderr.strip().splitlines()[-12:]))
        return None
    told: dict[str, dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))
    return told


def work(options: argparse.Namespace) -> int:
    """One process of a spread; the first one writes what came out."""
    from benchmarks.random_dense import random_prompts

    from paceline.distributed.opening import DecodeSettings, open_target
    from paceline.distributed.places import DecodeRequest
    from paceline.distributed.world import join_world

    tensor_size, num_stages = SPREADS[options.worker]
    found: dict[str, dict[str, Any]] = {}
    with join_world(options.device) as world:
        for drafter in ("none", "dflash"):
            settings = DecodeSettings(
                str(options.folder / "target"),
                None if drafter == "none" else str(options.folder / "drafter"),
                num_stages=num_stages,
                tensor_size=tensor_size,
                dtype="float32",
                linear_mode="plain",
                num_draft_tokens=None if drafter == "none" else _DRAFTS,
                num_places=options.num_prompts,
                max_model_len=_PROMPT_TOKENS + options.new_tokens + 32,
                offline=True,
            )
            opened = open_target(world, settings)
            prompts = random_prompts(options.num_prompts, _PROMPT_TOKENS, opened.contract.vocab_size)

            def answer(num_tokens: int, prompts: list[list[int]] = prompts, opened: Any = opened) -> Any:
                requests = [DecodeRequest(tuple(ids), max_tokens=num_tokens, ignore_eos=True) for ids in prompts]
                return opened.decoder.generate(requests)

            answer(min(_WARM_UP_TOKENS, options.new_tokens))
            world.gathered(0)
            began_s = time.perf_counter()
            results = answer(options.new_tokens)
            world.gathered(0)
            seconds = time.perf_counter() - began_s
            num_passes = max(len(result.steps) for result in results) if results else 0
            found[drafter] = {
                "num_prompts": len(results),
                "num_passes": num_passes,
                "ms_per_pass": seconds / max(1, num_passes) * 1e3,
                "tokens_per_second": sum(len(result.token_ids) for result in results) / seconds,
                "token_ids": [list(result.token_ids) for result in results],
            }
        if world.rank == 0:
            (options.folder / f"{options.worker}.json").write_text(json.dumps(found), encoding="utf-8")
    return EXIT_DONE


def _result(options: argparse.Namespace, arguments: Sequence[str]) -> GrowingResult:
    head = make_result(NAME, [], machine=describe_machine(options.shape, device=options.device), arguments=arguments)
    settings = {"shape": options.shape, "num_prompts": options.num_prompts, "new_tokens": options.new_tokens}
    places = {spread: place for place, spread in enumerate(SPREADS)}
    return GrowingResult(
        head, settings, options.out, key=("spread", "drafter"), order=lambda row: places[str(row["spread"])]
    )


if __name__ == "__main__":
    sys.exit(run(main))
