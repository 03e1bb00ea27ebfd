"""From settings to a rank that is ready to decode: agree, load this rank's part, prepare the taps.

Nothing is read but configs and headers until all ranks have compared what they were started with: the target's config
and files, the cut, capture ids and their stream, and every size. Then each loads its part; one that fails makes all of
them leave.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

import paceline
from paceline.checkpoint.compatibility import check_fit, complete_contract
from paceline.checkpoint.contract import AuxHiddenStream, CaptureId, DrafterContract, TargetContract, capture_id
from paceline.checkpoint.dialects import read_drafter
from paceline.checkpoint.locate import locate_drafter, locate_target
from paceline.checkpoint.target_config import read_target_contract
from paceline.checkpoint.tokenizer import TextTokenizer, open_tokenizer
from paceline.distributed.decoding import Decoder, DecodeSizes
from paceline.distributed.drafting import Drafting
from paceline.distributed.mesh import Layout, Mesh
from paceline.distributed.sharded_weights import folder_digest, load_sharded_stage
from paceline.distributed.sharding import require_shares, share_of
from paceline.distributed.stage_pass import StagePass
from paceline.distributed.target_ends import answer, load_ends, others_answering
from paceline.distributed.tensor_decoding import TensorDecoder
from paceline.distributed.world import World
from paceline.errors import ConfigError
from paceline.models.capabilities import check_capture_ids
from paceline.models.layers import LinearMode, set_linear_mode
from paceline.models.loading import LoadedTarget, load_drafter, resolve_dtype, resolve_linear_mode
from paceline.models.targets.kimi_pipeline import stage_ranges
from paceline.ops.dispatch import HAS_TRITON

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeSettings:
    """What a run over ranks is started with, the same on all of them.

    Attributes:
        target: folder, `.gguf` file, hub name or alias.
        drafter: folder or hub name; None decodes plainly.
        num_stages: of the pipeline.
        borders: first layer of every stage but the first; None cuts evenly.
        tensor_size: ranks that share each layer.
        dtype: "auto", "bfloat16", "float16" or "float32".
        linear_mode: "auto" packs bf16 weights on CPUs that have the instructions, and on a GPU takes fused layers of a
            dense target that all ranks share; "row_invariant" makes tokens with drafts those without, to the last one.
        num_draft_tokens: proposals per step; None is what the drafter was trained for.
        aux_hidden_stream: feed the drafter another stream than it was trained on, to compare the two.
        num_places: requests at the same time.
        max_model_len: tokens that prompt and answer may hold together.
        prefill_chunk_size: prompt tokens of a request per pass.
        offline: never touch the network.
    """

    target: str
    drafter: str | None = None
    num_stages: int = 1
    borders: tuple[int, ...] | None = None
    tensor_size: int = 1
    dtype: str = "auto"
    linear_mode: LinearMode | Literal["auto"] = "auto"
    num_draft_tokens: int | None = None
    aux_hidden_stream: AuxHiddenStream | None = None
    num_places: int = 4
    max_model_len: int = 2048
    prefill_chunk_size: int = 32
    offline: bool = False


@dataclass(frozen=True)
class _Terms:
    """What follows from the settings and the files' configs, before a weight is read."""

    path: Path
    contract: TargetContract
    layout: Layout
    dtype: torch.dtype
    sizes: DecodeSizes
    capture_ids: tuple[CaptureId, ...]
    stream: AuxHiddenStream
    drafter_path: Path | None = None

    @property
    def shares_every_layer(self) -> bool:
        """Whether all ranks run every layer, so that each can run an engine of its own."""
        return self.layout.num_stages == 1 and self.layout.tensor_size > 1

    def facts(self, settings: DecodeSettings) -> dict[str, str]:
        """What must be alike on all ranks."""
        return {
            "the version of paceline": paceline.__version__,
            "the target's config": str(dataclasses.replace(self.contract, name="", origin="")),
            "the target's files": folder_digest(self.path),
            "the drafter's files": "none" if self.drafter_path is None else folder_digest(self.drafter_path),
            "the cut": f"{list(self.layout.borders)} with {self.layout.tensor_size} ranks per stage",
            "capture ids": str([int(capture) for capture in self.capture_ids]),
            "the stream": self.stream,
            "dtype": str(self.dtype).removeprefix("torch."),
            "linear mode": settings.linear_mode,
            "sizes": str(self.sizes),
        }


