"""Prompts and answers from the target alone: it writes the user's turn at temperature 1, then answers it.

Every row opens with the same template text. A user turn that does not end by itself, is empty, loops, occurred before
or shares words with what is excluded is dropped before it is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.capture.exclusion import Exclusion
from paceline.capture.rows import CapturedRow, ShardContent
from paceline.capture.sampling import AnswerSampling
from paceline.capture.writer import Passage, PassageRequest, Progress, Writer, key_number
from paceline.errors import CompatibilityError
from paceline.models.loading import LoadedTarget

_USER_TEMPERATURE = 1.0  # what the target would ask, as it would ask it


@dataclass(frozen=True)
class SelfChat:
    """A source of conversations, row by row; a row follows from its index and the seed.

    Attributes:
        target: what asks and answers.
        num_items: rows started; fewer are kept.
        max_user_tokens: a longer user turn is dropped, since it was cut.
        sampling: of the answers.
        exclusion: what may not be asked.
    """

    target: LoadedTarget
    num_items: int
    max_user_tokens: int
    sampling: AnswerSampling
    exclusion: Exclusion

    def plan(self) -> dict[str, object]:
        """What the rows follow from, beside target and sampling."""
        return {"kind": "self_chat", "rows": self.num_items, "max_user_tokens": self.max_user_tokens}

    def context_length(self) -> int:
        """Tokens of the longest conversation.

        Raises:
            CompatibilityError: the template cannot be used, or that conversation has no room in the target's context.
        """
        opening, closing, _ = template_around_user(self.target)
        longest = len(opening) + self.max_user_tokens + len(closing) + self.sampling.max_answer_tokens
        limit = self.target.model.position_table.shape[0]
        if longest > limit:
            raise CompatibilityError(
                f"a conversation may take {longest} tokens; the target has positions for {limit}",
                origin={"target": self.target.contract.origin},
                hint="fewer tokens per answer or per user turn",
            )
        return longest

    def shard(self, rows: range, writer: Writer, on_progress: Progress | None = None) -> ShardContent:
        """Ask and answer some of the rows."""
        opening, closing, num_end = template_around_user(self.target)
        names = [f"self-{row}" for row in rows]
        asked = writer.write(
            [
                PassageRequest(
                    opening, self.max_user_tokens, _USER_TEMPERATURE, 1.0, key_number(self.sampling.seed, "ask", name)
                )
                for name in names
            ],
            None if on_progress is None else lambda passages, tokens: on_progress(0, tokens),
        )
        dropped: list[tuple[str, str]] = []
        kept: dict[tuple[int, ...], str] = {}
        for name, passage in zip(names, asked, strict=True):
            reason = self._refuse(passage, closing[:num_end]) or ("repeated" if passage.token_ids in kept else None)
            if reason is None:
                kept[passage.token_ids] = name
            else:
                dropped.append((name, reason))
        if on_progress is not None:
            on_progress(len(dropped), 0)
        requests = [
            self.sampling.request(name, 0, [*opening, *user_ids, *closing[num_end:]]) for user_ids, name in kept.items()
        ]
        rows_out = []
        for name, request, answer in zip(
            kept.values(), requests, writer.write(requests, on_progress) if requests else [], strict=True
        ):
            if answer.end == "error":
                dropped.append((name, "bad numbers"))
            else:
                rows_out.append(CapturedRow(name, 0, request, answer))
        return ShardContent(rows_out, dropped)

    def _refuse(self, passage: Passage, end: Sequence[int]) -> str | None:
        """Why a user turn is not answered; it ends with the tokens that close it."""
        if passage.end == "error":
            return "bad numbers"
        if passage.end != "stop":
            return "user turn cut" if passage.end == "length" else "user turn loops"
        if list(passage.token_ids[-len(end) :]) != list(end):
            return "user turn stops otherwise"
        if len(passage.token_ids) == len(end):
            return "empty user turn"
        if self.exclusion.covers(self.target.tokenizer.decode(list(passage.token_ids[: -len(end)]))):
            return "excluded"
        return None


def template_around_user(target: LoadedTarget) -> tuple[list[int], list[int], int]:
    """Token ids that the chat template puts before and after the user's first turn, up to the answer.

    Returns:
        Both, and how many of the latter close the turn: those up to the first stop token.
    Raises:
        CompatibilityError: the template does not put the user's text between fixed parts, the second of which holds a
            stop token.
        RequestError: the target has no chat template.
    """
    renders = [target.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("0", "yes")]
    shorter = min(map(len, renders))
    before = next((i for i in range(shorter) if renders[0][i] != renders[1][i]), shorter)
    after = next((i for i in range(shorter - before) if renders[0][-1 - i] != renders[1][-1 - i]), shorter - before)
    opening, closing = renders[0][:before], renders[0][len(renders[0]) - after :]
    stops = target.contract.stop_token_ids
    num_end = next((place + 1 for place, token in enumerate(closing) if token in stops), 0)
    if before == 0 or num_end == 0:
        raise CompatibilityError(
            "the chat template does not close the user's turn with a stop token, so the target cannot write that turn",
            origin={"target": target.contract.origin},
            hint="prompts from a file instead",
        )
    return opening, closing, num_end
