"""Calibration of confidence logits. Pure: arrays in, numbers out.

An affine map z -> a z + b first (it can be folded into the head, so every server profits), then
sequential temperature scaling of what is left (DSpark paper, section 3.2.1): position by position, left
to right, the T_k on a grid that minimises the expected calibration error of the cumulative product
sigmoid(z_1 / T_1) … sigmoid(z_k / T_k) against "the first k tokens were accepted".

Legend: N blocks, B positions of a block, M outcomes. `accepted_N` (int64) is the length of the accepted
prefix, 0 to B. Position k has an outcome in a block only when the tokens before it were accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import rankdata

SCALE_BOUNDS = (1e-3, 1e3)  # keeps the map increasing, so that ranking and AUROC stay

Flag = Literal["", "too_few_records", "all_accepted", "all_rejected", "at_grid_edge", "no_better_on_test"]


@dataclass(frozen=True)
class AffineFit:
    """z -> scale * z + shift; the identity with a flag when it could not be fitted."""

    scale: float
    shift: float
    flag: Flag = ""

    def apply(self, logits: np.ndarray) -> np.ndarray:
        return np.asarray(logits * self.scale + self.shift)


@dataclass(frozen=True)
class TemperatureFit:
    """Temperature of one position; 1 with a flag when it could not be fitted."""

    temperature: float
    records: int  # blocks with an outcome at this position
    flag: Flag = ""


@dataclass(frozen=True)
class PositionMeasure:
    """How honest and how sharp confidence is at one position. None: nothing to measure it on."""

    records: int  # blocks with an outcome at this position
    accepted: int
    ece_survival: float | None  # of the cumulative product, over all blocks
    ece_conditional: float | None  # of this position's confidence, over blocks with an outcome
    brier: float | None  # conditional
    auroc: float | None  # conditional; None when all outcomes are alike


def reached(accepted_N: np.ndarray, position: int) -> np.ndarray:
    """Bool [N]: position `position` (0-based) has an outcome, since all tokens before it were accepted."""
    return np.asarray(accepted_N >= position)


def conditional_outcomes(logits_NB: np.ndarray, accepted_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits (float64 [M]) and outcomes (bool [M]) of every position that has one."""
    positions_B = np.arange(logits_NB.shape[1])
    has_outcome_NB = accepted_N[:, None] >= positions_B
    return logits_NB[has_outcome_NB].astype(np.float64), (accepted_N[:, None] > positions_B)[has_outcome_NB]


def fit_affine(logits_NB: np.ndarray, accepted_N: np.ndarray) -> AffineFit:
    """The (scale > 0, shift) of least binary cross-entropy over the conditional outcomes of all positions.

    Convex in both numbers (it is a logistic regression). When all outcomes are alike the best shift
    would be infinite: the identity comes back, flagged.
    """
    logits_M, outcome_M = conditional_outcomes(logits_NB, accepted_N)
    flag = _one_sided(outcome_M)
    if flag:
        return AffineFit(1.0, 0.0, flag)
    centre, width = logits_M.mean(), max(float(logits_M.std()), 1e-6)
    standard_M = (logits_M - centre) / width  # the optimiser wants numbers near 1

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        z_M = parameters[0] * standard_M + parameters[1]
        residual_M = expit(z_M) - outcome_M
        value = float(np.mean(np.logaddexp(0.0, z_M) - outcome_M * z_M))
        return value, np.array([np.mean(residual_M * standard_M), np.mean(residual_M)])

    bounds = [(SCALE_BOUNDS[0] * width, SCALE_BOUNDS[1] * width), (None, None)]
    start = np.array([width, float(np.log(outcome_M.mean() / (1 - outcome_M.mean())))])
    found = minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B", options={"ftol": 1e-14, "gtol": 1e-10})
    scale = float(found.x[0]) / width
    edge = scale <= SCALE_BOUNDS[0] * 1.01 or scale >= SCALE_BOUNDS[1] * 0.99
    return AffineFit(scale, float(found.x[1] - scale * centre), "at_grid_edge" if edge else "")


def if_better(affine: AffineFit, logits_NB: np.ndarray, accepted_N: np.ndarray) -> AffineFit:
    """`affine`, or the identity, flagged, when on these data (not those of the fit) it makes the Brier score worse."""
    logits_M, outcome_M = conditional_outcomes(logits_NB, accepted_N)

    def brier(z_M: np.ndarray) -> float:
        return float(np.mean((expit(z_M) - outcome_M) ** 2))

    if len(outcome_M) and brier(affine.apply(logits_M)) > brier(logits_M):
        return AffineFit(1.0, 0.0, "no_better_on_test")
    return affine


