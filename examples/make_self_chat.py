"""Makes a token file of conversations that a target has with itself, for `data.files` of a training run.

python examples/make_self_chat.py smollm2-135m-instruct data/selfchat-0.npz --num-conversations 32768
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from paceline.capture.self_chat import SelfChatSettings, generate_self_chat
from paceline.capture.token_file import write_token_file
from paceline.models.loading import load_target


def main() -> None:
    """Generate, drop duplicates, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("output", type=Path)
    parser.add_argument("--num-conversations", type=int, default=32768)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--max-answer-tokens", type=int, default=320)
    parser.add_argument("--greedy-share", type=float, default=0.75)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = SelfChatSettings(
        num_conversations=arguments.num_conversations,
        batch_size=arguments.batch_size,
        max_answer_tokens=arguments.max_answer_tokens,
        greedy_share=arguments.greedy_share,
        seed=arguments.seed,
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    conversations = list(generate_self_chat(load_target(arguments.target, linear_mode="plain"), settings))
    write_token_file(arguments.output, conversations)


if __name__ == "__main__":
    main()
