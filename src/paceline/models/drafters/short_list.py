"""A drafter that drafts from some of the vocabulary: its output head, most of what a small drafter reads, gets short.

Rare ids are hardly ever drafted right, and whatever is drafted, the target judges it over all ids: the output stays
what it was. Proposals hold target ids. Source: arXiv 2502.14856, for the idea.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor, nn

from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.table import Drafter
from paceline.models.targets.target import Target

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class ShortList:
    """The ids that are drafted.

    Attributes:
        ids_V: int64 target ids, ascending.
        coverage: share of the counted tokens that are among them.
    """

    ids_V: Tensor
    coverage: float


def shortened(drafter: Drafter, short_list: ShortList, target: Target) -> Drafter:
    """The same drafter for fewer ids: rows of its head and of a DSpark's Markov table are copied, all else is shared.

    Args:
        drafter: prepared for serving; its draft ids are target ids.
        short_list: what it shall draft.
        target: lends the head where the drafter has none of its own.
    """
    short = _twin(drafter)
    short.contract = replace(drafter.contract, draft_vocab_size=len(short_list.ids_V))
    short.vocabulary = drafter.vocabulary.shortened(short_list.ids_V, target.lm_head)
    if isinstance(short, DSparkDrafter) and short.markov_head is not None:
        markov_head = _twin(short.markov_head)
        markov_head.markov_w2 = markov_head.markov_w2.some_outputs(short_list.ids_V)
        short.markov_head = markov_head
    return short


def _twin(module: Module) -> Module:
    """A module of its own whose parts are those of another; parts that are then replaced stay in the other."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
