"""The DSpark loss and the acceptance metrics, as numerators that ranks may add up.

Paper, training section: per prediction k (1-based) with draft and target distributions p_d and p_t,
    ce * -log p_d(data token) + l1 * ||p_d - p_t||_1 + confidence * BCE(c_k, a_k),   a_k = 1 - ||p_d - p_t||_1 / 2,
weighted by exp(-(k-1)/gamma) and divided by the sum of these weights over the whole global batch.
a_k is the chance that the target accepts the prediction under rejection sampling, so both distributions
are over the target's whole vocabulary, also when the draft's is reduced (p_d is 0 outside).

`LossWeights` also holds what speculators 0.9 does instead, so that the two can be compared: CE of the
target's likeliest token, a target distribution renormalised over the draft's vocabulary (which overstates
acceptance), and a denominator that counts labels. Its `tv` is half of L1: weight 0.9 there is 0.45 here.

Legend: A anchors, B predictions of a block, N labelled predictions, D hidden size, U distinct target positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
import torch.nn.functional as F
from speculators.models.dspark import DSparkDraftModel

from stages.draft.anchors import label_mask
from stages.draft.batch import PackedBatch
from stages.draft.model import backbone, block_positions, confidence_logits, num_predictions
from stages.draft.vocab import vocab_ids
from stages.draft.vocab_loss import Factors, Labels, Terms, VocabHead, vocab_loss
from stages.target import TargetHead


@dataclass(frozen=True)
class LossWeights:
    """Factors of the three terms, the decay of later positions, and conventions (the paper's by default)."""

    ce: float
    l1: float
    confidence: float
    decay_gamma: float
    detach_confidence: bool = False
    ce_label: Literal["data", "target"] = "data"
    target_support: Literal["full", "draft"] = "full"
    denominator: Literal["weights", "labels"] = "weights"


@dataclass(frozen=True)
class LossSums:
    """Sums over labelled predictions; fp32 tensors, all additive over documents, ranks and batches.

    `total`, `ce`, `l1`, `confidence` are weighted numerators; only `total` carries gradients and the
    loss factors. `weight` is the denominator of all four: the sum of the predictions' weights, or their
    number. `labels_B` counts labels by position; `accept_rate_B`, `greedy_B` (argmax equals the target's)
    and `accuracy_B` (argmax equals the data token) are sums over them. `whole_blocks` counts blocks with
    all labels; `accepted` and `greedy_accepted` sum their expected and greedy acceptance lengths, bonus
    token included.
    """

    total: torch.Tensor
    ce: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor
    weight: torch.Tensor
    labels_B: torch.Tensor
    accept_rate_B: torch.Tensor
    greedy_B: torch.Tensor
    accuracy_B: torch.Tensor
    confidence_error: torch.Tensor
    whole_blocks: torch.Tensor
    accepted: torch.Tensor
    greedy_accepted: torch.Tensor

    @classmethod
    def zero(cls, num_predictions: int, device: torch.device) -> LossSums:
        """Sums over nothing: what a rank without anchors contributes."""
        sizes = [num_predictions if f.name.endswith("_B") else () for f in fields(cls)]
        return cls(*(torch.zeros(size, device=device) for size in sizes))

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def detached(self) -> LossSums:
        """The same sums without the graph behind `total`."""
        return replace(self, total=self.total.detach())

    def flat(self) -> torch.Tensor:
        """All sums as one detached fp64 vector, for one all-reduce."""
        return torch.cat([getattr(self, f.name).detach().double().view(-1) for f in fields(self)])

    @classmethod
    def from_flat(cls, values: torch.Tensor, num_predictions: int) -> LossSums:
        """The inverse of `flat`."""
        sizes = [num_predictions if f.name.endswith("_B") else 1 for f in fields(cls)]
        parts = values.split(sizes)
        return cls(*(part if f.name.endswith("_B") else part[0] for f, part in zip(fields(cls), parts, strict=True)))


def position_weights(position_N: torch.Tensor, decay_gamma: float) -> torch.Tensor:
    """exp(-(k-1)/gamma), fp32 [N], of predictions at 0-based positions k-1 of their blocks."""
    return torch.exp(-position_N / decay_gamma)


def draft_loss(
    model: DSparkDraftModel, head: TargetHead, batch: PackedBatch, anchors_A: torch.Tensor, weights: LossWeights
) -> LossSums:
    """Numerators and metrics of all blocks of `batch`; zeros when no prediction has a label."""
    predictions = num_predictions(model)
    labels_AB = label_mask(batch, anchors_A, predictions)
    if not labels_AB.any():
        return LossSums.zero(predictions, anchors_A.device)
    hidden_ABD = backbone(model, batch, anchors_A)

    # Predictions without a label meet no vocabulary; the others are sorted by the target position they ask for.
    at_X = block_positions(batch, anchors_A, predictions).flatten()
    flat_N = labels_AB.flatten().nonzero()[:, 0]
    flat_N = flat_N[at_X[flat_N].argsort(stable=True)]
    at_N = at_X[flat_N]
    at_U, row_N = at_N.unique_consecutive(return_inverse=True)
    hidden_ND = hidden_ABD.flatten(0, 1).index_select(0, flat_N)
    embedded_NR = model.markov_head.prev_embeddings(batch.input_ids_T[at_N])
    total, terms = vocab_loss(
        hidden_ND,
        embedded_NR,
        model.markov_head.markov_w2.weight,
        VocabHead(model.lm_head.weight, head, vocab_ids(model), weights.target_support == "draft"),
        Labels(
            batch.final_TD[at_U],
            row_N,
            batch.input_ids_T[at_N + 1],
            position_weights(flat_N % predictions, weights.decay_gamma),
        ),
        Factors(weights.ce, weights.l1, weights.ce_label == "data"),
    )
    confidence_N = confidence_logits(model, hidden_ND, embedded_NR, detach=weights.detach_confidence)
    return block_sums(total, terms, confidence_N, flat_N, labels_AB, weights)


def block_sums(
    total: torch.Tensor,
    terms: Terms,
    confidence_N: torch.Tensor | None,
    flat_N: torch.Tensor,
    labels_AB: torch.Tensor,
    weights: LossWeights,
) -> LossSums:
    """All sums, from the terms of the labelled predictions, whose flat indices into [A, B] are `flat_N`.

    `total` is what CE and L1 contribute; the confidence term (logits `confidence_N`) is added to it.
    """
    weights_N = position_weights(flat_N % labels_AB.shape[1], weights.decay_gamma)
    accept_N = (1.0 - 0.5 * terms.l1_N).clamp(0.0, 1.0)  # rounding alone can leave the range
    confidence = error = torch.zeros((), device=labels_AB.device)
    if confidence_N is not None:
        bce_N = F.binary_cross_entropy_with_logits(confidence_N.float(), accept_N, reduction="none")
        confidence = (bce_N * weights_N).sum()
        error = (confidence_N.detach().float().sigmoid() - accept_N).abs().sum()
        if weights.confidence:
            total = total + weights.confidence * confidence

    def blocks(values_N: torch.Tensor) -> torch.Tensor:
        values_AB = torch.zeros(labels_AB.shape, device=labels_AB.device)
        values_AB.view(-1)[flat_N] = values_N.float()
        return values_AB

    # a likeliest token outside the draft's vocabulary equals no guess
    greedy_AB, accept_AB = blocks(terms.guess_N == terms.best_N), blocks(accept_N)
    whole_A = labels_AB.all(dim=1)
    return LossSums(
        total=total,
        ce=(terms.ce_N * weights_N).sum(),
        l1=(terms.l1_N * weights_N).sum(),
        confidence=confidence.detach(),
        weight=weights_N.sum() if weights.denominator == "weights" else torch.ones_like(weights_N).sum(),
        labels_B=labels_AB.sum(dim=0).float(),
        accept_rate_B=accept_AB.sum(dim=0),
        greedy_B=greedy_AB.sum(dim=0),
        accuracy_B=blocks(terms.guess_N == terms.data_N).sum(dim=0),
        confidence_error=error,
        whole_blocks=whole_A.sum().float(),
        accepted=_lengths(accept_AB)[whole_A].sum(),
        greedy_accepted=_lengths(greedy_AB)[whole_A].sum(),
    )


def metrics(sums: LossSums, weights: LossWeights) -> Mapping[str, float]:
    """Means of pooled sums. Acceptance lengths include the bonus token; means over nothing are left out."""
    values: dict[str, float] = {}
    if (weight := float(sums.weight)) > 0:
        ce, l1, confidence = (float(value) / weight for value in (sums.ce, sums.l1, sums.confidence))
        loss = weights.ce * ce + weights.l1 * l1 + weights.confidence * confidence
        values |= {"loss": loss, "loss_ce": ce, "loss_l1": l1, "loss_confidence": confidence}
        values["confidence_abs_error"] = float(sums.confidence_error) / float(sums.labels_B.sum())
    if (blocks := float(sums.whole_blocks)) > 0:
        values["acceptance_length"] = float(sums.accepted) / blocks
        values["greedy_acceptance_length"] = float(sums.greedy_accepted) / blocks
    for k, labels in enumerate(sums.labels_B.tolist()):
        if labels > 0:
            values[f"accept_rate_{k + 1}"] = float(sums.accept_rate_B[k]) / labels
            values[f"greedy_accept_rate_{k + 1}"] = float(sums.greedy_B[k]) / labels
            values[f"accuracy_{k + 1}"] = float(sums.accuracy_B[k]) / labels
    return values


def _lengths(accept_AB: torch.Tensor) -> torch.Tensor:
    """1 + sum_k prod_{i<=k} accept_i, the expected tokens of a round with its bonus token, [A]."""
    return 1.0 + accept_AB.cumprod(dim=1).sum(dim=1)
