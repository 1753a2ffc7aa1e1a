"""The part of the loss that needs a vocabulary, computed in pieces and never whole.

With draft and target distributions p_d and p_t of a prediction and s = sign(p_d - p_t):
    CE = -log p_d(label),  L1 = ||p_d - p_t||_1,
    dCE/dz = p_d - onehot(label),  dL1/dz = p_d (s - <p_d, s>)      (z: the draft's logits)
so the gradients of all three inputs are known as soon as a piece's logits are, and nothing of the size of
the vocabulary outlives its piece: not in the forward pass, and nothing is kept for the backward pass.
Overlapping blocks ask for the same target position: each goes through the target's LM head once.

Legend: N labelled predictions, U distinct target positions, P rows of a piece, D hidden size, R Markov rank,
V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stages.target import TargetHead

# Logits of the wider of both vocabularies in a piece: 64 MiB in fp32, and two such tensors at a time. Smaller
# pieces read the LM heads more often.
PIECE_LOGITS = 1 << 24
# On a CPU what follows the matrix products goes by blocks of rows that stay in its cache (1 MiB in fp32).
BLOCK_LOGITS = 1 << 18
OUTSIDE = -1  # column of a token that the draft's vocabulary does not have


@dataclass(frozen=True)
class Labels:
    """What the predictions are measured by, in ascending order of target positions."""

    states_UD: torch.Tensor  # final states of the target, before its norm
    row_N: torch.Tensor  # int64, index into U
    data_N: torch.Tensor  # int64, the target's ids of the data tokens
    weights_N: torch.Tensor  # fp32, weights of the predictions


@dataclass(frozen=True)
class Answers:
    """What the target says at some positions."""

    probabilities_UW: torch.Tensor  # fp32, of the tokens that the draft has
    outside_U: torch.Tensor  # fp32, what is left for the others
    best_U: torch.Tensor  # int64, column of the likeliest token of all, or OUTSIDE

    def at(self, row_P: torch.Tensor) -> Answers:
        return Answers(self.probabilities_UW[row_P], self.outside_U[row_P], self.best_U[row_P])


@dataclass(frozen=True)
class VocabHead:
    """The frozen ends of draft and target: LM heads, and which tokens the draft has."""

    draft_WD: torch.Tensor
    target: TargetHead
    ids_W: torch.Tensor | None  # int64, the target's ids of the draft's columns; None: they are the same
    renormalised: bool = False  # the target's distribution given that the token is in the draft's vocabulary

    def product(
        self, hidden_PD: torch.Tensor, head_XD: torch.Tensor, onto_PX: torch.Tensor | None = None
    ) -> torch.Tensor:
        """fp32 logits [P, X], multiplied in the dtype of the target's head and added to `onto_PX` in its place."""
        dtype = self.target.lm_head_VD.dtype
        hidden_PD, head_XD = hidden_PD.to(dtype), head_XD.to(dtype)
        if dtype == torch.float:
            return hidden_PD @ head_XD.T if onto_PX is None else onto_PX.addmm_(hidden_PD, head_XD.T)
        if hidden_PD.is_cuda:  # it sums in fp32, so nothing need be rounded
            logits_PX = torch.mm(hidden_PD, head_XD.T, out_dtype=torch.float)
        else:
            logits_PX = (hidden_PD @ head_XD.T).float()
        return logits_PX if onto_PX is None else onto_PX.add_(logits_PX)

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Columns of the target's ids in the draft's vocabulary, or OUTSIDE."""
        if self.ids_W is None:
            return ids
        columns_V = torch.full((len(self.target.lm_head_VD),), OUTSIDE, device=ids.device)
        columns_V[self.ids_W] = torch.arange(len(self.ids_W), device=ids.device)
        return columns_V[ids]

    def answers(self, states_UD: torch.Tensor) -> Answers:
        """The target's answers from its final states."""
        renormalised = self.renormalised and self.ids_W is not None
        inside_W = None if renormalised else self.ids_W
        logits_UX = self.product(
            self.target.normed(states_UD), self.draft_WD if renormalised else self.target.lm_head_VD
        )
        best_U = torch.empty(len(logits_UX), dtype=torch.long, device=logits_UX.device)
        found_UW = logits_UX if inside_W is None else logits_UX.new_empty(len(logits_UX), len(inside_W))
        for rows in _blocks(logits_UX):
            logits_PX = logits_UX[rows]
            top_P, best_U[rows] = logits_PX.max(dim=-1)
            weights_PX = logits_PX.sub_(top_P[:, None]).exp_()
            total_P1 = weights_PX.sum(dim=-1, keepdim=True)
            found_UW[rows] = (weights_PX if inside_W is None else weights_PX[:, inside_W]).div_(total_P1)
        outside_U = torch.zeros_like(best_U, dtype=torch.float) if inside_W is None else 1.0 - found_UW.sum(dim=-1)
        return Answers(found_UW, outside_U.clamp(min=0.0), best_U if renormalised else self.columns(best_U))


