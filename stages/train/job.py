"""What a worker is told, the files it leaves in the workspace, and the ways in which training ends early."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stages.artifacts import Workspace
from stages.corpus import Corpus
from stages.draft.config import DraftConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.target import Target
from stages.train.config import TrainConfig

CHECKPOINTS, EXPORT, RESULT = "checkpoints", "checkpoint", "result.json"
STOPPED = "stopped"  # what `config.STOP` is called once a checkpoint is saved because of it


class TrainError(RuntimeError):
    """Training that must not go on, and that no restart would help."""


class TrainStopped(RuntimeError):
    """Training was asked to stop, and has saved all its work."""


@dataclass(frozen=True)
class TrainJob:
    """Everything a worker is told; it travels to every process of the group."""

    config: TrainConfig
    draft: DraftConfig
    target: Target
    corpus: Corpus
    out: Workspace
    max_set_aside_share: float = HiddenStatesConfig.max_set_aside_share
    vocab_W: np.ndarray | None = None  # ids of the draft's vocabulary, when it is reduced