@dataclass(frozen=True)
class OpenTarget:
    """A rank that is ready.

    Attributes:
        decoder: runs requests; every rank asks it for the same.
        mesh: this rank's place.
        contract: of the whole target.
        tokenizer: of the target.
    """

    decoder: Decoder | TensorDecoder
    mesh: Mesh
    contract: TargetContract
    tokenizer: TextTokenizer

    def close(self) -> None:
        """Let go of what must not outlive the ranks' connections."""
        if isinstance(self.decoder, TensorDecoder):
            self.decoder.close()
        self.mesh.tensor.leave()


def open_target(world: World, settings: DecodeSettings) -> OpenTarget:
    """Load this rank's part of a target and, on the rank that decides, the drafter. A collective call.

    Args:
        world: all ranks.
        settings: the same on all of them.
    Raises:
        DisagreementError: ranks were not started alike; on every rank, and before a weight is read.
        CompatibilityError: target, drafter and taps do not fit each other.
        ConfigError: the target cannot be cut or shared out like that, or not by so many processes.
        CheckpointError: a file is missing, damaged or incomplete.
        OtherRankFailedError: another rank failed; it raises its own error.
    """
    terms = world.together(lambda: _terms(world, settings))
    world.agree(lambda: terms.facts(settings))
    mesh = Mesh.of(world, terms.layout, terms.contract.num_layers)
    stage_pass = world.together(lambda: _load(mesh, terms, settings))
    tokenizer = world.together(lambda: open_tokenizer(terms.path))
    if terms.shares_every_layer:
        tensor = world.together(lambda: _tensor_decoder(mesh, terms, settings, stage_pass, tokenizer))
        return OpenTarget(tensor, mesh, terms.contract, tokenizer)
    drafting = _load_drafting(mesh, terms, settings, stage_pass, tokenizer)
    decoder = Decoder(mesh, terms.contract, stage_pass, terms.sizes, drafting)
    return OpenTarget(decoder, mesh, terms.contract, tokenizer)


def _terms(world: World, settings: DecodeSettings) -> _Terms:
    path = locate_target(settings.target, offline=settings.offline)
    contract = read_target_contract(path, settings.target)
    layout = Layout.even(contract.num_layers, settings.num_stages, settings.tensor_size)
    if settings.borders is not None:
        layout = Layout(settings.borders, settings.tensor_size)
    stage_ranges(contract.num_layers, layout.borders)
    if settings.tensor_size < 1:
        raise ConfigError(f"{settings.tensor_size} ranks per stage were asked for; it takes one at least")
    require_shares(contract, settings.tensor_size)
    layout.require_size(world.size)
    sizes = DecodeSizes(settings.num_places, settings.max_model_len, settings.prefill_chunk_size)
    if settings.max_model_len > contract.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {settings.max_model_len}; the target has positions for "
            f"{contract.max_position_embeddings}",
            origin={"target": contract.origin},
        )
    capture_ids: tuple[CaptureId, ...] = ()
    stream: AuxHiddenStream = settings.aux_hidden_stream or "prefix"
    drafter_path: Path | None = None
    if settings.drafter is not None:
        drafter_path = locate_drafter(settings.drafter, offline=settings.offline)
        drafter = _drafter_contract(settings, contract)
        capture_ids = tuple(capture_id(layer) for layer in drafter.target_layer_ids)
        stream = settings.aux_hidden_stream or drafter.aux_hidden_stream
        check_capture_ids(contract, capture_ids, stream)
        num_drafts = settings.num_draft_tokens or drafter.num_draft_tokens
        sizes = dataclasses.replace(sizes, num_draft_tokens=num_drafts)
    dtype = resolve_dtype(settings.dtype, world.device)
    return _Terms(path, contract, layout, dtype, sizes, capture_ids, stream, drafter_path)


