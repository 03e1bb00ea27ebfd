"""What a drafter loses on the wrong stream of a target with attention residuals: fed its own, then the other.

    python -m benchmarks.stream_swap --out docs/results

A target, by default of the shape of `k3-tiny` (8 layers of width 128 in blocks of 4), answers prompts greedily. It was
taught texts that nobody can draft without taps (`walking_target.py`); with `--text successors` it is random, and most
of its tokens follow from the last one, so that taps hardly matter. Two drafters learn from its answers, for as many
steps, from the same seed: one reads the mixtures that the layers consume (`attn_res`), one the running sum (`prefix`),
which no layer reads. Each then serves the same further prompts greedily, fed the stream that it was trained on, and fed
the other. `own` and `other` are acceptance lengths; `difference` is the mean over prompts of own less other with its
95 % bootstrap interval; `longer` and `shorter` count prompts, and `sign_p` is of the two-sided sign test.

Drafts decide how fast a text comes, never what it says: arithmetic is row-invariant, and the exit code is 3 if a text
differs from plain decoding's. `num_identical` of `num_texts` counts both streams. The file has tokens and steps of
every prompt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command_line import positive, run, say
from benchmarks.random_kimi import kimi_config, random_kimi
from benchmarks.results import describe_machine, make_result, text_table, write_result
from benchmarks.serving import serve
from benchmarks.walking_target import VOCAB_SIZE as WALKS_VOCAB_SIZE
from benchmarks.walking_target import teach, walks

from paceline.errors import EXIT_CHECK_SAYS_NO, EXIT_DONE
from paceline.evaluation.statistics import compare_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.checkpoint.contract import AuxHiddenStream
    from paceline.configuration.run import TrainRun
    from paceline.engine.request import RequestResult
    from paceline.models.layers import LinearMode
    from paceline.models.loading import LoadedDrafter, LoadedTarget

NAME = "stream-swap"
STREAMS: tuple[AuxHiddenStream, ...] = ("attn_res", "prefix")
LATENT = "dspark-latent"
FAMILIES = ("dflash", "dflash2", "dspark", LATENT, "eagle3")
WALKS, SUCCESSORS = "walks", "successors"
_NUM_PROMPT_TOKENS = 8
_VOCAB_SIZE = 512
_SUCCESSION = 1.5  # how strongly the head prefers the successor of the last token
_MASK_ID, _FIRST_ID = 3, 4  # prompts hold no id below the second

Answers = list[tuple[int, ...]]
_TAUGHT: dict[tuple[int, ...], dict[str, Tensor]] = {}
Counts = dict[str, dict[str, list[list[int]]]]  # trained on, fed: tokens and steps of each prompt


def main(arguments: Sequence[str]) -> int:
    """Train and serve every family, print the table, say no if a text differs."""
    options = parse(arguments)
    import torch

    torch.set_num_threads(options.threads)
    target, faster = make_target(options, "row_invariant"), make_target(options, "plain")
    prompts = make_prompts(options)
    answers = [result.token_ids for result in answer(target, None, prompts, options, "texts")]
    rows, counts = [], {}
    with tempfile.TemporaryDirectory() as folder:
        data = write_texts(Path(folder) / "texts.npz", prompts, answers)
        for family in options.family:
            drafters = {stream: train_on(stream, family, faster, data, options) for stream in STREAMS}
            found, num_identical = swap(target, drafters, prompts, answers, options)
            counts[family] = found
            rows += make_rows(family, found, num_identical)
    print(text_table(rows))
    if options.out is not None:
        facts = [f"{options.threads} threads", "float32, row-invariant", f"{options.max_tokens} tokens"]
        head = make_result(NAME, rows, machine=describe_machine(*facts), arguments=arguments)
        say(f"wrote {write_result(options.out, {**head, 'counts': counts})}")
    return exit_code(rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, nargs="+", default=["dflash2"], help="default dflash2")
    parser.add_argument("--text", choices=(WALKS, SUCCESSORS), default=WALKS, help="of the target; default walks")
    parser.add_argument("--num-lessons", type=positive, default=200, help="steps that teach it walks; default 200")
    parser.add_argument("--num-layers", type=positive, default=8, help="of the target; default 8")
    parser.add_argument("--block-size", type=positive, default=4, help="layers per block of the target; default 4")
    parser.add_argument("--hidden-size", type=positive, default=128, help="a multiple of 32; default 128")
    parser.add_argument("--num-texts", type=positive, default=256, help="to learn from; default 256")
    parser.add_argument("--num-prompts", type=positive, default=32, help="held out, to serve; default 32")
    parser.add_argument("--max-tokens", type=positive, default=64, help="of each answer; default 64")
    parser.add_argument("--num-steps", type=positive, default=300, help="of training; default 300")
    parser.add_argument("--num-draft-tokens", type=positive, default=4, help="default 4")
    parser.add_argument("--seed", type=int, default=0, help="of target, prompts and drafters; default 0")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads; default 1: all products are small")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.json, such as docs/results")
    return parser.parse_args(arguments)


def make_target(options: argparse.Namespace, mode: LinearMode) -> LoadedTarget:
    """The target, random or taught; one that is taught is so once per process and options.

    Args:
        options: shape, seed and text.
        mode: "row_invariant" gives a row the same bits in any company; "plain" is faster.
    """
    import torch
    from tokenizers import Tokenizer, models

    from paceline.checkpoint.tokenizer import TextTokenizer
    from paceline.models.layers import set_linear_mode
    from paceline.models.loading import LoadedTarget

    width, vocab_size = options.hidden_size, vocab_size_of(options)
    changes = {"vocab_size": vocab_size, "q_lora_rank": 3 * width // 8}
    config = kimi_config(options.num_layers, options.block_size, width, **changes)
    model = random_kimi(config, torch.float32, torch.device("cpu"), seed=options.seed)
    if options.text == WALKS:
        shape = (options.num_layers, options.block_size, width, options.seed, options.num_lessons)
        if shape not in _TAUGHT:
            teach(model, options.num_lessons, seed=options.seed)
            _TAUGHT[shape] = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(_TAUGHT[shape])
    with torch.no_grad():
        if options.text == SUCCESSORS:
            successors_V = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(options.seed))
            model.lm_head.weight.add_(_SUCCESSION * width**-0.5 * model.embed_tokens.weight[successors_V])
        model.lm_head.weight[_MASK_ID] = 0.0  # no text holds it
    set_linear_mode(model, mode)
    words = models.WordLevel({f"w{index}": index for index in range(vocab_size)}, unk_token="w0")
    tokenizer = TextTokenizer(Tokenizer(words), chat_template=None, special_tokens={}, origin="random")
    return LoadedTarget(model, model.contract, tokenizer, mode)


def vocab_size_of(options: argparse.Namespace) -> int:
    """Of the target."""
    return WALKS_VOCAB_SIZE if options.text == WALKS else _VOCAB_SIZE


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Beginnings of texts; the last ones are held out."""
    import torch

    count, generator = options.num_texts + options.num_prompts, torch.Generator().manual_seed(options.seed + 1)
    if options.text == WALKS:
        return walks(count, _NUM_PROMPT_TOKENS, generator).tolist()
    return torch.randint(_FIRST_ID, _VOCAB_SIZE, (count, _NUM_PROMPT_TOKENS), generator=generator).tolist()


