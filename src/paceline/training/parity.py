"""Does training draft what serving drafts? The same anchors of the same texts, once in one pass, once step by step.

A drafter that is served otherwise than it was trained still gives right text; only its acceptance falls, and nobody
sees why. So both ways are compared stage by stage: labels and positions, the target's taps, the context that the
drafter makes of them, the scores of every draft, the ids chosen. The first stage that differs is the cause; what comes
behind it differs because of it.

A anchors, S tokens, K drafts, D width, V scored ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.errors import CompatibilityError
from paceline.models.building import empty_drafter
from paceline.models.drafters.dflash2 import DFlash2Drafter
from paceline.models.drafters.dspark import DSparkDrafter
from paceline.models.drafters.proposal import DraftSampling
from paceline.models.drafters.table import Drafter
from paceline.models.layers import set_linear_mode
from paceline.models.loading import LoadedDrafter, LoadedTarget
from paceline.training.anchors import Blocks, all_anchors, make_blocks
from paceline.training.data import Batch
from paceline.training.drafting import states_after_labels
from paceline.training.dspark import markov_codes
from paceline.training.features import TargetFeatures
from paceline.training.parity_stages import BothWays, KnownText, Parity, judge
from paceline.training.selector import SelectorRows, selector_loss
from paceline.training.serving_pass import ServedText, ServingPass


def training_drafter(served: LoadedDrafter) -> Drafter:
    """The same weights as training holds them: nothing stacked, plain products."""
    model = served.model
    parameters = model.checkpoint_parameters()
    weight = next(iter(parameters.values()))
    copy = empty_drafter(served.contract, weight.dtype, weight.device)
    copy.vocabulary.embed_tokens = copy.vocabulary.embed_tokens if model.vocabulary.embed_tokens is not None else None
    copy.vocabulary.lm_head = copy.vocabulary.lm_head if model.vocabulary.lm_head is not None else None
    for name, parameter in copy.checkpoint_parameters().items():
        parameter.copy_(parameters[name])
    copy.vocabulary.set_tables(model.vocabulary.target_ids_V, model.vocabulary.mask_embedding_D)
    return copy


@torch.no_grad()
def compare(
    target: LoadedTarget,
    served: LoadedDrafter,
    texts: Sequence[KnownText],
    *,
    trained: Drafter | None = None,
    num_anchors: int = 16,
    are_own_texts: bool = True,
) -> Parity:
    """Draft every text both ways.

    Args:
        target: as it serves; training's passes run it with plain products, as training does.
        served: prepared for serving.
        texts: each with at least two tokens behind its prompt.
        trained: the drafter as training holds it; by default a copy of the served weights.
        num_anchors: of each text, spread over it.
        are_own_texts: the target wrote the answers greedily, so that its states must foretell them.
    Raises:
        CompatibilityError: both drafters are of different dtypes, so that nothing else could be told from rounding; or
            training has no such drafter.
    """
    windows = [window for window in served.contract.layer_windows if window is not None]
    if windows and served.contract.family == "eagle3":
        raise CompatibilityError(
            f"the drafter's layers see {', '.join(map(str, windows))} tokens; an EAGLE-3 drafter is trained without "
            "windows here, so there is nothing that its serving could be held against",
            origin={"drafter": served.contract.origin},
            hint="`paceline check`, which scores the drafter as it is served",
        )
    trained = training_drafter(served) if trained is None else trained
    dtypes = [next(model.parameters()).dtype for model in (trained, served.model)]
    if dtypes[0] != dtypes[1]:
        raise CompatibilityError(
            f"the drafter is {dtypes[0]} in training and {dtypes[1]} in serving; their difference would be rounding",
            hint="both in one dtype",
        )
    served = replace(served, num_draft_tokens=served.contract.num_draft_tokens)  # training drafts no shorter blocks
    serve = ServingPass(target, served, max_tokens=max(len(text.ids) for text in texts))
    pairs = []
    for text in texts:
        anchors_A = _chosen_anchors(text, num_anchors, target.model.norm.weight.device)
        pairs.append(_both(target, served, trained, serve, text, anchors_A))
    return judge(target, served, trained, pairs, dtypes[0], are_own_texts)


def _chosen_anchors(text: KnownText, num_anchors: int, device: torch.device) -> Tensor:
    """int64 [1, A], spread over the answer; the first and the last candidate are among them."""
    position_S = torch.arange(len(text.ids), device=device)
    anchors_BA, _ = all_anchors((position_S >= text.num_prompt_tokens)[None])
    count = anchors_BA.shape[1]
    if count <= num_anchors:
        return anchors_BA
    spread = torch.linspace(0, count - 1, num_anchors, device=device).round().long()
    return anchors_BA[:, spread]


def _both(
    target: LoadedTarget,
    served: LoadedDrafter,
    trained: Drafter,
    serve: ServingPass,
    text: KnownText,
    anchors_BA: Tensor,
) -> BothWays:
    ids_BS = torch.tensor([text.ids], device=anchors_BA.device)
    supervised_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device)[None] >= text.num_prompt_tokens
    found = serve(text.ids, anchors_BA[0].tolist())
    dtype = target.model.norm.weight.dtype
    anchor_ids_A = ids_BS[0, anchors_BA[0]]
    served_scores_AKV, margin_AK = _served_scores(target, served.model, found, anchor_ids_A)
    set_linear_mode(target.model, "plain")
    try:
        batch = Batch.of_rows(ids_BS, supervised_BS)
        blocks = make_blocks(
            ids_BS, supervised_BS, anchors_BA, torch.ones_like(anchors_BA).bool(), served.num_draft_tokens + 1
        )
        lender = TargetFeatures(target.model, served.contract.target_layer_ids, served.contract.aux_hidden_stream)
        features = lender(batch)
        # Serving reads its own drafts; so that both read the same, training is told that they were right.
        told = replace(blocks, labels_BAQ=torch.cat((blocks.labels_BAQ[..., :1], found.ids_AK[None]), dim=-1))
        hidden_AKD = states_after_labels(trained, lender, features, batch, told)[0].to(dtype)
        scores_AKV = trained.logits(hidden_AKD, lender)
        if isinstance(trained, DSparkDrafter) and trained.markov_head is not None:
            codes_AKR = markov_codes(trained.markov_head, told.labels_BAQ[..., :-1], hidden_AKD[None])[0]
            scores_AKV = scores_AKV.float() + trained.markov_head.markov_w2(codes_AKR).float()
        alike_AK = _chosen_alike(trained, hidden_AKD, scores_AKV, told, lender.head_VD)
    finally:
        set_linear_mode(target.model, target.linear_mode)
    return BothWays(text, blocks, features, found, served_scores_AKV, margin_AK, scores_AKV, alike_AK)


def _served_scores(
    target: LoadedTarget, drafter: Drafter, found: ServedText, anchor_ids_A: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores behind the served drafts, [A, K, V]; and the margins of `BothWays`, [A, K]."""
    hidden_AKD = found.hidden_AKD.to(target.model.norm.weight.dtype)
    scores_AKV = drafter.logits(hidden_AKD, target.model)
    if isinstance(drafter, DSparkDrafter) and drafter.markov_head is not None:
        previous_A, state, rows = anchor_ids_A, None, []
        for k in range(scores_AKV.shape[1]):
            bias_AV, state = drafter.markov_head.bias(previous_A, hidden_AKD[:, k], state)
            rows.append(scores_AKV[:, k].float() + bias_AV)
            previous_A = found.ids_AK[:, k]
        scores_AKV = torch.stack(rows, dim=1)
    chosen_from, above_others_AK = scores_AKV, torch.full(scores_AKV.shape[:2], torch.inf, device=scores_AKV.device)
    if isinstance(drafter, DFlash2Drafter):
        nothing_A = torch.zeros_like(anchor_ids_A)
        drawn = DraftSampling("probabilistic", nothing_A.float(), nothing_A, nothing_A, nothing_A)
        log_q = drafter.propose(hidden_AKD, scores_AKV, anchor_ids_A, drawn).log_q_BKC
        assert log_q is not None, "a probabilistic proposal has them"
        chosen_from = log_q
        if drafter.num_candidates < scores_AKV.shape[-1]:
            draft_AK1 = found.ids_AK.unsqueeze(-1)
            best_left_out_AK = scores_AKV.float().topk(drafter.num_candidates + 1, dim=-1).values[..., -1]
            above_others_AK = scores_AKV.float().gather(-1, draft_AK1).squeeze(-1) - best_left_out_AK
    best_two = chosen_from.float().topk(2, dim=-1).values
    return scores_AKV, torch.minimum(best_two[..., 0] - best_two[..., 1], above_others_AK)


def _chosen_alike(trained: Drafter, hidden_AKD: Tensor, scores_AKV: Tensor, told: Blocks, head_VD: Tensor) -> Tensor:
    """bool [A, K]: whether training would choose the served draft, by the rule that its objective scores by."""
    wanted_AK = told.labels_BAQ[0, :, 1:]
    if not isinstance(trained, DFlash2Drafter):
        return trained.vocabulary.to_target_ids(scores_AKV.argmax(-1)).eq(wanted_AK)
    rows = SelectorRows(
        hidden_AKD.flatten(0, 1),
        None,
        wanted_AK.flatten(),
        told.labels_BAQ[0, :, :-1].flatten(),
        scores_AKV.topk(trained.candidate_selector.top_k, dim=-1).indices.flatten(0, 1),
        torch.ones(wanted_AK.numel(), device=wanted_AK.device),
    )
    _, is_right = selector_loss(trained.candidate_selector, rows, head_VD, kl=0.0, ce=1.0)
    return is_right.view(wanted_AK.shape)
