"""What has to hold before a time on a GPU means anything: recorded steps equal eager ones, and bf16 follows float32.

Equal means token for token and draft for draft: both run the same kernels on the same numbers. In bf16 a near-tie may
fall either way, so agreement with float32 is a share, beside the share that plain bf16 has, and the distance in the
float32 logits between the best token and the chosen one where a text first leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.random_dense import plain_copy
from torch import Tensor

if TYPE_CHECKING:
    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import RequestResult
    from paceline.models.loading import LoadedDrafter, LoadedTarget

Prompts = Sequence[Sequence[int]]
NUM_STEPS = 50
PREFILL_CHUNK_SIZE = 8192  # prompt tokens of a pass: what other engines take at once on such a device
GRAPH, EAGER, DEFAULT = "graph", "eager", "default"
MODES = (DEFAULT, GRAPH, EAGER)


def records_steps(device: torch.device) -> bool:
    """Whether an engine on this device can record its steps and replay them."""
    from paceline.ops.dispatch import HAS_TRITON

    return device.type == "cuda" and HAS_TRITON


def engine_settings(mode: str = DEFAULT, **chosen: Any) -> EngineSettings:
    """Settings of an engine that records its steps, does not, or decides for itself; prompts in large passes."""
    from paceline.engine.engine import EngineSettings

    graphs = None if mode == DEFAULT else mode == GRAPH
    return EngineSettings(cuda_graphs=graphs, prefill_chunk_size=PREFILL_CHUNK_SIZE, prefix_cache=False, **chosen)


def answer(engine: Engine, prompts: Prompts, num_tokens: int) -> list[RequestResult]:
    """Greedy answers of exactly so many tokens."""
    from paceline.engine.request import SamplingParameters

    return engine.generate(prompts, SamplingParameters(max_tokens=num_tokens, ignore_eos=True))


def steps_of(result: RequestResult) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Step by step, what was drafted and what came out."""
    return [(record.proposed_ids, record.emitted_ids) for record in result.trace.records]


def compare_modes(
    target: LoadedTarget, drafter: LoadedDrafter | None, prompts: Prompts, *, max_model_len: int
) -> dict[str, object]:
    """Serve the same prompts with recorded and with eager steps.

    Returns:
        `num_same`: requests all of whose steps are equal, of `num_prompts`; `num_steps`: of the longest request;
        `num_replayed`: steps of the batch that came from a recording; `first_difference`: the earliest step that is
        another, None if there is none.
    """
    from paceline.engine.engine import Engine

    found: dict[str, list[list[Any]]] = {}
    num_replayed = 0
    for mode in (EAGER, GRAPH):
        settings = engine_settings(mode, max_num_seqs=len(prompts), max_model_len=max_model_len)
        engine = Engine(target, drafter, settings)
        found[mode] = [steps_of(result) for result in answer(engine, prompts, NUM_STEPS + 1)]
        num_replayed = engine.stats().num_replayed_steps
        engine.close()
    firsts = [first_difference(*pair) for pair in zip(found[EAGER], found[GRAPH], strict=True)]
    differing = [first for first in firsts if first is not None]
    return {
        "num_same": firsts.count(None),
        "num_prompts": len(prompts),
        "num_steps": max(map(len, found[EAGER])),
        "num_replayed": num_replayed,
        "first_difference": min(differing, default=None),
    }


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """Index of the first entry that differs or that only one of the two has."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def compare_with_float32(target: LoadedTarget, prompts: Prompts, texts: Sequence[Sequence[int]]) -> dict[str, object]:
    """Score greedy texts of an engine by a float32 model of the same weights, all positions of a text at once.

    What is normal for the engine's dtype shows beside it: the tokens that plain arithmetic in this dtype would choose
    behind the same texts, without an engine, a cache or a kernel of our own.

    Args:
        target: a dense one, that the engine ran.
        prompts: token ids.
        texts: what the engine answered.

    Returns:
        `agreement`: share of tokens that are float32's best behind the same text, of `num_tokens`; `first_divergence`:
        index of the earliest token that is not, None if there is none; `gap_at_divergence`: the largest distance from
        the best logit at the first such token of a text; `largest_gap`: at any token; `normal_agreement`,
        `normal_gap`: share and largest distance of the plain choices; `logit_spread`: standard deviation of the
        logits, beside which gaps are to be seen; `follows`: agreement is what is normal, but for chance.
    """
    reference, ordinary = (plain_copy(target, dtype) for dtype in (torch.float32, target.model.norm.weight.dtype))
    gaps: list[list[float]] = []
    normal_gaps: list[float] = []
    spread = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        logits_TV = _logits_behind(reference, prompt, text)
        best_T = logits_TV.amax(-1)

        def distances(ids_T: Tensor, logits_TV: Tensor = logits_TV, best_T: Tensor = best_T) -> list[float]:
            return [float(gap) for gap in best_T - logits_TV.gather(1, ids_T.unsqueeze(1)).squeeze(1)]

        gaps.append(distances(torch.tensor(text, device=logits_TV.device)))
        normal_gaps += distances(_logits_behind(ordinary, prompt, text).argmax(-1))
        spread = float(logits_TV.std())
    every = [gap for row in gaps for gap in row]
    first_of_text = [next(((index, gap) for index, gap in enumerate(row) if gap > 0), None) for row in gaps]
    apart = [first for first in first_of_text if first is not None]
    agreement, normal = (each.count(0.0) / len(each) for each in (every, normal_gaps))
    return {
        "agreement": agreement,
        "normal_agreement": normal,
        "num_tokens": len(every),
        "first_divergence": min((index for index, _ in apart), default=None),
        "gap_at_divergence": max((gap for _, gap in apart), default=0.0),
        "largest_gap": max(every),
        "normal_gap": max(normal_gaps),
        "logit_spread": spread,
        "follows": agreement >= normal - _allowance(normal, len(every)),
    }


def _logits_behind(target: LoadedTarget, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """Logits [T, V] in float32 that choose each token of a text."""
    from paceline.models.sequence_attend import sequence_attend

    model = target.model
    with torch.inference_mode():
        ids_1T = torch.tensor([[*prompt, *text[:-1]]], device=model.norm.weight.device)
        positions_1T = torch.arange(ids_1T.shape[1], device=ids_1T.device).unsqueeze(0)
        hidden_1TD = model(ids_1T, positions_1T, sequence_attend(model))
        return model.logits(hidden_1TD[:, len(prompt) - 1 :])[0].float()


def _allowance(share: float, count: int) -> float:
    """How far below a share another one of as many tokens may lie by chance: four standard deviations, or 0.05."""
    return max(0.05, 4 * (2 * share * (1 - share) / count) ** 0.5)
