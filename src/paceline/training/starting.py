"""The drafter that a run starts from: a stored one, or random layers and a head that starts as the target's."""

from __future__ import annotations

import logging

import torch

from paceline.checkpoint.contract import DrafterContract
from paceline.configuration.run import TrainRun
from paceline.models.building import empty_drafter, initialise_drafter
from paceline.models.drafters.eagle3 import Eagle3Drafter
from paceline.models.drafters.table import Drafter
from paceline.models.loading import LoadedTarget
from paceline.training.continuing import continued_drafter, require_apart
from paceline.training.data import Conversations
from paceline.training.vocabulary import most_frequent_ids, require_coverage, vocabulary_of

_log = logging.getLogger(__name__)


def starting_drafter(
    run: TrainRun, contract: DrafterContract, target: LoadedTarget, train: Conversations, device: torch.device
) -> Drafter:
    """A drafter in float32, the same on every device, untrained unless the run goes on from another.

    Args:
        run: seed, the folder to go on from, and the least coverage of a reduced vocabulary.
        contract: of the drafter.
        target: whose head an own head starts as.
        train: conversations, whose response tokens decide which ids are drafted.
        device: where it shall be.
    Raises:
        CheckpointError: what the run would go on from cannot be read.
        ConfigError: that is of another shape; or the ids that are drafted cover too little of the data.
    """
    if run.drafter.start_from is not None:
        require_apart(run.output, run.drafter.start_from)
        drafter = continued_drafter(run.drafter.start_from, contract, target.contract)
        if drafter.vocabulary.target_ids_V is not None:
            ids_V = drafter.vocabulary.target_ids_V
            has = vocabulary_of(ids_V, train, vocab_size=contract.target_vocab_size)
            require_coverage(has, run.drafter.min_vocab_coverage)
        _log.info("going on from %s", run.drafter.start_from)
        return drafter.to(device)
    if contract.family != "eagle3":
        return initialise_drafter(contract, device, seed=run.seed)
    drafter = _random_eagle3(contract, run.seed)
    head_VD = target.model.lm_head.weight.detach().float().cpu()
    if contract.has_vocabulary_map:
        vocabulary = most_frequent_ids(
            train,
            contract.draft_vocab_size,
            vocab_size=contract.target_vocab_size,
            always=target.contract.stop_token_ids,
        )
        _log.info(
            "%d of %d ids are drafted; they cover %.2f %% of the response tokens",
            contract.draft_vocab_size,
            contract.target_vocab_size,
            100 * vocabulary.coverage,
        )
        require_coverage(vocabulary, run.drafter.min_vocab_coverage)
        drafter.vocabulary.set_tables(vocabulary.target_ids_V, None)
        head_VD = head_VD[vocabulary.target_ids_V]
    if drafter.vocabulary.lm_head is not None:
        with torch.no_grad():
            drafter.vocabulary.lm_head.weight.copy_(head_VD)
    return drafter.requires_grad_(True).to(device)


def _random_eagle3(contract: DrafterContract, seed: int) -> Eagle3Drafter:
    """Matrices at N(0, 0.02), gains at 1, biases at 0."""
    drafter = empty_drafter(contract, torch.float32, torch.device("cpu"))
    assert isinstance(drafter, Eagle3Drafter), "the table of families says so"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return drafter