@dataclass(frozen=True)
class Terms:
    """Of every labelled prediction, without gradients."""

    ce_N: torch.Tensor  # 0 for a label outside the draft's vocabulary
    l1_N: torch.Tensor
    guess_N: torch.Tensor  # int64 columns: the draft's likeliest token,
    best_N: torch.Tensor  # the target's,
    data_N: torch.Tensor  # and that of the data; the last two may be OUTSIDE

    @classmethod
    def joined(cls, parts: list[Terms]) -> Terms:
        return cls(*(torch.cat([getattr(p, name) for p in parts]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Factors:
    """What CE and L1 count, and whether CE's label is the data token or the target's likeliest."""

    ce: float
    l1: float
    label_is_data: bool = True


def vocab_loss(
    hidden_ND: torch.Tensor,
    embedded_NR: torch.Tensor,
    markov_WR: torch.Tensor,
    head: VocabHead,
    labels: Labels,
    factors: Factors,
) -> tuple[torch.Tensor, Terms]:
    """Sum over N of weight * (factors.ce * CE + factors.l1 * L1), with gradients, and its terms.

    Logits are `hidden @ head.draft.T + embedded @ markov.T`. Gradients go to the first three arguments.
    """
    total, *terms = _VocabLoss.apply(hidden_ND, embedded_NR, markov_WR, head, labels, factors)
    return total, Terms(*terms)


class _VocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        embedded_NR: torch.Tensor,
        markov_WR: torch.Tensor,
        head: VocabHead,
        labels: Labels,
        factors: Factors,
    ) -> tuple[torch.Tensor, ...]:
        inputs = (hidden_ND, embedded_NR, markov_WR)
        moved = any(ctx.needs_input_grad)
        grads = tuple(torch.zeros_like(x) for x in inputs) if moved else ()
        parts = []
        data_N = head.columns(labels.data_N)
        width = len(head.draft_WD if head.renormalised else head.target.lm_head_VD)
        for rows, positions in _pieces(labels, max(1, PIECE_LOGITS // width)):
            answers, row_P = head.answers(labels.states_UD[positions]), labels.row_N[rows] - positions.start
            logits_PW = head.product(embedded_NR[rows], markov_WR)
            head.product(hidden_ND[rows], head.draft_WD, onto_PX=logits_PW)
            data_P, weights_P = data_N[rows], labels.weights_N[rows]
            parts += [
                prediction_terms(logits_PW[x], answers.at(row_P[x]), data_P[x], weights_P[x], factors)
                for x in _blocks(logits_PW)
            ]
            if moved:
                slope_PW = logits_PW.to(head.target.lm_head_VD.dtype)
                grads[0][rows] = slope_PW @ head.draft_WD.to(slope_PW)
                grads[1][rows] = slope_PW @ markov_WR.to(slope_PW)
                grads[2].add_(slope_PW.T @ embedded_NR[rows].to(slope_PW))
        ctx.save_for_backward(*grads)
        terms = Terms.joined(parts)
        total = ((factors.ce * terms.ce_N + factors.l1 * terms.l1_N) * labels.weights_N).sum()
        outputs = (terms.ce_N, terms.l1_N, terms.guess_N, terms.best_N, terms.data_N)
        ctx.mark_non_differentiable(*outputs)
        return total, *outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(grad * grad_outputs[0] for grad in ctx.saved_tensors), None, None, None


def prediction_terms(
    logits_PW: torch.Tensor,
    answers: Answers,
    data_P: torch.Tensor,
    weights_P: torch.Tensor,
    factors: Factors,
) -> Terms:
    """Terms of each row; `logits_PW` (fp32) becomes the gradient of `vocab_loss` with respect to it.

    `data_P` are columns. A label outside the draft's vocabulary has no CE: the draft cannot say it, and L1
    already asks it to spread its mass as the target does on what it can say.
    """
    label_P = data_P if factors.label_is_data else answers.best_U
    inside_P, at_P1 = label_P != OUTSIDE, label_P.clamp(min=0)[:, None]
    top_P, guess_P = logits_PW.max(dim=-1)
    label_logits_P = logits_PW.gather(-1, at_P1)[:, 0]
    draft_PW = logits_PW.softmax(dim=-1)
    # the likeliest token's probability is 1 / sum(exp(z - max z)), so its log is exact where a rare one's is not
    log_total_P = top_P - draft_PW.gather(-1, guess_P[:, None])[:, 0].log()
    ce_P = (log_total_P - label_logits_P) * inside_P

    difference_PW = torch.sub(draft_PW, answers.probabilities_UW, out=logits_PW)
    l1_P = torch.linalg.vector_norm(difference_PW, ord=1, dim=-1) + answers.outside_U

    sign_PW = difference_PW.sign_()
    ce_slope_P, l1_slope_P = factors.ce * weights_P * inside_P, factors.l1 * weights_P
    mean_sign_P = torch.bmm(draft_PW[:, None], sign_PW[:, :, None])[:, 0, 0]
    slope_PW = sign_PW.mul_(l1_slope_P[:, None]).add_((ce_slope_P - l1_slope_P * mean_sign_P)[:, None]).mul_(draft_PW)
    slope_PW.scatter_add_(-1, at_P1, -ce_slope_P[:, None])
    return Terms(ce_P, l1_P, guess_P, answers.best_U, data_P)


def _blocks(logits_PW: torch.Tensor) -> Iterator[slice]:
    """Slices of rows to be computed one after the other."""
    rows, width = logits_PW.shape
    size = max(1, BLOCK_LOGITS // width) if logits_PW.device.type == "cpu" else max(1, rows)
    return (slice(start, start + size) for start in range(0, rows, size))


def _pieces(labels: Labels, size: int) -> Iterator[tuple[slice, slice]]:
    """Slices of N with the slices of U that they refer to, `size` positions each."""
    starts = list(range(0, len(labels.states_UD), size))
    rows = torch.searchsorted(labels.row_N, torch.tensor(starts, device=labels.row_N.device)).tolist()
    for i, (start, first) in enumerate(zip(starts, rows, strict=True)):
        yield slice(first, rows[i + 1] if i + 1 < len(rows) else len(labels.row_N)), slice(start, start + size)
