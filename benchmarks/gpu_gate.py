"""What has to hold before a time on a GPU means anything: recorded steps equal eager ones, and bf16 follows float32.

Equal means token for token and draft for draft: both run the same kernels on the same numbers. In bf16 a near-tie may
fall either way, so agreement with float32 is told as a share, with the distance in the float32 logits between the best
token and the chosen one where a text first leaves it: small beside the spread of the logits, or something is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from paceline.engine.engine import Engine, EngineSettings
    from paceline.engine.request import RequestResult
    from paceline.models.loading import LoadedDrafter, LoadedTarget

Prompts = Sequence[Sequence[int]]
NUM_STEPS = 50
GRAPH, EAGER, DEFAULT = "graph", "eager", "default"
MODES = (DEFAULT, GRAPH, EAGER)


def records_steps(device: torch.device) -> bool:
    """Whether an engine on this device can record its steps and replay them."""
    from paceline.ops.dispatch import HAS_TRITON

    return device.type == "cuda" and HAS_TRITON


def engine_settings(mode: str = DEFAULT, **chosen: Any) -> EngineSettings:
    """Settings of an engine that records its steps, does not, or decides for itself."""
    from paceline.engine.engine import EngineSettings

    return EngineSettings(cuda_graphs=None if mode == DEFAULT else mode == GRAPH, **chosen)


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
        settings = engine_settings(mode, max_num_seqs=len(prompts), max_model_len=max_model_len, prefix_cache=False)
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


def compare_with_float32(
    reference: LoadedTarget, prompts: Prompts, texts: Sequence[Sequence[int]]
) -> dict[str, object]:
    """Score greedy texts of another arithmetic by a float32 model of the same weights, all positions at once.

    Returns:
        `agreement`: share of tokens that are the reference's best behind the same text; `num_tokens`;
        `first_divergence`: index of the earliest token that is not, None if there is none; `gap_at_divergence`: the
        largest distance from the best logit at the first such token of a text; `largest_gap`: at any token;
        `logit_spread`: standard deviation of the logits, beside which gaps are to be seen.
    """
    import torch

    from paceline.models.sequence_attend import sequence_attend

    model = reference.model
    device = model.norm.weight.device
    num_agreeing = num_tokens = 0
    firsts: list[int] = []
    first_gaps: list[float] = []
    largest = spread = 0.0
    with torch.inference_mode():
        for prompt, text in zip(prompts, texts, strict=True):
            ids_1T = torch.tensor([[*prompt, *text[:-1]]], device=device)
            positions_1T = torch.arange(ids_1T.shape[1], device=device).unsqueeze(0)
            hidden_1TD = model(ids_1T, positions_1T, sequence_attend(model))
            logits_TV = model.logits(hidden_1TD[:, len(prompt) - 1 :])[0].float()
            chosen_T = torch.tensor(text, device=device)
            gaps_T = logits_TV.amax(-1) - logits_TV.gather(1, chosen_T.unsqueeze(1)).squeeze(1)
            gaps = gaps_T.tolist()
            num_tokens += len(gaps)
            num_agreeing += gaps.count(0.0)
            apart = next((index for index, gap in enumerate(gaps) if gap > 0), None)
            if apart is not None:
                firsts.append(apart)
                first_gaps.append(gaps[apart])
            largest, spread = max(largest, *gaps), float(logits_TV.std())
    return {
        "agreement": num_agreeing / num_tokens,
        "num_tokens": num_tokens,
        "first_divergence": min(firsts, default=None),
        "gap_at_divergence": max(first_gaps, default=0.0),
        "largest_gap": largest,
        "logit_spread": spread,
    }
