"""The DSpark loss and the acceptance metrics, as numerators that ranks may add up.

Paper, training section: per prediction k (1-based) with draft and target distributions p_d and p_t,
    ce * -log p_d(data token) + l1 * ||p_d - p_t||_1 + confidence * BCE(c_k, a_k),   a_k = 1 - ||p_d - p_t||_1 / 2,
weighted by exp(-(k-1)/gamma) and divided by the sum of these weights over the whole global batch.
a_k is the chance that the target accepts the prediction under rejection sampling (full vocabulary).

Legend: A anchors, B predictions of a block, D hidden size, V vocabulary, U distinct target positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from speculators.models.dspark import DSparkDraftModel
from torch.utils.checkpoint import checkpoint

from stages.draft.anchors import label_mask
from stages.draft.batch import PackedBatch
from stages.draft.model import backbone, block_positions, heads, num_predictions
from stages.target import TargetHead

# Logits held at once, in elements: a few fp32 tensors of this size (256 MiB each) live at a time.
# Larger batches go through the heads in pieces that are computed again in the backward pass.
MAX_LOGITS = 1 << 26


@dataclass(frozen=True)
class LossWeights:
    """Factors of the three terms and the decay of later positions."""

    ce: float
    l1: float
    confidence: float
    decay_gamma: float
    detach_confidence: bool = False


@dataclass(frozen=True)
class LossSums:
    """Sums over labelled predictions; fp32 tensors, all additive over documents, ranks and batches.

    `total`, `ce`, `l1`, `confidence` are weighted numerators; only `total` carries gradients and the
    loss factors. `weight` is the denominator of all four. `labels_B` counts labels by position;
    `accept_rate_B`, `greedy_B` (argmax equals the target's) and `accuracy_B` (argmax equals the data
    token) are sums over them. `whole_blocks` counts blocks with all labels; `accepted` and
    `greedy_accepted` sum their expected and greedy acceptance lengths, bonus token included.
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


def position_weights(num_predictions: int, decay_gamma: float, device: torch.device) -> torch.Tensor:
    """exp(-(k-1)/gamma) for k = 1 … B, fp32 [B]."""
    return torch.exp(-torch.arange(num_predictions, device=device) / decay_gamma)


def draft_loss(
    model: DSparkDraftModel, head: TargetHead, batch: PackedBatch, anchors_A: torch.Tensor, weights: LossWeights
) -> LossSums:
    """Numerators and metrics of all blocks of `batch`; zeros when there is no anchor."""
    predictions = num_predictions(model)
    if len(anchors_A) == 0:
        return LossSums.zero(predictions, anchors_A.device)
    hidden_ABD = backbone(model, batch, anchors_A)
    rows = max(1, MAX_LOGITS // (predictions * head.lm_head_VD.shape[0]))
    if len(anchors_A) <= rows:
        return _heads_loss(model, head, batch, anchors_A, hidden_ABD, weights)
    sums = LossSums.zero(predictions, anchors_A.device)
    for piece_A, hidden in zip(anchors_A.split(rows), hidden_ABD.split(rows), strict=True):
        sums = sums + checkpoint(_heads_loss, model, head, batch, piece_A, hidden, weights, use_reentrant=False)
    return sums


def _heads_loss(
    model: DSparkDraftModel,
    head: TargetHead,
    batch: PackedBatch,
    anchors_A: torch.Tensor,
    hidden_ABD: torch.Tensor,
    weights: LossWeights,
) -> LossSums:
    predictions = num_predictions(model)
    at_AB = block_positions(batch, anchors_A, predictions)
    output = heads(model, hidden_ABD, batch.input_ids_T[at_AB], detach_confidence=weights.detach_confidence)
    with torch.no_grad():  # overlapping blocks ask for the same position: each goes through the LM head once
        distinct_U, inverse = torch.unique(at_AB, return_inverse=True)
        target_UV = head.logits(batch.final_TD[distinct_U]).softmax(dim=-1)
    data_AB = batch.input_ids_T[block_positions(batch, anchors_A + 1, predictions)]
    labels_AB = label_mask(batch, anchors_A, predictions)
    return block_loss(output.logits_ABV, target_UV[inverse], output.confidence_AB, data_AB, labels_AB, weights)


def block_loss(
    logits_ABV: torch.Tensor,
    target_ABV: torch.Tensor,
    confidence_AB: torch.Tensor | None,
    data_AB: torch.Tensor,
    labels_AB: torch.Tensor,
    weights: LossWeights,
) -> LossSums:
    """The loss from draft logits, target probabilities, confidence logits, data tokens and label mask."""
    log_draft_ABV = logits_ABV.float().log_softmax(dim=-1)
    ce_AB = -log_draft_ABV.gather(-1, data_AB[..., None])[..., 0]
    l1_AB = (log_draft_ABV.exp() - target_ABV).abs().sum(dim=-1)
    accept_AB = (1.0 - 0.5 * l1_AB.detach()).clamp(0.0, 1.0)  # rounding alone can leave the range
    weights_AB = labels_AB * position_weights(labels_AB.shape[1], weights.decay_gamma, labels_AB.device)

    ce, l1 = (ce_AB * weights_AB).sum(), (l1_AB * weights_AB).sum()
    total = weights.ce * ce + weights.l1 * l1
    confidence = error = torch.zeros((), device=logits_ABV.device)
    if confidence_AB is not None:
        bce_AB = F.binary_cross_entropy_with_logits(confidence_AB.float(), accept_AB, reduction="none")
        confidence = (bce_AB * weights_AB).sum()
        error = ((confidence_AB.detach().float().sigmoid() - accept_AB).abs() * labels_AB).sum()
        total = total + weights.confidence * confidence

    guess_AB, best_AB = logits_ABV.argmax(dim=-1), target_ABV.argmax(dim=-1)
    greedy_AB, correct_AB = (guess_AB == best_AB) & labels_AB, (guess_AB == data_AB) & labels_AB
    whole_A = labels_AB.all(dim=1)
    return LossSums(
        total=total,
        ce=ce.detach(),
        l1=l1.detach(),
        confidence=confidence.detach(),
        weight=weights_AB.sum(),
        labels_B=labels_AB.sum(dim=0).float(),
        accept_rate_B=(accept_AB * labels_AB).sum(dim=0),
        greedy_B=greedy_AB.sum(dim=0).float(),
        accuracy_B=correct_AB.sum(dim=0).float(),
        confidence_error=error,
        whole_blocks=whole_A.sum().float(),
        accepted=_lengths(accept_AB)[whole_A].sum(),
        greedy_accepted=_lengths(greedy_AB.float())[whole_A].sum(),
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
