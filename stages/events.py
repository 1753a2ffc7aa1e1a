"""The local truth of a running stage: `metrics.jsonl` and `progress.json` in its folder.

Any process of a stage may write here; the driver reads both files to draw progress bars and to
feed the tracking server. Nothing here can fail because a server is down.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

METRICS = "metrics.jsonl"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """How far a stage is: `done` of `total` units called `unit`, with a short note."""

    label: str
    done: int
    total: int
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Events:
    """Writer and reader of one stage's metrics and progress, in folder `path`."""

    path: Path

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Append one row. Keys carry units; values that are not finite are written as null."""
        row = {key: (float(value) if math.isfinite(value) else None) for key, value in values.items()}
        line = json.dumps({"step": step, "time_s": round(time.time(), 3), "values": row}) + "\n"
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(line)

    def rewind(self, step: int) -> None:
        """Forget rows after `step`: a resumed stage writes them again, and the axis stays single."""
        source = self.path / METRICS
        if not source.exists():
            return
        kept = [line for line in source.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
        beside = source.with_name(f".{source.name}.{os.getpid()}")
        beside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        beside.replace(source)

    def progress(self, label: str, done: int, total: int, unit: str, note: str = "") -> None:
        """Say how far the stage is. Cheap: call it often; the reader polls."""
        beside = self.path / f".{PROGRESS}.{os.getpid()}"
        beside.write_text(json.dumps([label, done, total, unit, note]), encoding="utf-8")
        beside.replace(self.path / PROGRESS)

    def read_progress(self) -> Progress | None:
        """The last progress said, or None before the first (or when a full disk cut it)."""
        try:
            return Progress(*json.loads((self.path / PROGRESS).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def finish(self) -> None:
        """Drop the progress file: a finished artifact has none."""
        (self.path / PROGRESS).unlink(missing_ok=True)


@dataclass(frozen=True)
class Row:
    """One line of the metrics file."""

    step: int
    time_s: float
    values: Mapping[str, float | None]


def read_rows(file: Path) -> Iterator[Row]:
    """The rows of a metrics file. A line that is none is named in a warning and left out; a torn last one is not."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is still being written
        try:
            told = json.loads(line)
            yield Row(int(told["step"]), float(told["time_s"]), dict(told["values"]))
        except (ValueError, TypeError, LookupError) as error:
            warnings.warn(f"{file}, line {number}: expected a row of metrics, found {error!r}; left out", stacklevel=2)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):  # the torn last line of a killed process
        return math.inf
