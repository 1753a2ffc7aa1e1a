"""How confidence is calibrated."""

from __future__ import annotations

from dataclasses import dataclass

from stages.artifacts import resource


@dataclass(frozen=True)
class CalibrateConfig:
    """Sequential temperature scaling (DSpark paper) and the affine map that is folded in."""

    fit_share: float = 0.5  # of the calibration prompts; the rest measures
    bins: int = 20  # equal width, for the expected calibration error
    min_records: int = 200  # blocks needed at a position, else its temperature stays 1 and is flagged
    max_anchors_per_sequence: int = 64
    temperature_min: float = 0.2
    temperature_max: float = 5.0
    temperature_steps: int = 97
    seed: int = 0
    threads: int = resource(1)  # that draft, while the engines run
