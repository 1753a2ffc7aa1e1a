"""Figures of a report: acceptance length by domain, and acceptance by position."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stages.evaluate.acceptance import Acceptance

DPI = 150


def plot_lengths(domains: Mapping[str, Acceptance], pooled: Acceptance, path: Path) -> None:
    """Acceptance length per domain with its 95 % interval; domains without a round are left out."""
    named = {**domains, "all rounds": pooled}.items()
    rows = [(name, a.acceptance_length, a) for name, a in named if a.acceptance_length is not None]
    figure = Figure(figsize=(7, 1.2 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for height, (_, length, acceptance) in enumerate(reversed(rows)):
        low, high = acceptance.interval or (length, length)
        axes.plot([low, high], [height, height], color="tab:blue", linewidth=2)
        axes.plot(length, height, "o", color="tab:blue")
    axes.set_yticks(range(len(rows)), [f"{name} ({a.rounds} rounds)" for name, _, a in reversed(rows)])
    axes.set_xlabel("acceptance length (tokens a round, bonus token included)")
    axes.set_xlim(left=1.0)
    axes.grid(axis="x", alpha=0.3)
    _save(figure, path)


def plot_positions(domains: Mapping[str, Acceptance], pooled: Acceptance, path: Path) -> None:
    """Survival and conditional acceptance by drafted position, side by side."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, name, title in zip(
        figure.subplots(1, 2, sharey=True),
        ("survival", "conditional"),
        ("survival: at least k accepted", "conditional: k accepted, given k - 1"),
        strict=True,
    ):
        for domain, acceptance in domains.items():
            _curve(axes, getattr(acceptance, name), label=domain, linewidth=1, alpha=0.7)
        _curve(axes, getattr(pooled, name), label="all rounds", linewidth=2.5, color="black")
        axes.set(title=title, xlabel="position k", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    _save(figure, path)


def _curve(axes: object, values: tuple[float | None, ...], **style: object) -> None:
    known = [(k + 1, value) for k, value in enumerate(values) if value is not None]
    axes.plot([k for k, _ in known], [value for _, value in known], marker=".", **style)  # type: ignore[attr-defined]


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})  # no versions inside: same data, same bytes
