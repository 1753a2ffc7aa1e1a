"""Training behind the pipeline's own driver, as a program to be stopped: python train_driver.py ROOT CONFIG_JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline import dag, run
from pipeline.config import PipelineConfig, RayConfig
from stages.artifacts import Artifact, Workspace
from stages.draft.artifact import Draft
from stages.hidden_states.wire import HiddenStatesReader
from stages.train.config import TrainConfig
from stages.train.job import RESULT

PAUSE_S = 0.05  # per batch: a step of two batches and rank takes a fifth of a second


@dataclass(frozen=True)
class Open:
    """Opens slow readers of `target` that say their process ids in `pids`."""

    target: Path
    pids: Path

    def __call__(self, num_ranks: int) -> HiddenStatesReader:
        from tests.stages.train_helpers import SlowReader

        return SlowReader(self.target, self.pids, PAUSE_S)


def train(config: PipelineConfig, inputs: dag.Inputs, out: Workspace) -> Artifact:
    from stages.train.fit import fit
    from tests.stages.train_helpers import usual_job

    root = Path(config.out)
    job = replace(usual_job(root), config=config.train, out=out)
    fit(job, Open(job.target.folder, root / "pids"))
    told = json.loads((out.path / RESULT).read_text())
    return out.commit(Draft, counts=told["counts"], metrics=told["metrics"], facts=told["facts"])


if __name__ == "__main__":
    root, changes = sys.argv[1:]
    dag.STAGES = (dag.Stage("train", "Draft", (), ("train",), 1, train),)
    config = PipelineConfig("stop", out=root, train=TrainConfig(**json.loads(changes)), ray=RayConfig(num_cpus=2))
    sys.exit(run.drive(config, "stop", dag.plan(config), ("train",)))
