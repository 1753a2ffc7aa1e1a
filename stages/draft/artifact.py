"""The artifacts made of a draft: trained, calibrated, measured, released."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages.artifacts import Artifact

TEMPERATURES = "confidence_calibration.json"
RELEASE = "release"


@dataclass(frozen=True)
class Draft(Artifact):
    """A draft in the speculators format, as `train` exports it."""

    @property
    def checkpoint(self) -> Path:
        """Folder with `config.json` and `model.safetensors` that vLLM loads with method=dspark."""
        return self.path / "checkpoint"


@dataclass(frozen=True)
class Calibration(Artifact):
    """What was fitted to a draft's confidence head, and the checkpoint with the affine map folded in."""

    @property
    def checkpoint(self) -> Path:
        """The draft to serve: as trained, but for the folded confidence head."""
        return self.path / "checkpoint"

    @property
    def temperatures(self) -> Path:
        """JSON of per-position temperatures, fitted after the fold."""
        return self.path / TEMPERATURES


@dataclass(frozen=True)
class Report(Artifact):
    """What the served draft did: `report.json`, `report.md` and plots."""


@dataclass(frozen=True)
class Release(Artifact):
    """The folder that users download, under `release/`."""

    @property
    def folder(self) -> Path:
        return self.path / RELEASE
