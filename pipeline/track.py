"""python -m pipeline.track run=ID — sends to MLflow what a run could not send while it ran."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.command import command
from pipeline.config import ConfigError, parse
from pipeline.dag import plan, stage_params
from pipeline.run import MLFLOW_STATUS, read_run, resolve, tracker_for
from stages.artifacts import Artifact, Layout

HELP = """\
usage: python -m pipeline.track run=ID [out=FOLDER] [tracking.uri=URI]

Every metric is kept in the artifacts' folders. This compares them with what the tracking server was told
and sends the difference; with another tracking.uri it sends everything there.
"""


def main(args: Sequence[str]) -> int:
    """Exit status 0 when all was sent, 1 when the server refused, 2 when the run is not known."""
    if not args or any(arg in ("-h", "--help", "help") for arg in args):
        print(HELP, end="")
        return 0
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
    tracker = tracker_for(config, run_id)
    tracker.start()
    for name, node in plan(config).items():
        if name in run["made"] and node.complete:
            tracker.stage(name, node.workspace.final, stage_params(config, node.stage))
            tracker.finished(name, Artifact.open(node.workspace.final))
    undelivered = tracker.close(MLFLOW_STATUS[run["status"]], timeout_s=600.0)
    if undelivered:
        print(f"error: {undelivered}", file=sys.stderr)
        return 1
    print(f"sent {run_id} to {tracker.uri}")
    return 0


if __name__ == "__main__":
    command(main)
