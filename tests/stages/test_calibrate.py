"""Calibration: known miscalibrations are recovered, and records that would bias the fit are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, logit
from sklearn.metrics import roc_auc_score

from stages.calibrate import stage
from stages.calibrate.config import CalibrateConfig
from stages.calibrate.records import Records, check_records, load, save
from stages.calibrate.scaling import (
    AffineFit,
    auroc,
    bin_statistics,
    expected_calibration_error,
    fit_affine,
    fit_temperatures,
    if_better,
    measure,
)

GRID = np.geomspace(0.2, 5.0, 97)
STEP = GRID[1] / GRID[0]
CONFIG = CalibrateConfig(min_records=40, max_anchors_per_sequence=16)
PROVENANCE = {"calibrated": False, "num_positions": 4}


def blocks(count: int, positions: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """True logits [N, B], and prefixes drawn from them: perfectly calibrated by construction."""
    rng = np.random.default_rng(seed)
    logits_NB = logit(rng.beta(4, 1.5, (count, positions)))
    accepted_NB = rng.random((count, positions)) < expit(logits_NB)
    return logits_NB, accepted_NB.cumprod(axis=1).sum(axis=1)


def records(count: int = 50, **changes: object) -> Records:
    logits_NB, accepted_N = blocks(count, 4)
    prompts_N = np.array([f"p{i // 5}" for i in range(count)], dtype=object)
    made = Records(prompts_N, np.arange(count), logits_NB.astype(np.float32), accepted_N, np.full(count, 4), PROVENANCE)
    return replace(made, **changes)


def test_affine_miscalibration_is_recovered() -> None:
    true_NB, accepted_N = blocks(20_000, 4)
    overconfident_NB = (true_NB + 1.0) / 0.5
    fitted = fit_affine(overconfident_NB, accepted_N)
    assert fitted.scale == pytest.approx(0.5, abs=0.02)
    assert fitted.shift == pytest.approx(-1.0, abs=0.05)
    before, after = measure(overconfident_NB, accepted_N, 20), measure(fitted.apply(overconfident_NB), accepted_N, 20)
    for was, now in zip(before, after, strict=True):
        assert now.auroc == was.auroc  # an increasing map keeps the order
        assert now.ece_survival < 0.02 < was.ece_survival
        assert now.brier < was.brier


def test_affine_that_helps_no_other_data_is_not_folded() -> None:
    rng = np.random.default_rng(0)
    logits_NB = rng.normal(size=(400, 1))
    accepted_N = (rng.random(400) < expit(logits_NB[:, 0])).astype(int)
    good, bad = AffineFit(1.0, 0.01), AffineFit(3.0, 2.0)
    assert if_better(bad, logits_NB, accepted_N) == AffineFit(1.0, 0.0, "no_better_on_test")
    overconfident_NB = 3 * logits_NB + 2
    undone = AffineFit(1 / 3, -2 / 3)
    assert if_better(undone, overconfident_NB, accepted_N) == undone
    assert if_better(good, logits_NB[:0], accepted_N[:0]) == good


def test_affine_stays_increasing_and_says_so() -> None:
    true_NB, accepted_N = blocks(2_000, 3)
    fitted = fit_affine(-true_NB, accepted_N)
    assert fitted.scale > 0
    assert fitted.flag == "at_grid_edge"


def test_temperatures_are_recovered_left_to_right() -> None:
    true_NB, accepted_N = blocks(40_000, 4)
    truth_B = np.array([2.0, 0.5, 1.0, 1.5])
    fits = fit_temperatures(true_NB * truth_B, accepted_N, GRID, bins=20, min_records=200)
    for fitted, truth in zip(fits, truth_B, strict=True):
        assert fitted.flag == ""
        assert abs(np.log(fitted.temperature / truth)) <= 4 * np.log(STEP)


def test_temperature_of_noiseless_confidence_is_recovered_within_a_grid_step() -> None:
    """Bins that hold one confidence each, outcomes in exactly that share: the minimum of the ECE is zero."""
    shares = np.array([0.55, 0.65, 0.75, 0.85, 0.95])
    confidence = np.repeat(shares, 100)
    accepted_N = np.concatenate([np.arange(100) < round(100 * share) for share in shares]).astype(int)
    (fitted,) = fit_temperatures(logit(confidence)[:, None] * 1.7, accepted_N, GRID, bins=20, min_records=10)
    assert abs(np.log(fitted.temperature / 1.7)) <= np.log(STEP)


@pytest.mark.parametrize(
    ("accepted", "flags"),
    [
        (np.zeros(500, int), ["all_rejected", "too_few_records"]),
        (np.full(500, 2), ["all_accepted", "all_accepted"]),
        (np.r_[np.ones(480, int), np.zeros(20, int)], ["", "all_rejected"]),
    ],
)
def test_position_without_two_outcomes_keeps_temperature_1_and_is_flagged(
    accepted: np.ndarray, flags: list[str]
) -> None:
    logits_NB = np.random.default_rng(0).normal(size=(500, 2))
    fits = fit_temperatures(logits_NB, accepted, GRID, bins=20, min_records=200)
    assert [fitted.flag.replace("at_grid_edge", "") for fitted in fits] == flags
    assert all(fitted.temperature == 1.0 for fitted, flag in zip(fits, flags, strict=True) if flag)


def test_affine_of_one_sided_outcomes_is_the_identity() -> None:
    fitted = fit_affine(np.random.default_rng(0).normal(size=(300, 4)), np.zeros(300, int))
    assert (fitted.scale, fitted.shift, fitted.flag) == (1.0, 0.0, "all_rejected")


def test_measures_against_sklearn_and_by_hand() -> None:
    rng = np.random.default_rng(0)
    scores, outcomes = rng.integers(0, 9, 200).astype(float), rng.random(200) < 0.5
    assert auroc(scores, outcomes) == pytest.approx(roc_auc_score(outcomes, scores))
    assert auroc(scores, np.ones(200, bool)) is None
    counts, _, _ = bin_statistics(np.array([0.0, 0.049, 0.05, 1.0]), np.zeros(4), 20)
    assert (counts[0], counts[1], counts[19]) == (2, 1, 1)
    error = expected_calibration_error(np.array([0.91, 0.93, 0.11]), np.array([True, False, False]), 20)
    assert error == pytest.approx((2 * abs(0.92 - 0.5) + 0.11) / 3)


def test_conditional_measures_only_see_blocks_that_got_there() -> None:
    logits_NB, accepted_N = np.zeros((4, 2)), np.array([0, 1, 2, 2])
    first, second = measure(logits_NB, accepted_N, 20)
    assert (first.records, first.accepted, second.records, second.accepted) == (4, 3, 3, 2)
    assert second.ece_survival == pytest.approx(abs(0.25 - 0.5))
    assert second.ece_conditional == pytest.approx(abs(0.5 - 2 / 3))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (records(20), "at least calibrate.min_records=40"),
        (records(verified_N=np.r_[np.full(49, 4), 3]), "1 are truncated"),
        (records(provenance={"calibrated": True, "num_positions": 4}), "uncalibrated head"),
        (records(provenance={"num_positions": 4}), "uncalibrated head"),
        (records(logits_NB=np.full((50, 4), np.nan, np.float32)), "200 not finite"),
        (records(logits_NB=np.zeros((50, 3), np.float32)), "found 3"),
    ],
)
def test_records_that_would_bias_the_fit_are_refused(made: Records, message: str) -> None:
    check_records(records(), 4, 40)
    with pytest.raises(ValueError, match=message):
        check_records(made, 4, 40)


def test_records_survive_the_disk(tmp_path: Path) -> None:
    made = records()
    save(made, tmp_path / "records.parquet")
    back = load(tmp_path / "records.parquet")
    assert back.provenance == made.provenance
    for name in ("prompt_N", "anchor_N", "logits_NB", "accepted_N", "verified_N"):
        np.testing.assert_array_equal(getattr(back, name), getattr(made, name))


def test_fit_and_test_share_no_prompt_and_the_seed_decides() -> None:
    openings = [f"prompt {i}" for i in range(400)]
    fit = [stage.in_fit_part(opening, CONFIG) for opening in openings]
    assert 160 < sum(fit) < 240
    assert fit == [stage.in_fit_part(opening, CONFIG) for opening in openings]
    assert fit != [stage.in_fit_part(opening, replace(CONFIG, seed=1)) for opening in openings]
