"""Makes a token file of a target's answers to a file of prompts, for `data.files` of a training run.

python examples/make_answers.py smollm2-135m-instruct data/prompts.jsonl data/answers-0.npz
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

from paceline.capture.answers import AnswerSettings, answer_prompts
from paceline.capture.token_file import write_token_file
from paceline.models.loading import load_target


def main() -> None:
    """Render the chat template around each prompt, answer, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path, help="JSONL with a key `prompt`")
    parser.add_argument("output", type=Path)
    parser.add_argument("--first", type=int, default=0, help="prompts to pass over")
    parser.add_argument("--num-prompts", type=int, default=None)
    parser.add_argument("--max-prompt-tokens", type=int, default=192, help="longer prompts are left out")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--max-answer-tokens", type=int, default=320)
    parser.add_argument("--greedy-share", type=float, default=0.75)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = AnswerSettings(
        batch_size=arguments.batch_size,
        max_answer_tokens=arguments.max_answer_tokens,
        greedy_share=arguments.greedy_share,
        seed=arguments.seed,
    )
    last = None if arguments.num_prompts is None else arguments.first + arguments.num_prompts
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()[arguments.first : last]
    target = load_target(arguments.target, linear_mode="plain")
    encoded = [
        target.tokenizer.encode_chat([{"role": "user", "content": json.loads(line)["prompt"]}]) for line in lines
    ]
    prompts = [ids for ids in encoded if len(ids) <= arguments.max_prompt_tokens]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_token_file(arguments.output, list(answer_prompts(target, prompts, settings)))


if __name__ == "__main__":
    main()