def write_texts(path: Path, prompts: Sequence[Sequence[int]], answers: Answers) -> Path:
    """A token file, as training reads it."""
    import numpy as np

    from paceline.capture.token_file import Conversation, write_token_file

    pairs = zip(prompts, answers, strict=True)
    write_token_file(path, [Conversation(np.asarray(prompt), np.asarray(ids)) for prompt, ids in pairs])
    return path


def answer(
    target: LoadedTarget,
    drafter: LoadedDrafter | None,
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
    label: str,
) -> list[RequestResult]:
    """Greedy answers; a random target has no stop ids, so all are equally long."""
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import SamplingParameters

    length = _NUM_PROMPT_TOKENS + options.max_tokens
    engine = Engine(target, drafter, EngineSettings(max_num_seqs=32, max_model_len=length))
    return serve(engine, prompts, [SamplingParameters(max_tokens=options.max_tokens)] * len(prompts), label)


def train_on(
    stream: AuxHiddenStream, family: str, target: LoadedTarget, data: Path, options: argparse.Namespace
) -> Path:
    """A drafter that learned from one stream; nothing else differs between two of a family."""
    from paceline.configuration.run import TrainRun
    from paceline.models.targets.kimi import KimiTarget
    from paceline.training.loop import train

    assert isinstance(target.model, KimiTarget)
    default_capture_ids = target.model.default_capture_ids()
    length = _NUM_PROMPT_TOKENS + options.max_tokens
    features = data.parent / f"{family}-{stream}-features"
    settings: dict[str, Any] = {
        "seed": options.seed,
        "output": data.parent / f"{family}-{stream}",
        "device": "cpu",
        "target": {"name": "random", "dtype": "float32"},
        "drafter": {
            "family": "dspark" if family == LATENT else family,
            "num_layers": 2,
            "intermediate_size": 2 * options.hidden_size,
            "target_layer_ids": sorted({capture - 1 for capture in default_capture_ids}),
            "aux_hidden_stream": stream,
            "block_size": options.num_draft_tokens + 1,
            "mask_token_id": None if family == "eagle3" else _MASK_ID,
        },
        "data": {"files": [data], "hold_out": options.num_prompts, "max_length": length, "features": features},
        "optimizer": {"learning_rate": 2e-3},
        "schedule": {"num_steps": options.num_steps, "batch_size": 16, "num_anchors": 16},
        "objective": {"loss": "ce"},  # the text is greedy, and what comes close to its tokens is no use
        "evaluate": {"num_conversations": 0},
        "checkpoint": {"every": options.num_steps, "keep": 1},
    }
    if family == LATENT:
        settings["drafter"] |= _latent_sizes(options.hidden_size)
    say(f"{family}: {options.num_steps} steps on {stream}")
    asked = TrainRun.model_validate(settings)
    capture(asked, target, features)
    outcome = train(asked, target)
    assert outcome.drafter is not None, "a run that is not interrupted ends in a drafter"
    return outcome.drafter


