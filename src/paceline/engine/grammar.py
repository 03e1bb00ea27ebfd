"""Grammar masks for a block of drafts: which tokens may follow, row by row, through llguidance.

Three things may come next in a request's text: free text before the marker of `begins_after`, a token of the grammar,
or, where the grammar is complete, a stop token. Masks are packed 32 tokens to a word, lowest bit first. L rows, W
words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.checkpoint.tokenizer import TextTokenizer
from paceline.engine.grammar_tokenizer import PieceTokenizer, build_tokenizer, known_ids
from paceline.engine.structured import StructuredOutput
from paceline.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

NUM_KEPT_GRAMMARS = 64
_NOTHING_FITS = "no token of the vocabulary fits the grammar here"

Words = NDArray[np.int32]


class BlockMasks(NamedTuple):
    """What may come next in each row of a block.

    Attributes:
        mask_LW: int32, on the CPU; row i holds after drafts 0 to i-1. Rows behind the first invalid draft are all ones
            and never count.
        num_kept_drafts: drafts to verify: up to and including the first invalid one, which its own row refuses. Cutting
            it off before verification would bias what is drawn in its place.
        error: why a row allows nothing at all, or None.
    """

    mask_LW: Tensor
    num_kept_drafts: int
    error: str | None


class GrammarCompiler:
    """Turns wanted forms into states of one target's vocabulary; keeps the compiled grammars last used.

    Args:
        tokenizer: the target's; a `TextTokenizer` or a table of pieces.
        vocab_size: rows of the target's head; ids without a token are never allowed.
        stop_token_ids: the target's own; never text of a grammar.

    Raises:
        MissingExtraError: llguidance is not installed.
        ConfigError: llguidance cannot read the tokenizer.
    """

    def __init__(
        self, tokenizer: TextTokenizer | PieceTokenizer, *, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> None:
        self.stop_token_ids = tuple(stop_token_ids)
        self._vocab_size = vocab_size
        known = known_ids(tokenizer)
        self._tokenizer = build_tokenizer(tokenizer, max(vocab_size, max(known) + 1))
        self._pieces = {token: self._tokenizer.decode_bytes([token]) for token in known if token < vocab_size}
        self._text_W = _pack(self._pieces.keys() - set(self.stop_token_ids), vocab_size)
        self._grammars: OrderedDict[tuple[str, str | tuple[str, ...]], LLMatcher] = OrderedDict()

    def start(self, wanted: StructuredOutput, *, stop_token_ids: Sequence[int] = ()) -> GrammarState:
        """Compile a form, or find it among those compiled before.

        Args:
            wanted: the form.
            stop_token_ids: the request's, besides the target's own. Where such a token is no text that the grammar
                allows, it may come only once the grammar is complete.
        Returns:
            The state before the first token.
        Raises:
            RequestError: the form cannot be compiled, uses a feature that is not supported, or cannot be written with
                this vocabulary; or there is no token to end it.
        """
        stops = {token for token in (*self.stop_token_ids, *stop_token_ids) if token < self._vocab_size}
        if not stops:
            raise RequestError(
                "structured output needs a token that ends the text; the target has none",
                hint="stop_token_ids=(...,) of the request",
            )
        return GrammarState(
            self._compiled(wanted),
            text_W=self._text_W,
            stop_ids=stops,
            target_stop_ids=self.stop_token_ids,
            pieces=self._pieces,
            marker=(wanted.begins_after or "").encode(),
            vocab_size=self._vocab_size,
        )

    def _compiled(self, wanted: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        key = (wanted.kind, wanted.value)
        matcher = self._grammars.pop(key, None)
        if matcher is None:
            if wanted.kind == "choice":
                self._require_pieces(wanted.value)
            try:
                text = _grammar_text(wanted)
            except ValueError as error:
                raise RequestError(f"the {_label(wanted)} cannot be read: {error}") from error
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
            if matcher.is_error():
                reason = _first_paragraph(matcher.get_error())
                raise RequestError(f"the {_label(wanted)} cannot be compiled: {reason}")
        self._grammars[key] = matcher
        while len(self._grammars) > NUM_KEPT_GRAMMARS:
            self._grammars.popitem(last=False)
        return matcher

    def _require_pieces(self, choices: Iterable[str]) -> None:
        """Refuse a choice that no sequence of tokens spells."""
        spellings = {piece for token, piece in self._pieces.items() if token not in self.stop_token_ids}
        longest = max(len(piece) for piece in spellings)
        single_bytes = {piece[0] for piece in spellings if len(piece) == 1}
        for index, choice in enumerate(choices):
            data = choice.encode()
            if single_bytes.issuperset(data):  # as with every byte-level vocabulary
                continue
            reached = {0}
            for end in range(1, len(data) + 1):
                starts = reached.intersection(range(end - longest, end))
                if any(data[start:end] in spellings for start in starts):
                    reached.add(end)
            if len(data) not in reached:
                at = max(reached)
                raise RequestError(f"choice {index} is {choice!r}; no token spells its bytes from byte {at} on")


class GrammarState:
    """Where one request stands in its grammar.

    The grammar begins with the first token after the one that completes the marker, whatever else that token holds.
    Before that, text is free and stop tokens are not allowed. Made by `GrammarCompiler.start`.

    Args:
        grammar: before its first token; copied.
        text_W: tokens that may be text.
        stop_ids: tokens that end the request.
        target_stop_ids: those of them that are never text.
        pieces: bytes of every token.
        marker: bytes that begin the grammar; empty begins it at once.
        vocab_size: of the masks.
    """

    def __init__(
        self,
        grammar: LLMatcher,
        *,
        text_W: Words,
        stop_ids: set[int],
        target_stop_ids: Sequence[int],
        pieces: Mapping[int, bytes],
        marker: bytes,
        vocab_size: int,
    ) -> None:
        self._grammar, self._matcher = grammar, grammar.deep_copy()
        self._text_W, self._stops_W = text_W, _pack(stop_ids, vocab_size)
        self._stop_ids, self._target_stop_ids = stop_ids, frozenset(target_stop_ids)
        self._pieces, self._marker, self._vocab_size = pieces, marker, vocab_size
        self._tail: bytes | None = b"" if marker else None  # end of the free text; None once the grammar has begun
        self._consumed: list[int] = []  # by the matcher
        self._is_finished = False
        self._error: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the grammar has ended: nothing but a stop token may follow."""
        has_begun = self._tail is None and self._error is None
        return has_begun and (self._is_finished or self._matcher.is_stopped())

    def masks(self, draft_ids: Sequence[int], num_rows: int) -> BlockMasks:
        """Look ahead through a block; the state stays as it is.

        Args:
            draft_ids: proposals after the last token given to `advance`; -1 ends them.
            num_rows: rows of the block, one more than it has positions for drafts.
        Returns:
            Masks, the number of drafts to verify, and what is wrong if a row allows nothing.
        """
        mask_LW = np.full((num_rows, len(self._text_W)), -1, dtype=np.int32)
        before = (self._tail, self._is_finished, self._error)
        num_consumed, num_kept = len(self._consumed), 0
        for row in range(num_rows):
            mask_LW[row] = self._mask()
            draft = draft_ids[row] if row < len(draft_ids) else -1
            if draft < 0:
                break
            num_kept += 1
            if not _allows(mask_LW[row], draft):
                break
            self._take(draft)
        error = self._error
        self._tail, self._is_finished, self._error = before
        self._roll_back(num_consumed)
        return BlockMasks(torch.from_numpy(mask_LW), num_kept, error)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that the request really got.

        A token that does not fit is remembered; every later mask allows nothing and says why.

        Args:
            token_ids: in order, stop tokens included.
        """
        for token in token_ids:
            self._take(token)

    def _mask(self) -> Words:
        if self._error is not None:
            return np.zeros_like(self._text_W)
        if self._tail is not None:
            return self._text_W & ~self._stops_W
        if self.is_finished:
            return self._stops_W
        is_accepting = self._matcher.is_accepting()
        mask_W = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: len(self._text_W)] & self._text_W
        if self._matcher.is_error():  # its mask would allow a stop token
            reason = self._matcher.get_error()
            self._error = _NOTHING_FITS if reason.startswith("NoExtension") else _first_paragraph(reason)
            return np.zeros_like(self._text_W)
        if is_accepting:
            mask_W |= self._stops_W
        if not mask_W.any():
            self._error = _NOTHING_FITS
        return mask_W

    def _take(self, token: int) -> None:
        if self._error is not None:
            return
        if self._tail is not None:
            data = self._tail + self._pieces.get(token, b"")
            is_complete = self._marker in data
            self._tail = None if is_complete else data[max(0, len(data) - len(self._marker) + 1) :]
        elif self.is_finished or self._is_stop_here(token):
            if token not in self._stop_ids or not (self.is_finished or self._matcher.is_accepting()):
                self._error = f"token {token} came where the grammar does not allow it"
            self._is_finished = True
        elif self._matcher.consume_token(token):
            self._consumed.append(token)
        else:
            self._error = f"token {token} does not fit the grammar: {_first_paragraph(self._matcher.get_error())}"

    def _is_stop_here(self, token: int) -> bool:
        """A stop token of the request may be text as well; then the grammar reads it as text."""
        if token in self._target_stop_ids:
            return True
        return token in self._stop_ids and self._matcher.validate_tokens([token]) == 0

    def _roll_back(self, num_consumed: int) -> None:
        num_ahead = len(self._consumed) - num_consumed
        del self._consumed[num_consumed:]
        if not self._matcher.is_error() and (num_ahead == 0 or self._matcher.rollback(num_ahead)):
            return
        # A matcher that met an error keeps it for ever; the tokens that led here are known.
        self._matcher = self._grammar.deep_copy()
        self._matcher.consume_tokens(self._consumed)


def _grammar_text(wanted: StructuredOutput) -> str:
    from llguidance import LLMatcher

    value = wanted.value
    if wanted.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_literal, value)))
    assert isinstance(value, str)
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if wanted.kind == "grammar":
        return LLMatcher.grammar_from_lark(value)
    schema = '{"type":"object"}' if wanted.kind == "json_object" else value
    if schema.strip() == "true":
        schema = "{}"
    # A small model that may write blanks may never stop. A schema that wants them says so in its `x-guidance`.
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})


def _literal(text: str) -> str:
    """A regular expression for one text."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _label(wanted: StructuredOutput) -> str:
    names = {"json_schema": "JSON schema", "json_object": "JSON object", "choice": "choice"}
    return names.get(wanted.kind) or f"{wanted.kind} {wanted.value!r:.80}"


def _first_paragraph(message: str) -> str:
    return message.split("\n<", 1)[0].strip()


def _pack(token_ids: Iterable[int], vocab_size: int) -> Words:
    allowed = np.zeros((vocab_size + 31) // 32 * 32, dtype=bool)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


def _allows(mask_W: Words, token: int) -> bool:
    return bool(mask_W[token // 32] >> (token % 32) & 1)
