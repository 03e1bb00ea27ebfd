"""Reads a page as a browser would, strictly: every element closed in order, and whatever it asks the network for."""

from __future__ import annotations

from html.parser import HTMLParser

_EMPTY = {"meta", "br", "rect", "path", "circle", "polyline"}


class Page(HTMLParser):
    """A page that was parsed.

    Attributes:
        elements: tag and attributes of each, in order.
        faults: what does not nest.
        texts: all text, by the tag that it stands in.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.faults: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        self.faults += [f"{tag} is not closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in _EMPTY:
            return
        if not self._open or self._open[-1] != tag:
            self.faults.append(f"{tag} closes {self._open[-1:]} at {self.getpos()}")
        else:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1] if self._open else "", data))

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        """Attributes of all elements of a tag that have these."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [found for name, found in self.elements if name == tag and wanted.items() <= found.items()]

    def text_of(self, tag: str) -> str:
        """All text that stands in elements of a tag."""
        return " ".join(text for name, text in self.texts if name == tag)
