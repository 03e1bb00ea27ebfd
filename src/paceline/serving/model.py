"""The model that a server has behind it: what its routes must know of it, and how it comes to be."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.engine.async_engine import AsyncEngine
from paceline.errors import EngineClosedError
from paceline.serving.token_texts import FewestTokens

if TYPE_CHECKING:
    from paceline.checkpoint.generation_defaults import SamplingDefaults
    from paceline.checkpoint.tokenizer import TextTokenizer
    from paceline.engine.engine_thread import ServedEngine

MetricsLevel = Literal["none", "summary", "detailed"]


@dataclass(frozen=True)
class ServedModel:
    """What routes know of a model.

    Attributes:
        name: under which clients ask for it.
        root: what was loaded.
        draft_name: its drafter; None where nothing is drafted.
        tokenizer: the target's.
        stop_token_ids: the target's own.
        vocab_size: of the target.
        max_model_len: tokens that prompt and answer may hold together.
        num_draft_tokens: drafts per step, at most; 0 without a drafter.
        defaults: sampling where a request says nothing.
        facts: what `/server_info` tells, as plain JSON.
        tells_reasoning: whether what a target thinks is told apart from what it says.
        created_s: when it was loaded, in seconds since 1970.
    """

    name: str
    root: str
    draft_name: str | None
    tokenizer: TextTokenizer
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    num_draft_tokens: int
    defaults: SamplingDefaults
    facts: Mapping[str, object]
    tells_reasoning: bool = True
    created_s: int = field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def fewest_tokens(self) -> FewestTokens:
        """What is known of a text before it is encoded."""
        return FewestTokens(self.tokenizer)


OpenModel = Callable[[], "tuple[ServedModel, ServedEngine]"]


class ModelHost:
    """Loads a model on its engine's thread, so that a server answers `/health` meanwhile, and holds both.

    Args:
        open_model: loads everything and makes the engine.
        checks_at_start: whether nothing is served before the drafter has passed its canary.

    Attributes:
        engine: that serves.
    """

    def __init__(self, open_model: OpenModel, *, checks_at_start: bool = True) -> None:
        self._open_model = open_model
        self._model: ServedModel | None = None
        self.engine = AsyncEngine(self._make_engine, canary="start" if checks_at_start else "off", freezes_heap=True)

    def _make_engine(self) -> ServedEngine:
        model, engine = self._open_model()
        self._model = model
        return engine

    @property
    def is_ready(self) -> bool:
        """Whether requests are served, by an engine that no check has found wrong."""
        return self._model is not None and self.engine.is_healthy

    @property
    def model(self) -> ServedModel:
        """The model.

        Raises:
            EngineClosedError: it is still being loaded, or is served no more.
        """
        if self._model is None or not self.engine.is_running:
            raise not_ready()
        return self._model


def not_ready() -> EngineClosedError:
    """What those are told who ask before the model is there."""
    return EngineClosedError("the model is not ready", hint="GET /health answers 200 once it is")
