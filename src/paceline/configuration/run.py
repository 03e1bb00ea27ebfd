"""What a training run was asked to do, one described sentence per field: a file of settings, as in `examples/`.

`load.py` reads files and puts overrides on top. Nothing here knows torch: device and dtype are names, which the models
turn into objects.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.configuration.fields import (
    Count,
    CountOrZero,
    DeviceName,
    DraftSampleMethod,
    DtypeName,
    Flag,
    Integer,
    Name,
    NumberOrZero,
    OrNone,
    PathName,
    PositiveNumber,
    Seed,
    Settings,
    Share,
)

LossName = Literal["kl", "ce", "l1"]
DrafterFamily = Literal["dflash", "dflash2", "dspark", "eagle3"]
LATENT_FAMILIES = ("dflash2", "dspark")  # whose files have words for latent attention


class TargetSettings(Settings):
    """The model that the drafter will ride on."""

    name: Name = Field(description="target: a folder, a .gguf file, a hub name or an alias")
    dtype: DtypeName = Field("auto", description="precision of the frozen target; auto takes the device's best")
    linear_mode: Literal["plain", "row_invariant"] = Field(
        "plain",
        description="arithmetic of the target; row_invariant is slow, and makes a step on stored features bitwise that "
        "beside the target",
    )


class DrafterSettings(Settings):
    """Shape of the drafter and of the block that it proposes."""

    family: DrafterFamily = Field(
        "dflash",
        description="dflash predicts each position on its own, dflash2 and dspark let neighbours agree on a text, "
        "eagle3 drafts one token per pass",
    )
    start_from: Annotated[PathName | None, OrNone] = Field(
        None, description="folder of a drafter of the same shape to go on from; unset starts from random weights"
    )
    num_layers: Count = Field(4, le=64, description="decoder layers of the drafter")
    intermediate_size: Count = Field(1280, description="width of the drafter's MLP")
    target_layer_ids: Annotated[tuple[Integer, ...] | None, OrNone] = Field(
        None, description="tapped target layers, 0-based, by their output; unset spreads `num_taps` over the depth"
    )
    num_taps: Count = Field(5, le=32, description="number of tapped target layers")
    block_size: Count = Field(
        8,
        ge=2,
        le=64,
        description="rows of a block, the anchor's included: all but that one draft a token, and that one too under "
        "layout anchor_sampling",
    )
    layout: Literal["fill_in", "anchor_sampling"] = Field(
        "fill_in", description="dspark: whether the anchor's own row drafts the token after it"
    )
    aux_hidden_stream: Literal["prefix", "attn_res"] = Field(
        "prefix", description="the target's stream that taps read; attn_res where it has attention residuals"
    )
    tap_norm: Flag = Field(True, description="whether each tap has its own RMSNorm before the projection")
    conv_kernel_size: Count = Field(2, le=64, description="dflash2: rows that its convolution reads, itself included")
    conv_group_size: Count = Field(16, description="dflash2: channels that share a coefficient of the convolution")
    selector_rank: Count = Field(64, description="dflash2: width of the selector's two tables, a row per token each")
    selector_top_k: Count = Field(16, le=32, description="dflash2: candidates per position")
    markov_rank: CountOrZero = Field(
        64, description="dspark: width of the tables that score a token after another; 0 leaves them out"
    )
    markov_kind: Literal["vanilla", "gated", "rnn"] = Field(
        "vanilla", description="dspark: what weighs these scores; gated reads the row's state, rnn the block so far"
    )
    confidence_head: Flag = Field(True, description="dspark: whether it learns to foresee which drafts are kept")
    kv_lora_rank: CountOrZero = Field(
        0,
        description="dspark, dflash2: channels of the latent row that stands for keys and values of all heads, as "
        "in K3's drafters; 0 gives heads their own, and the four sizes that follow no meaning",
    )
    q_lora_rank: Count = Field(1536, description="latent attention: rank of the queries")
    qk_nope_head_size: Count = Field(128, description="latent attention: channels of a head's queries without position")
    qk_rope_head_size: Count = Field(
        64, multiple_of=2, description="latent attention: channels that a position turns, one key of all heads"
    )
    v_head_size: Count = Field(128, description="latent attention: channels of a head's values")
    norm_before_residual: Flag = Field(True, description="eagle3: whether the first layer adds to the normed state")
    norm_output: Flag = Field(False, description="eagle3: whether the next pass starts from the normed state")
    own_head: Flag = Field(False, description="eagle3: train an output head instead of borrowing the target's")
    draft_vocab_size: Annotated[Count | None, OrNone] = Field(
        None, description="eagle3: number of ids that are drafted, the most frequent in the data; unset is all"
    )
    min_vocab_coverage: Share = Field(
        0.95, description="eagle3: share of the response tokens that the drafted ids must make up"
    )
    mask_token_id: Annotated[CountOrZero | None, OrNone] = Field(
        None,
        description="token id that fills the rows after the anchor: one that no text holds, such as an unused row; "
        "eagle3 has none",
    )
    draft_sample_method: Annotated[DraftSampleMethod | None, OrNone] = Field(
        None,
        description="how a served drafter picks its proposals unless told otherwise; unset is probabilistic for "
        "dflash2 and dspark, greedy for the others",
    )

    @model_validator(mode="before")
    @classmethod
    def _listed_taps_set_their_number(cls, values: Any) -> Any:
        """A list of taps says how many there are, so that `num_taps` need not be repeated beside it."""
        if isinstance(values, Mapping) and "num_taps" not in values:
            layers = values.get("target_layer_ids")
            if isinstance(layers, (list, tuple)) and layers:
                return {**values, "num_taps": len(layers)}
        return values

    @field_validator("target_layer_ids")
    @classmethod
    def _taps_rise(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is None:
            return None
        if not layers:
            raise ValueError("an empty list taps nothing; leave the key out to spread the taps")
        if min(layers) < 0:
            raise ValueError(f"layer {min(layers)} is below 0; layers count from 0")
        if list(layers) != sorted(set(layers)):
            raise ValueError(f"{list(layers)} must rise without repeats: the order is the order of the projection")
        return layers

    @model_validator(mode="after")
    def _tap_counts_agree(self) -> Self:
        if self.target_layer_ids is not None and len(self.target_layer_ids) != self.num_taps:
            raise ValueError(f"num_taps is {self.num_taps}, target_layer_ids has {len(self.target_layer_ids)} entries")
        return self

    @model_validator(mode="after")
    def _parts_fit_the_family(self) -> Self:
        if self.family != "eagle3" and self.mask_token_id is None:
            raise ValueError(f"mask_token_id is missing; a {self.family} drafter fills its rows with it")
        if self.family == "eagle3" and self.mask_token_id is not None:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; an eagle3 drafter has no rows to fill")
        for key, family, neutral in (
            ("layout", "dspark", "fill_in"),
            ("own_head", "eagle3", False),
            ("draft_vocab_size", "eagle3", None),
        ):
            value = getattr(self, key)
            if self.family != family and value != neutral:
                raise ValueError(f"{key} is {value!r}; family {self.family!r} has no such choice, {family!r} has")
        if self.kv_lora_rank and self.family not in LATENT_FAMILIES:
            raise ValueError(
                f"kv_lora_rank is {self.kv_lora_rank}; family {self.family!r} has no latent attention, "
                f"{' and '.join(map(repr, LATENT_FAMILIES))} have"
            )
        if self.kv_lora_rank and self.family == "dspark" and self.layout != "anchor_sampling":
            raise ValueError(
                f"layout is {self.layout!r}; a dspark drafter with latent attention (kv_lora_rank "
                f"{self.kv_lora_rank}) has anchor_sampling alone"
            )
        return self

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.layout == "anchor_sampling" else self.block_size - 1


class DataSettings(Settings):
    """Conversations to learn from."""

    files: tuple[PathName, ...] = Field(
        min_length=1, description="token files (.npz), chat files (.jsonl) or folders of `paceline capture prompts`"
    )
    hold_out: CountOrZero = Field(
        1024, description="conversations at the end of each file that are never trained on, kept for evaluation"
    )
    max_length: Count = Field(512, ge=8, description="tokens of a conversation that are used; the rest is cut off")
    packed: Flag = Field(
        False, description="put several conversations into a row of max_length tokens; none sees another"
    )
    min_supervised: CountOrZero = Field(
        0,
        description="response tokens within max_length that a conversation needs to be trained on; 0 takes all, "
        "2 * block_size is a good choice",
    )
    template_date: Annotated[datetime.date | None, OrNone] = Field(
        None,
        description="day that a chat template is told which writes the date; unset is today",
    )
    features: Annotated[PathName | None, OrNone] = Field(
        None, description="folder of `paceline capture features`; unset runs the target beside the drafter"
    )

    @field_validator("files")
    @classmethod
    def _no_file_twice(cls, files: tuple[Path, ...]) -> tuple[Path, ...]:
        places = [file.resolve() for file in files]
        repeated = sorted({str(file) for file, place in zip(files, places, strict=True) if places.count(place) > 1})
        if repeated:
            raise ValueError(f"listed twice: {', '.join(repeated)}")
        return files


class OptimizerSettings(Settings):
    """AdamW with a warm-up, a flat middle and a decay at the end."""

    learning_rate: PositiveNumber = Field(1e-3, le=1.0, description="peak learning rate")
    warmup_share: Share = Field(0.04, description="share of the steps over which the rate rises from zero")
    decay_share: Share = Field(0.2, description="share of the steps over which the rate falls at the end")
    final_share: Share = Field(0.05, description="rate of the last step, as a share of the peak")
    weight_decay: NumberOrZero = Field(0.01, description="decoupled weight decay of the matrices")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="decay of AdamW's first and second moment")
    clip_norm: PositiveNumber = Field(1.0, description="largest norm of the whole gradient")

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if max(betas) >= 1.0:
            raise ValueError(f"{list(betas)} must both be below 1")
        return betas

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if self.warmup_share + self.decay_share > 1.0:
            raise ValueError(
                f"warmup_share {self.warmup_share} and decay_share {self.decay_share} exceed the whole run"
            )
        return self


class ScheduleSettings(Settings):
    """How much is learned, in which portions."""

    num_steps: Count = Field(description="optimizer steps of the whole run")
    batch_size: Count = Field(
        description="conversations, or packed rows, per step and accumulation part, over all ranks together"
    )
    num_anchors: Count = Field(description="draft blocks per row, a conversation or a packed row, and step")
    accumulation: Count = Field(1, description="parts that a step is split into to save memory")
    compiled: Literal["auto", "on", "off"] = Field(
        "auto", description="compile the target and the drafter for the device; auto does so on a GPU"
    )
    attention: Literal["auto", "dense", "flex"] = Field(
        "auto",
        description="how the blocks of a step attend: by dense masks, or by flex attention, which skips what no row "
        "sees and needs a GPU; auto takes what is faster at the sizes of the run",
    )


class ObjectiveSettings(Settings):
    """What the drafter is rewarded for."""

    loss: LossName | dict[LossName, PositiveNumber] = Field(
        "kl",
        description="kl follows the target's distribution, ce the token that follows in the data, l1 lowers the share "
        "of refused drafts when sampling; a table mixes them",
    )
    gamma: Annotated[PositiveNumber | None, OrNone] = Field(
        4.0, description='draft k of a block weighs exp(-(k-1)/gamma); "none" weighs all alike'
    )
    weighting: Literal["decay", "adaptive"] = Field(
        "decay",
        description="decay weighs drafts by gamma; adaptive by how far the drafter's own probabilities say that a "
        "block gets, for one more product with the output head per step",
    )
    chunk_rows: Count = Field(4096, description="rows whose logits exist at the same time")
    selector_weight: NumberOrZero = Field(1.0, description="dflash2: weight of the selector's loss beside the rest")
    confidence_weight: NumberOrZero = Field(
        1.0, description="dspark: weight of the confidence head's loss, which trains that head alone"
    )

    @field_validator("loss")
    @classmethod
    def _some_loss(cls, loss: str | dict[LossName, float]) -> str | dict[LossName, float]:
        if isinstance(loss, dict) and not loss:
            raise ValueError("an empty table rewards nothing; name kl, ce or l1")
        return loss

    @property
    def loss_weights(self) -> dict[str, float]:
        """The loss as weights per term, whether it was given as a name or as a table."""
        if isinstance(self.loss, dict):
            return {str(name): weight for name, weight in self.loss.items()}
        return {self.loss: 1.0}


class EvaluateSettings(Settings):
    """Held-out measurement during training."""

    every: Count = Field(200, description="steps between two evaluations; the last step is always evaluated")
    num_conversations: CountOrZero = Field(128, description="held-out conversations per evaluation; 0 is none")
    batch_size: Count = Field(16, description="conversations per evaluation pass")


class CheckpointSettings(Settings):
    """What is kept on disk during training."""

    every: Count = Field(500, description="steps between two checkpoints; the last step is always saved")
    keep: Count = Field(2, description="checkpoints kept; older ones are removed")
    export_every: CountOrZero = Field(
        0, description="steps between two exported drafter folders; 0 exports the last step alone"
    )


class TrackingSettings(Settings):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: Flag = Field(False, description="write event files for tensorboard into the run's folder")


class DistributedSettings(Settings):
    """How several processes, started by torchrun, share a run."""

    strategy: Literal["ddp", "fsdp"] = Field(
        "ddp", description="ddp keeps the whole drafter on every rank, fsdp shards weights and moments over them"
    )
    timeout_s: Count = Field(600, description="seconds after which a rank gives up waiting for the others")


class TrainRun(Settings):
    """A whole training run: from which data, which drafter, for which target, to which folder."""

    seed: Seed = Field(0, description="seed of the weights, the order of the data and the anchors")
    output: PathName = Field(description="folder of the run: settings, metrics, checkpoints and the finished drafter")
    device: DeviceName = Field("auto", description="auto, cpu, cuda or cuda:N")
    target: TargetSettings
    drafter: DrafterSettings
    data: DataSettings
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    schedule: ScheduleSettings
    objective: ObjectiveSettings = Field(default_factory=ObjectiveSettings)
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    tracking: TrackingSettings = Field(default_factory=TrackingSettings)
    distributed: DistributedSettings = Field(default_factory=DistributedSettings)

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        if self.data.max_length < 2 * self.drafter.block_size:
            raise ValueError(
                f"data.max_length {self.data.max_length} leaves no room for two blocks of drafter.block_size "
                f"{self.drafter.block_size}"
            )
        if self.drafter.family == "eagle3" and self.schedule.attention == "flex":
            raise ValueError(
                "schedule.attention is 'flex'; family 'eagle3' attends from one row per block, by dense masks alone"
            )
        held_out = self.data.hold_out * len(self.data.files)
        if self.evaluate.num_conversations > held_out:
            raise ValueError(
                f"evaluate.num_conversations {self.evaluate.num_conversations} exceeds the {held_out} that "
                f"data.hold_out {self.data.hold_out} keeps in {len(self.data.files)} file(s)"
            )
        return self
