"""A Kimi target cut into stages within one process: the reference of what a pipeline over several must compute.

Stages run one after the other and see nothing of each other but `HandOver`. Taps of early stages travel with it, and
the last stage has them all, in the order of their ids. B requests, T rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, TargetContract
from paceline.errors import ConfigError
from paceline.models.hybrid import HybridAttend
from paceline.models.layers import score_rows
from paceline.models.taps import TapCollector
from paceline.models.targets.kimi import KimiTarget
from paceline.models.targets.kimi_layer import ResidualStream
from paceline.models.targets.kimi_stage import KimiStage
from paceline.models.targets.stage import HandOver


def stage_ranges(num_layers: int, borders: Sequence[int]) -> list[tuple[int, int]]:
    """The layers of each stage, half-open.

    Args:
        num_layers: of the target.
        borders: first layer of every stage but the first; ascending, inside 1 to `num_layers - 1`.
    Raises:
        ConfigError: a border is outside, or two are alike or descend.
    """
    ends = [*borders, num_layers]
    starts = [0, *borders]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        raise ConfigError(
            f"a pipeline cut before layers {list(borders)} was asked for; cuts ascend, from 1 to {num_layers - 1}"
        )
    return list(zip(starts, ends, strict=True))


def cut_target(target: KimiTarget, borders: Sequence[int]) -> list[KimiStage]:
    """Stages over the weights of a whole target; nothing is copied but the score vectors at the cuts."""
    stages = []
    for start, end in stage_ranges(target.contract.num_layers, borders):
        stage = KimiStage(target.contract, start, end)
        stage.embed_tokens = target.embed_tokens if start == 0 else None
        for layer in range(start, end):
            stage.layers[layer] = target.layers[layer]
        if stage.is_last:
            stage.norm, stage.lm_head = target.norm, target.lm_head
            stage.output_attn_res = target.output_attn_res
        if stage.boundary is not None:
            behind = target.layers[end].get_submodule("self_attention_res")
            stage.boundary.to(target.norm.weight.dtype).to(target.norm.weight.device)
            stage.boundary.set(behind.get_parameter("norm"), behind.get_parameter("proj"))
        stages.append(stage.eval())
    return stages


class KimiPipeline:
    """All stages of a target, run in turn.

    Args:
        stages: in order, together the whole target.
    Raises:
        ConfigError: layers are missing between two stages, or run twice.
    """

    def __init__(self, stages: Sequence[KimiStage]) -> None:
        self.contract: TargetContract = stages[0].contract
        borders = [stage.start for stage in stages[1:]]
        if [(stage.start, stage.end) for stage in stages] != stage_ranges(self.contract.num_layers, borders):
            held = ", ".join(f"{stage.start} to {stage.end - 1}" for stage in stages)
            raise ConfigError(f"stages hold layers {held}; together they must hold each of them once, in order")
        self.stages = list(stages)

    def prepare_taps(self, capture_ids: Sequence[CaptureId], stream: AuxHiddenStream) -> None:
        """Set capture ids on every stage; errors as there."""
        for stage in self.stages:
            stage.prepare_taps(capture_ids, stream)

    def __call__(self, token_ids_BT: Tensor, attend: HybridAttend, taps: TapCollector | None = None) -> Tensor:
        """Run all stages.

        Args:
            token_ids_BT: int64.
            attend: what the caller keeps for all layers.
            taps: ends with every id that it wants, wherever it was tapped.
        Returns:
            [B, T, D], before the final norm.
        """
        handed: HandOver | None = None
        for stage in self.stages[:-1]:
            own = None if taps is None else TapCollector(taps.capture_ids, taps.stream)
            handed = stage.hand_over(stage.run(self._enter(stage, token_ids_BT, handed, own), attend, own), own)
        last = self.stages[-1]
        return last.finish(last.run(self._enter(last, token_ids_BT, handed, taps), attend, taps), taps)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Scores of every vocabulary id from what the stages return."""
        last, kimi = self.stages[-1], self.contract.kimi
        assert last.norm is not None and last.lm_head is not None and kimi is not None
        scores = score_rows(last.lm_head, last.norm(hidden_BTD))
        return scores if kimi.logit_scale == 1.0 else scores * kimi.logit_scale

    @staticmethod
    def _enter(
        stage: KimiStage, token_ids_BT: Tensor, handed: HandOver | None, taps: TapCollector | None
    ) -> ResidualStream:
        if handed is None:
            assert stage.embed_tokens is not None, "the first stage has the embeddings"
            return stage.begin(stage.embed_tokens(token_ids_BT))
        if taps is not None:
            for capture, hidden_BTD in handed.taps.items():
                taps.observe(capture, hidden_BTD)
        return stage.receive(handed)
