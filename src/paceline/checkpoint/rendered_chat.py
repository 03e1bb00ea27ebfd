"""A chat as the parts of a prompt: what a template or a format wrote, and what its users said."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A part that is encoded by itself.

    Attributes:
        text: of the part.
        holds_tokens: whether an added token that is written out in it stands for its id. Where a format keeps its own
            marks apart from what people wrote, no text of theirs can forge one.
    """

    text: str
    holds_tokens: bool


@dataclass(frozen=True)
class RenderedChat:
    """Segments in order. A template's text is one segment; it cannot tell its marks from a user's."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(segment.text for segment in self.segments)

    def cut(self, end: int) -> RenderedChat:
        """The first characters alone.

        Args:
            end: how many.
        """
        kept: list[Segment] = []
        for segment in self.segments:
            text = segment.text[:end]
            end -= len(text)
            if text:
                kept.append(Segment(text, segment.holds_tokens))
        return RenderedChat(tuple(kept))
