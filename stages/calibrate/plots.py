"""Reliability diagrams: how often a prefix survived, against how likely the draft thought it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.special import expit

from stages.calibrate.scaling import bin_statistics

DPI = 120
COLUMNS = 4


def plot_reliability(logits: Mapping[str, np.ndarray], accepted_N: np.ndarray, bins: int, path: Path) -> None:
    """One panel a position, one curve for each of `logits` (name -> float [N, B]); a dot's size is its share."""
    positions = next(iter(logits.values())).shape[1]
    rows = math.ceil(positions / COLUMNS)
    figure = Figure(figsize=(3.2 * COLUMNS, 3.2 * rows), dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True, sharey=True).ravel()
    for k, axes in enumerate(panels):
        if k >= positions:
            axes.set_axis_off()
            continue
        axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
        for name, logits_NB in logits.items():
            survival_N = expit(logits_NB[:, : k + 1]).prod(axis=1)
            counts, confidence, outcome = bin_statistics(survival_N, accepted_N > k, bins)
            filled = counts > 0
            axes.plot(confidence[filled], outcome[filled], linewidth=1, label=name)
            axes.scatter(confidence[filled], outcome[filled], s=5 + 200 * counts[filled] / counts.sum(), alpha=0.6)
        axes.set(title=f"first {k + 1} accepted", xlim=(0, 1), ylim=(0, 1))
    panels[0].legend(fontsize="small")
    figure.supxlabel("predicted")
    figure.supylabel("observed share")
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})  # no versions inside: same data, same bytes
