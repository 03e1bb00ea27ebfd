"""From what a caller asks for to a request that can run: everything that can be refused is refused here."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.engine.admission import token_limits
from paceline.engine.output import RequestOutput
from paceline.engine.request import QueueOptions, SamplingParameters, check_prompt
from paceline.engine.running import RunningRequest
from paceline.engine.sampling_flags import SamplingFlags
from paceline.models.loading import LoadedTarget
from paceline.ops.acceptance import VerifyMethod, is_lossless
from paceline.trace.step import RequestTrace

if TYPE_CHECKING:
    from paceline.engine.grammar import GrammarCompiler, GrammarState


class Intake:
    """Makes requests for one target.

    Args:
        target: checks ids, encodes texts, compiles grammars.
        max_model_len: tokens that prompt and output may hold together.
        verify_method: how drafts are judged.
    """

    def __init__(self, target: LoadedTarget, *, max_model_len: int, verify_method: VerifyMethod) -> None:
        self._target, self._max_model_len, self._verify_method = target, max_model_len, verify_method
        self._grammars: GrammarCompiler | None = None

    def new_request(
        self,
        name: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        *,
        draft_method: str,
        options: QueueOptions,
        sample_index: int = 0,
    ) -> RunningRequest:
        """Check a request.

        Args:
            name: of the request.
            prompt_ids: its prompt.
            sampling: one sample's.
            draft_method: how drafts are made, for the trace.
            options: how it is queued.
            sample_index: which of the prompt's samples it is.

        Raises:
            RequestError: see `Engine.add_request`.
        """
        contract = self._target.contract
        prompt = check_prompt(prompt_ids, vocab_size=contract.vocab_size, max_model_len=self._max_model_len)
        limits = token_limits(
            sampling, self._target.tokenizer, vocab_size=contract.vocab_size, target_stop_ids=contract.stop_token_ids
        )
        output = RequestOutput(
            self._target.tokenizer,
            sampling,
            max_tokens=min(sampling.max_tokens, self._max_model_len - len(prompt)),
            target_stop_ids=contract.stop_token_ids,
        )
        return RunningRequest(
            request_id=name,
            prompt_ids=prompt,
            sampling=sampling,
            seed=sampling.seed if sampling.seed is not None else secrets.randbits(64) - 2**63,
            output=output,
            trace=RequestTrace(name, len(prompt), lossless=is_lossless(self._verify_method), method=draft_method),
            flags=SamplingFlags.of([sampling]),
            limits=limits,
            grammar=self.start_grammar(sampling),
            sample_index=sample_index,
            verify_method=self._verify_method,
            priority=options.priority,
            timeout_s=options.timeout_s,
            cache_salt=options.cache_salt,
        )

    def start_grammar(self, sampling: SamplingParameters) -> GrammarState | None:
        """The grammar of a request before its first token; None if it has none.

        Raises:
            RequestError: it cannot be compiled.
            ConfigError: llguidance is missing or cannot read the tokenizer.
        """
        if sampling.structured_output is None:
            return None
        if self._grammars is None:
            from paceline.engine.grammar import GrammarCompiler  # llguidance is optional

            contract = self._target.contract
            self._grammars = GrammarCompiler(
                self._target.tokenizer, vocab_size=contract.vocab_size, stop_token_ids=contract.stop_token_ids
            )
        return self._grammars.start(sampling.structured_output, stop_token_ids=sampling.stop_token_ids)
