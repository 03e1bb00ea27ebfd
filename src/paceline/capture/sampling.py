"""How answers are drawn: a share of conversations greedily, the rest at one temperature. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from paceline.capture.writer import PassageRequest, key_number, key_share


@dataclass(frozen=True)
class AnswerSampling:
    """Sampling of answers; what a conversation gets follows from its id and the seed alone.

    Attributes:
        max_answer_tokens: an answer is cut there and kept.
        greedy_share: share of conversations answered greedily.
        temperature: of the others.
        top_p: of the others.
        seed: of all choices and draws.
    """

    max_answer_tokens: int = 320
    greedy_share: float = 0.75
    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0

    def plan(self) -> dict[str, object]:
        """As JSON can hold it."""
        return asdict(self)

    def request(self, name: str, turn: int, prompt_ids: Sequence[int]) -> PassageRequest:
        """What to write behind a prompt.

        Args:
            name: id of the conversation; all its turns are drawn the same way.
            turn: which answer, from 0.
            prompt_ids: rendered, up to where the answer begins.
        """
        is_greedy = key_share(self.seed, "greedy", name) < self.greedy_share
        return PassageRequest(
            prompt_ids,
            self.max_answer_tokens,
            0.0 if is_greedy else self.temperature,
            1.0 if is_greedy else self.top_p,
            key_number(self.seed, "answer", name, turn),
        )
