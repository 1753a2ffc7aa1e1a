"""A graph of two trivial stages on a real Ray cluster, run as a program: `python toy.py OUT BEHAVIOUR`.

Behaviour: `ok`, `fail` (the second stage raises), or `sleep` (it starts a process and waits).
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from pipeline import dag, run
from pipeline.config import PipelineConfig
from stages.artifacts import Artifact, Workspace
from stages.corpus import Corpus
from stages.target import Target, TargetConfig
from stages.tiny_target.config import TinyTargetConfig

SLEEPER = "import time; time.sleep(86399)"


def first(config: PipelineConfig, inputs: dag.Inputs, out: Workspace) -> Artifact:
    return out.commit(Target, counts={"made": 1}, metrics={"x_s": 1.0}, facts={"built": True, "model": "model"})


def second(config: PipelineConfig, inputs: dag.Inputs, out: Workspace) -> Artifact:
    assert inputs["target"].record.counts == {"made": 1}
    out.events.progress("second", 1, 2, "step")
    out.events.metrics({"loss_nat": 0.5}, step=1)
    if config.name == "fail":
        raise ValueError("second.key=3: expected 4")
    if config.name == "sleep":
        with subprocess.Popen([sys.executable, "-c", SLEEPER]) as child:
            (out.path / "child").write_text(str(child.pid))
            try:
                while child.poll() is None:  # a cancelled task is not interrupted inside a blocking system call
                    time.sleep(0.1)
            finally:
                child.kill()
    return out.commit(Corpus, counts={"in": 1}, metrics={}, facts={})


STAGES = (
    dag.Stage("target", "Target", (), (), 1, first),
    dag.Stage("datagen", "Corpus", ("target",), ("tracking",), 1, second),
)

if __name__ == "__main__":
    out, behaviour = sys.argv[1:]
    dag.STAGES = STAGES
    config = PipelineConfig(behaviour, out=out, target=TargetConfig(tiny=TinyTargetConfig()))
    Path(out).mkdir(parents=True, exist_ok=True)
    sys.exit(run.drive(config, "toy", dag.plan(config), ("target", "datagen")))