def fit_temperatures(
    logits_NB: np.ndarray, accepted_N: np.ndarray, grid: np.ndarray, *, bins: int, min_records: int
) -> tuple[TemperatureFit, ...]:
    """Sequential temperature scaling. `grid` (float64) should hold 1; of equal errors the T nearest 1 wins."""
    order = np.argsort(np.abs(np.log(grid)), kind="stable")
    survival_N = np.ones(len(logits_NB))
    fits: list[TemperatureFit] = []
    for k in range(logits_NB.shape[1]):
        outcome = accepted_N[reached(accepted_N, k)] > k
        flag: Flag = "too_few_records" if len(outcome) < min_records else _one_sided(outcome)
        temperature = 1.0
        if not flag:
            label_N = accepted_N > k
            errors = [
                expected_calibration_error(survival_N * expit(logits_NB[:, k] / t), label_N, bins) for t in grid[order]
            ]
            temperature = float(grid[order][int(np.argmin(errors))])
            flag = "at_grid_edge" if temperature in (float(grid.min()), float(grid.max())) else ""
        survival_N = survival_N * expit(logits_NB[:, k] / temperature)
        fits.append(TemperatureFit(temperature, len(outcome), flag))
    return tuple(fits)


def measure(logits_NB: np.ndarray, accepted_N: np.ndarray, bins: int) -> tuple[PositionMeasure, ...]:
    """Every position's measures of sigmoid(logits); logits are already scaled by whatever is measured."""
    survival_NB = expit(logits_NB).cumprod(axis=1)
    measures = []
    for k in range(logits_NB.shape[1]):
        here_N = reached(accepted_N, k)
        confidence_M, outcome_M = expit(logits_NB[here_N, k]), accepted_N[here_N] > k
        some = len(outcome_M) > 0
        measures.append(
            PositionMeasure(
                records=len(outcome_M),
                accepted=int(outcome_M.sum()),
                ece_survival=expected_calibration_error(survival_NB[:, k], accepted_N > k, bins)
                if len(accepted_N)
                else None,
                ece_conditional=expected_calibration_error(confidence_M, outcome_M, bins) if some else None,
                brier=float(np.mean((confidence_M - outcome_M) ** 2)) if some else None,
                auroc=auroc(logits_NB[here_N, k], outcome_M),
            )
        )
    return tuple(measures)


def bin_statistics(
    confidence_M: np.ndarray, outcome_M: np.ndarray, bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts (int64), mean confidence and mean outcome (float64, NaN in empty bins), each [bins].

    Bins have equal width on [0, 1]; 1 itself belongs to the last.
    """
    index_M = np.minimum((confidence_M * bins).astype(np.int64), bins - 1)
    counts = np.bincount(index_M, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(index_M, weights=confidence_M, minlength=bins) / counts
        mean_outcome = np.bincount(index_M, weights=outcome_M.astype(np.float64), minlength=bins) / counts
    return counts, mean_confidence, mean_outcome


def expected_calibration_error(confidence_M: np.ndarray, outcome_M: np.ndarray, bins: int) -> float:
    """Mean over outcomes of |mean confidence - mean outcome| of their bin (Naeini et al. 2015)."""
    counts, mean_confidence, mean_outcome = bin_statistics(confidence_M, outcome_M, bins)
    filled = counts > 0
    gaps = np.abs(mean_confidence[filled] - mean_outcome[filled])
    return float((counts[filled] * gaps).sum() / counts.sum())


def auroc(scores_M: np.ndarray, outcome_M: np.ndarray) -> float | None:
    """Probability that an accepted token scores above a rejected one, ties counting half (Mann-Whitney)."""
    positives = int(outcome_M.sum())
    negatives = len(outcome_M) - positives
    if positives == 0 or negatives == 0:
        return None
    ranks_M = rankdata(scores_M)
    return float((ranks_M[outcome_M].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _one_sided(outcome_M: np.ndarray) -> Flag:
    if len(outcome_M) == 0:
        return "too_few_records"
    if outcome_M.all():
        return "all_accepted"
    return "" if outcome_M.any() else "all_rejected"