def _drafter_contract(settings: DecodeSettings, contract: TargetContract) -> DrafterContract:
    assert settings.drafter is not None
    files = read_drafter(locate_drafter(settings.drafter, offline=settings.offline))
    drafter = complete_contract(files.contract, contract)
    check_fit(drafter, contract)
    return drafter


def _load(mesh: Mesh, terms: _Terms, settings: DecodeSettings) -> StagePass:
    start, end = mesh.layers
    stage = load_sharded_stage(
        terms.contract, terms.path, start, end, mesh.tensor, dtype=terms.dtype, device=mesh.world.device
    )
    set_linear_mode(stage, _mode(terms, settings, mesh))
    stage_pass = StagePass(mesh, terms.contract, stage)
    if terms.capture_ids:
        stage_pass.prepare_taps(terms.capture_ids, terms.stream)
    _log.info(
        "rank %d: layers %d to %d, part %d of %d", mesh.world.rank, start, end - 1, mesh.tensor.index, mesh.tensor.size
    )
    return stage_pass


def _tensor_decoder(
    mesh: Mesh, terms: _Terms, settings: DecodeSettings, stage_pass: StagePass, tokenizer: TextTokenizer
) -> TensorDecoder:
    """An engine over this rank's share; the ranks load the drafter side by side and replay its fingerprint together."""
    share, mode = share_of(terms.contract, mesh.tensor.size), _mode(terms, settings, mesh)
    target = LoadedTarget(cast(Any, stage_pass.stage), share, tokenizer, mode)
    drafter = None
    if settings.drafter is not None:
        drafter = load_drafter(
            settings.drafter,
            target,
            num_draft_tokens=settings.num_draft_tokens,
            offline=settings.offline,
            aux_hidden_stream=settings.aux_hidden_stream,
        )
    return TensorDecoder(mesh, terms.contract, target, terms.sizes, drafter)


def _load_drafting(
    mesh: Mesh, terms: _Terms, settings: DecodeSettings, stage_pass: StagePass, tokenizer: TextTokenizer
) -> Drafting | None:
    """The drafter, on the decider; all other ranks run what its fingerprint is compared with."""
    if settings.drafter is None:
        return None
    failure: Exception | None = None
    drafting: list[Drafting] = []
    if not mesh.is_decider:
        answer(mesh, stage_pass, mesh.world.device)
    else:
        with others_answering(mesh):
            try:
                drafting.append(_drafting(mesh, terms, settings, stage_pass, tokenizer))
            except Exception as error:  # raised below, where the others learn of it
                failure = error

    def settle() -> Drafting | None:
        if failure is not None:
            raise failure
        stage_pass.prepare_taps(terms.capture_ids, terms.stream)  # again: the replay tapped every layer
        return drafting[0] if drafting else None

    return mesh.world.together(settle)


def _drafting(
    mesh: Mesh, terms: _Terms, settings: DecodeSettings, stage_pass: StagePass, tokenizer: TextTokenizer
) -> Drafting:
    assert settings.drafter is not None
    mode = _mode(terms, settings, mesh)
    ends = load_ends(terms.contract, terms.path, mesh, stage_pass, mode)
    target = LoadedTarget(cast(Any, ends), terms.contract, tokenizer, mode)
    drafter = load_drafter(
        settings.drafter,
        target,
        num_draft_tokens=settings.num_draft_tokens,
        offline=settings.offline,
        aux_hidden_stream=settings.aux_hidden_stream,
    )
    return Drafting(
        target,
        drafter,
        num_places=terms.sizes.num_places,
        max_model_len=terms.sizes.max_model_len,
        max_rows=terms.sizes.max_rows,
    )


def _mode(terms: _Terms, settings: DecodeSettings, mesh: Mesh) -> LinearMode:
    like = torch.empty(1, 1, dtype=terms.dtype, device=mesh.world.device)
    asked, is_dense = settings.linear_mode, terms.contract.kimi is None
    if terms.shares_every_layer and is_dense:
        could_be = asked == "auto" and HAS_TRITON and like.device.type == "cuda" and terms.dtype == torch.bfloat16
        if asked == "fused" or could_be:
            return "fused"
    return resolve_linear_mode(asked, like)
