"""What a person sees while a run goes on, and the tables at its end.

Bars on a terminal; elsewhere one line when a stage begins and one when it ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO

from tqdm import tqdm

from stages.artifacts import Artifact, Record
from stages.events import Progress

# What says most about a stage, of its metrics; the rest is in its record.
HEADLINE = {
    "target": "exact match {greedy_exact_match_share:.0%}",
    "datagen": "{generated_tok_per_s:,.0f} tok/s generated",
    "train": "validation acceptance length {val_acceptance_length:.2f}",
    "calibrate": "calibration error {ece_survival/raw:.3f} → {ece_survival/folded:.3f}",
    "evaluate": "acceptance length {acceptance_length_macro:.2f} (macro)",
    "publish": "{release_bytes:,.0f} bytes",
}


class Console:
    """Draws the progress of stages; one stage has one bar."""

    def __init__(self, stream: TextIO | None = None) -> None:
        # None when the caller closed it.
        self._stream = stream or sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
        self._bars: dict[str, tqdm[NoReturn]] = {}
        self._began: dict[str, float] = {}
        self._terminal = self._stream.isatty()

    def begin(self, name: str, reason: str) -> None:
        """A stage starts; `reason` says why it is not skipped."""
        self._began[name] = time.monotonic()
        self.say(f"{name:<10} starts: {reason}")

    def follow(self, name: str, progress: Progress | None) -> None:
        """Show how far a running stage is."""
        if progress is None or not self._terminal:
            return
        try:
            self._draw(name, progress)
        except OSError:
            self._terminal = False  # it hung up

    def _draw(self, name: str, progress: Progress) -> None:
        bar = self._bars.get(name)
        # The first step's time, and that of the steps of an earlier try, say nothing of the rate: the bar begins after.
        begins = bar is not None and bar.n == bar.initial < progress.done
        if bar is None or begins or bar.desc.strip(": ") != progress.label or bar.total != progress.total:
            self._close(name)
            bar = tqdm(
                total=progress.total,
                initial=progress.done,
                desc=progress.label,
                unit=progress.unit,
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
            )
            self._bars[name] = bar
        bar.n = progress.done
        bar.set_postfix_str(progress.note)

    def made(self, name: str, record: Record) -> None:
        """A stage is complete."""
        self._close(name)
        self.say(f"{name:<10} took {time.monotonic() - self._began[name]:.1f} s: {headline(name, record)}")

    def kept(self, name: str, record: Record) -> None:
        """A stage was complete already."""
        self.say(f"{name:<10} is there already: {headline(name, record)}")

    def fail(self, name: str, trace: Path) -> None:
        """A stage failed; `trace` holds the whole error, for whoever has to look into it."""
        self._close(name)
        self.say(f"{name:<10} failed (trace: {trace})")

    def say(self, text: str) -> None:
        """One line that does not tear the bars. A terminal that was closed does not end a run."""
        with suppress(OSError):  # a pipe that nobody reads, a terminal that hung up
            tqdm.write(text, file=self._stream)
            self._stream.flush()

    def close(self) -> None:
        """Take all bars away."""
        for name in list(self._bars):
            self._close(name)

    def _close(self, name: str) -> None:
        if bar := self._bars.pop(name, None):
            with suppress(OSError):
                bar.close()


def headline(name: str, record: Record) -> str:
    """What says most about a stage."""
    try:
        return HEADLINE[name].format(**record.metrics)
    except KeyError:  # a target that was not built here, a draft without a confidence head
        return "done"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A plain-text table; columns named in `right` are aligned to the right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(parts).rstrip()

    return "\n".join([line(cells[0]), "  ".join("─" * w for w in widths), *[line(row) for row in cells[1:]]])


def summary(artifacts: Mapping[str, Artifact], made: Iterable[str]) -> str:
    """The table at the end of a run: every stage, whether it was made now, its seconds, counts and figure."""
    made = set(made)
    rows = []
    for name, artifact in artifacts.items():
        counts = "  ".join(f"{key} {n:,}" for key, n in artifact.record.counts.items() if n)
        rows.append(
            [
                name,
                "made" if name in made else "kept",
                f"{artifact.record.seconds:.1f}",
                headline(name, artifact.record),
                counts,
            ]
        )
    return table(["stage", "state", "seconds", "result", "counts"], rows, right=[2])
