"""python -m pipeline.track run=ID — sends to MLflow what a run could not send while it ran."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.command import command
from pipeline.config import ConfigError, PipelineConfig, parse
from pipeline.dag import STAGES, Stage, stage_params
from pipeline.run import MLFLOW_STATUS, read_run, resolve, status_of, tracker_for
from stages.artifacts import Artifact, ArtifactError, Layout
from stages.tracking import STOPPED, Tracker

HELP = """\
usage: python -m pipeline.track run=ID [out=FOLDER] [tracking.uri=URI]

Every metric is kept in the artifacts' folders. This compares them with what the tracking server was told
and sends the difference; with another tracking.uri it sends everything there.
"""


def main(args: Sequence[str]) -> int:
    """Exit status 0 when all was sent, 1 when not, 2 when the run is not known."""
    try:
        request = parse(args)
        if request.run is None:
            raise ConfigError("run=ID: expected the run to send, found none; python -m pipeline.status lists them")
        config, run_id = resolve(dataclasses.replace(request, stages=None))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    layout = Layout(Path(config.out).resolve())
    run = read_run(layout.run(run_id))
    if status_of(run) in ("running", "unreadable"):
        why = "goes on, and sends by itself" if status_of(run) == "running" else "has a run.json that cannot be read"
        print(f"error: run={run_id}: expected a run that has ended, found one that {why}", file=sys.stderr)
        return 1
    tracker = tracker_for(config, run_id)
    tracker.start()
    lost = [stage.name for stage in STAGES if stage.name in run["made"] and not _tell(tracker, config, run, stage)]
    undelivered = tracker.close(MLFLOW_STATUS[status_of(run)], timeout_s=600.0)
    if lost and run["status"] == "finished":
        undelivered = undelivered or f"{', '.join(lost)}: no artifact of run {run_id} is left to tell of"
    if undelivered:
        print(f"error: {undelivered}", file=sys.stderr)
        return 1
    print(f"sent {run_id} to {tracker.uri}")
    return 0


def _tell(tracker: Tracker, config: PipelineConfig, run: Mapping[str, Any], stage: Stage) -> bool:
    """Tell of a stage what is there: of the artifact that the run made, whatever its config would make today."""
    folder = Layout(Path(config.out).resolve()).artifact(stage.name, run["stages"].get(stage.name, "unknown"))
    try:
        made = Artifact.open(folder)
    except ArtifactError:
        # Failed or stopped in this stage; else it was never begun, or deleted, or damaged.
        if run["status"] == "finished" or not folder.with_name(folder.name + ".partial").exists():
            return False
        made = None
    tracker.stage(stage.name, folder, stage_params(config, stage))
    if made is None:
        tracker.failed(stage.name, run.get("why", STOPPED))
    else:
        tracker.finished(stage.name, made)
    return True


if __name__ == "__main__":
    command(main, HELP)