def _latent_sizes(width: int) -> dict[str, Any]:
    """Latent attention, which is drafted with from the anchor's own row on; of four heads, as the target's."""
    sizes = {"q_lora_rank": width // 2, "kv_lora_rank": width // 2, "v_head_size": width // 4}
    keys = {"qk_nope_head_size": width // 4, "qk_rope_head_size": width // 8}
    return {"layout": "anchor_sampling", **sizes, **keys}


def capture(asked: TrainRun, target: LoadedTarget, folder: Path) -> None:
    """Store what a training run asks the target for: it reads every text many times."""
    from paceline.capture.feature_plan import CaptureSettings
    from paceline.capture.feature_record import feature_record
    from paceline.capture.features import FeatureCapture, finish_capture
    from paceline.training.contract import drafter_contract
    from paceline.training.data import read_conversations
    from paceline.training.feature_source import needs_last_hidden, texts_of

    (data,), length, stream = asked.data.files, asked.data.max_length, asked.drafter.aux_hidden_stream
    texts = texts_of(read_conversations(data, vocab_size=target.contract.vocab_size), length)
    layers, keeps_hidden = drafter_contract(asked, target.contract).target_layer_ids, needs_last_hidden(asked)
    plan = CaptureSettings(layer_ids=layers, keeps_hidden=keeps_hidden, stream=stream)
    record = feature_record(
        target, [texts], layer_ids=layers, stream=stream, keeps_hidden=keeps_hidden, max_length=length
    )
    made = FeatureCapture(target, texts, plan, record)
    shards = made.open(folder)
    made.run(shards)
    finish_capture(shards)


def swap(
    target: LoadedTarget,
    drafters: Mapping[AuxHiddenStream, Path],
    prompts: Sequence[Sequence[int]],
    answers: Answers,
    options: argparse.Namespace,
) -> tuple[Counts, dict[str, int]]:
    """Serve the held-out prompts with every drafter on every stream.

    Returns:
        Tokens and steps of each prompt; and how many texts of each drafter, on both streams together, were plain
        decoding's.
    """
    from paceline.models.loading import load_drafter

    held_out, expected = prompts[-options.num_prompts :], answers[-options.num_prompts :]
    counts: Counts = {stream: {} for stream in drafters}
    num_identical = dict.fromkeys(map(str, drafters), 0)
    for trained_on, folder in drafters.items():
        for fed in STREAMS:
            drafter = load_drafter(str(folder), target, aux_hidden_stream=fed)
            results = answer(target, drafter, held_out, options, f"trained on {trained_on}, fed {fed}")
            counts[trained_on][fed] = [counts_of(result) for result in results]
            num_identical[trained_on] += sum(
                result.token_ids == ids for result, ids in zip(results, expected, strict=True)
            )
    return counts, num_identical


def counts_of(result: RequestResult) -> list[int]:
    """Tokens that the steps of an answer committed, the target's own included, and their number."""
    from paceline.trace.acceptance import AcceptanceSummary

    summary = AcceptanceSummary.from_steps(result.trace.records)
    return [summary.num_steps + summary.num_accepted, summary.num_steps]


def make_rows(family: str, counts: Counts, num_identical: Mapping[str, int]) -> list[dict[str, object]]:
    """A row per drafter."""
    rows: list[dict[str, object]] = []
    for trained_on, by_fed in counts.items():
        own = by_fed[trained_on]
        (other,) = (found for fed, found in by_fed.items() if fed != trained_on)
        pair = compare_pairs([tokens / steps for tokens, steps in other], [tokens / steps for tokens, steps in own])
        rows.append(
            {
                "family": family,
                "trained_on": trained_on,
                "own": _length(own),
                "other": _length(other),
                "difference": pair.mean.estimate,
                "low": pair.mean.low,
                "high": pair.mean.high,
                "num_prompts": len(own),
                "longer": pair.sign.wins,
                "shorter": pair.sign.losses,
                "sign_p": pair.sign.p_value,
                "num_texts": len(own) + len(other),
                "num_identical": num_identical[trained_on],
            }
        )
    return rows


def exit_code(rows: Sequence[Mapping[str, object]]) -> int:
    """3 if any text differs."""
    is_same = all(row["num_identical"] == row["num_texts"] for row in rows)
    return EXIT_DONE if is_same else EXIT_CHECK_SAYS_NO


def _length(counts: Sequence[Sequence[int]]) -> float:
    return sum(tokens for tokens, _ in counts) / sum(steps for _, steps in counts)


if __name__ == "__main__":
    sys.exit(run(main))
