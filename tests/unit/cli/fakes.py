"""A scripted engine and tokenizer for the command line: one character is one token, no tensor anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from paceline.trace.step import RequestTrace, StepRecord

ANSWER = "hello wide world\n"
BLOCK = 4


class FakeTokenizer:
    has_chat_template = True
    special_ids: frozenset[int] = frozenset()
    backend = SimpleNamespace(get_added_tokens_decoder=dict, decoder=None, id_to_token=chr)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


@dataclass
class _Running:
    prompt_ids: list[int]
    trace: RequestTrace
    rest: str
    text: str = ""


@dataclass
class FakeEngine:
    """Delivers `answer` in blocks: each step accepts all drafts but the last, and adds the bonus.

    Args:
        answer: what every request gets.
        has_drafter: False delivers one token per step.
        interrupt_after: raise KeyboardInterrupt in this step, counted over the engine's life.
    """

    answer: str = ANSWER
    has_drafter: bool = True
    interrupt_after: int | None = None
    last_reason: str = "stop"
    error: str = "the logits hold a NaN or an infinity"
    has_dead_end: bool = False
    max_model_len: int = 2048
    running: dict[str, _Running] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    seeds: list[int | None] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    verify_method: str = "standard"
    sizes: dict[str, int] = field(default_factory=dict)

    def sized(self, **sizes: int) -> FakeEngine:
        """Remember what it was made for."""
        self.sizes = sizes
        return self

    def add_request(self, prompt_ids: Sequence[int], sampling: Any, request_id: str | None = None) -> str:
        name = request_id or f"r{len(self.results) + len(self.running)}"
        answer = self.answer[: sampling.max_tokens]
        self.seeds.append(sampling.seed)
        self.asked.append(sampling)
        trace = RequestTrace(name, len(prompt_ids), first_token_id=ord(answer[0]), prefill_ms=1.0, method="fake")
        self.running[name] = _Running(list(prompt_ids), trace, answer[1:], answer[0])
        return name

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        self.num_steps += 1
        if self.num_steps == self.interrupt_after:
            raise KeyboardInterrupt
        deltas = []
        for name, request in list(self.running.items()):
            size = BLOCK if self.has_drafter else 1
            piece, request.rest = request.rest[:size], request.rest[size:]
            first = request.text if not request.trace.records else ""
            request.text += piece
            ids = tuple(map(ord, piece))
            request.trace.records.append(
                StepRecord(
                    request_id=name,
                    step_index=len(request.trace.records),
                    anchor_position=0,
                    anchor_id=0,
                    proposed_ids=(*ids[:-1], 0) if self.has_drafter else (),
                    num_verified_accepted=len(ids) - 1,
                    num_accepted=len(ids) - 1,
                    emitted_ids=ids,
                    bonus_id=ids[-1],
                    step_ms=1.0,
                )
            )
            reason = self.last_reason if not request.rest else None
            if reason:
                self._finish(name, reason)
            deltas.append(
                SimpleNamespace(request_id=name, token_ids=ids, text=first + piece, finish_reason=reason, step=None)
            )
        return deltas

    def _finish(self, name: str, reason: str) -> None:
        request = self.running.pop(name)
        request.trace.finish_reason = reason
        request.trace.total_ms = request.trace.prefill_ms + len(request.trace.records)
        self.results[name] = SimpleNamespace(
            request_id=name,
            prompt_ids=tuple(request.prompt_ids),
            token_ids=request.trace.token_ids,
            text=request.text,
            finish_reason=reason,
            stop_reason=None,
            trace=request.trace,
            logprobs=self._logprobs(request),
            error=self.error if reason == "error" else None,
            verify_method=self.verify_method,
            is_lossless=True,
            num_cached_tokens=0,
            has_dead_end=self.has_dead_end,
        )

    def _logprobs(self, request: _Running) -> Any:
        if self.asked[-1].logprobs is None:
            return None
        return tuple(
            SimpleNamespace(token_id=token, logprob=-0.5, mode="raw", top=((token, -0.5),))
            for token in request.trace.token_ids
        )

    def stats(self) -> Any:
        return SimpleNamespace(num_listed_ids=None, listed_share=None)

    def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self._finish(request_id, "abort")

    def result(self, request_id: str) -> Any:
        return self.results[request_id]

    def take_result(self, request_id: str) -> Any:
        return self.results[request_id]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any) -> list[Any]:
        names = [self.add_request(prompt, sampling) for prompt in prompts]
        while self.has_unfinished():
            self.step()
        return [self.result(name) for name in names]


def fake_models(*, has_drafter: bool = True) -> Any:
    """What `load_models` returns, with nothing behind it."""
    weight = SimpleNamespace(dtype="torch.float32", device=SimpleNamespace(type="cpu"))
    model = SimpleNamespace(norm=SimpleNamespace(weight=weight), named_parameters=list)
    target = SimpleNamespace(
        model=model,
        linear_mode="plain",
        tokenizer=FakeTokenizer(),
        contract=SimpleNamespace(name="t", origin="t", vocab_size=1 << 17),
    )
    drafter = None
    if has_drafter:
        contract = SimpleNamespace(origin="d", family="dflash", aux_hidden_stream="prefix")
        drafter = SimpleNamespace(contract=contract, model=model, num_draft_tokens=BLOCK - 1)
    return SimpleNamespace(target=target, drafter=drafter)
