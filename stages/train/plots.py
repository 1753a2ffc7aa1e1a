"""The figure of a training: loss and acceptance length over its steps."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stages.events import read_rows

CURVES = "training.png"
DPI = 150


def plot_training(metrics: Path, path: Path) -> None:
    """Draw `metrics` (the rows of a training): each step's batch, and the validations. Same rows, same bytes."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in read_rows(metrics):
        for name, value in row.values.items():
            if value is not None:
                points.setdefault(name, []).append((row.step, value))
    figure = Figure(figsize=(10, 4), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    _curves(left, points, "loss")
    _curves(right, points, "acceptance_length")
    left.set(title="loss", xlabel="step")
    right.set(title="acceptance length, teacher-forced (bonus token included)", xlabel="step")
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})  # no versions inside


def _curves(axes: Axes, points: dict[str, list[tuple[int, float]]], name: str) -> None:
    for key, label, marker in ((name, "training batches", ""), (f"val_{name}", "validation", "o")):
        if key in points:
            axes.plot(*zip(*points[key], strict=True), label=label, marker=marker)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")
