"""Log-probabilities of accepted, corrected and bonus tokens are the target's own, at the right rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.unit.engine.replays import (
    BASE,
    PROMPTS,
    make_target,
    with_mistakes,
)

import paceline.engine.log_probabilities as log_probabilities
import paceline.engine.verifier as verifier
from paceline.engine.engine import Engine, EngineSettings
from paceline.engine.request import RequestResult
from paceline.models.attends import WholeSequence
from paceline.models.loading import LoadedTarget
from paceline.ops.target_distribution import process_logits


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return make_target()


@pytest.fixture(scope="module")
def plain(target: LoadedTarget) -> RequestResult:
    return Engine(target).generate([PROMPTS[0]], BASE)[0]


@torch.inference_mode()
def teacher_forced(target: LoadedTarget, result: RequestResult) -> torch.Tensor:
    """Logits of every output position in one pass over prompt and output, [T, V]."""
    text = torch.tensor([result.prompt_ids + result.token_ids])
    logits = target.model.logits(target.model(text, torch.arange(text.shape[1])[None], WholeSequence()))
    return logits[0, len(result.prompt_ids) - 1 : -1].float()


def entries_agree(result: RequestResult, logits_TV: torch.Tensor) -> bool:
    log_p = logits_TV.log_softmax(-1)
    for row, entry in zip(log_p, result.logprobs, strict=True):
        best = row.topk(min(5, int(row.isfinite().sum())))
        close = abs(entry.logprob - float(row[entry.token_id])) < 1e-4
        close &= [token for token, _ in entry.top] == best.indices.tolist()
        close &= all(abs(a - b) < 1e-4 for (_, a), b in zip(entry.top, best.values.tolist(), strict=True))
        if not close:
            return False
    return True


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verify_method", ["standard", "block", "match"])
def test_log_probabilities_are_those_of_one_pass_over_the_output(
    target: LoadedTarget, mode: str, temperature: float, verify_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P36: accepted drafts, corrections and bonus tokens; entries of the row before are found out."""
    shape = {"temperature": temperature, "top_k": 40, "min_p": 0.001, "seed": 21}
    sampling = replace(BASE, logprobs=5, logprobs_mode=mode, **shape)

    def run() -> list[RequestResult]:
        alone = Engine(target, None, EngineSettings(verify_method="match")).generate(PROMPTS, sampling)
        return with_mistakes(target, alone, verify_method=verify_method).generate(PROMPTS, sampling)

    def expected(result: RequestResult) -> torch.Tensor:
        logits = teacher_forced(target, result)
        if mode == "raw" or temperature == 0:
            return logits
        rows = {f"{name}_R": torch.full((len(logits),), value) for name, value in shape.items() if name != "seed"}
        return process_logits(logits, **rows, top_p_R=torch.ones(len(logits)))

    results = run()
    assert all(entries_agree(result, expected(result)) for result in results)
    records = [record for result in results for record in result.trace.records]
    kinds = {(record.num_accepted, record.num_accepted == record.num_draft_tokens) for record in records}
    assert (5, True) in kinds or verify_method != "match"
    assert any(not is_whole for _, is_whole in kinds)
    if verify_method == "standard":
        true = log_probabilities.row_logprobs
        monkeypatch.setattr(verifier, "row_logprobs", lambda z, *rest: true(z.roll(1, dims=1), *rest))
        assert not all(entries_agree(result, expected(result)) for result in run())


def test_deltas_carry_the_entries_of_their_tokens(target: LoadedTarget, plain: RequestResult) -> None:
    engine = with_mistakes(target, [plain])
    deltas = list(engine.stream(PROMPTS[0], replace(BASE, logprobs=2)))
    for delta in deltas:
        assert tuple(entry.token_id for entry in delta.logprobs) == delta.token_ids
    result = engine.result(deltas[0].request_id)
    assert sum((delta.logprobs for delta in deltas), ()) == result.logprobs
