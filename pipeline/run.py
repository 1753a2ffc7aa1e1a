"""python -m pipeline.run — from prompts to a released draft, or any part of that road."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from pipeline import checks
from pipeline.command import command
from pipeline.config import DEFAULT_CONF, ConfigError, PipelineConfig, Request, conf_path, flat, load, parse, to_yaml
from pipeline.console import Console, summary, table
from pipeline.dag import NAMES, Node, plan
from pipeline.signals import StopFlag, Stopped
from stages.artifacts import Artifact, ArtifactError, Layout, code_version, read_json, write_json, write_whole
from stages.tracking import Tracker

MLFLOW_STATUS = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
    "running": "KILLED",
    "unreadable": "KILLED",
}

HELP = """\
usage: python -m pipeline.run [conf=NAME | run=ID] [stages=A,B] [section.key=value ...]

Takes a target model and prompts, and gives back a released DSpark draft:

    target ─► datagen ─► train ─► calibrate ─► evaluate ─► publish

  conf=NAME       conf/NAME.yaml, or the path of a YAML file   (default: conf=tiny)
  run=ID          go on with a run that failed or was stopped, with its own config
  stages=A,B      only these; what they need must be complete
  section.key=v   any value of the config, e.g. train.lr=3e-4 datagen.limit=100
                  (lists: draft.aux_layer_ids=[2,15,27]; nothing: train.max_steps=null)
  --help          this text

Stages that are complete with the same identity are kept, and the run says why it makes the others.
A run that was killed in any way goes on where it was when the same command is given again.

  python -m pipeline.plan         what a config would take: bytes of states, of memory, on disk
  python -m pipeline.status       runs, stages, and why each would be made again
  python -m pipeline.track run=ID sends a run's metrics to MLflow after a server was down
  make ui                         MLflow on the output folder
"""


def main(args: Sequence[str]) -> int:
    """Exit status: 0 done, 1 a stage failed, 2 refused before the start, 128 + n stopped by signal n."""
    try:
        request = parse(args)
        config, run_id = resolve(request)
        checks.check(config, asked_stages(request))
        nodes = plan(config)
        selected = select(request, nodes)
        return drive(config, run_id, nodes, selected)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def resolve(request: Request) -> tuple[PipelineConfig, str]:
    """The config and the run's id: a new one, or that of `run=`."""
    if request.run is None:
        config = load(conf_path(request.conf or DEFAULT_CONF), request.overrides)
        return config, f"{config.name}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"[:-3]
    out = next((o.partition("=")[2] for o in request.overrides if o.startswith("out=")), PipelineConfig("x").out)
    folder = Layout(Path(out).resolve()).run(request.run)
    if not (folder / "config.yaml").is_file():
        known = [path.name for path in Layout(Path(out).resolve()).runs()[-3:]]
        raise ConfigError(
            f"run={request.run}: expected a run in {folder.parent}, found {', '.join(known) or 'none'}; "
            "runs of another output folder: out=…"
        )
    return load(folder / "config.yaml", request.overrides), request.run


def asked_stages(request: Request) -> tuple[str, ...]:
    """All stages, or those of `stages=`. Raises ConfigError for unknown ones."""
    asked = request.stages or NAMES
    for name in asked:
        if name not in NAMES:
            raise ConfigError(f"stages={','.join(asked)}: expected some of {', '.join(NAMES)}, found {name!r}")
    return asked


def select(request: Request, nodes: dict[str, Node]) -> tuple[str, ...]:
    """Stages that may be made. Raises ConfigError for unknown ones and for missing inputs."""
    asked = asked_stages(request)
    for name in asked:
        for needed in nodes[name].stage.inputs:
            if not nodes[needed].complete and needed not in asked:
                raise ConfigError(
                    f"stages={','.join(asked)}: {name} needs {needed}, which is not complete "
                    f"({nodes[needed].reason}); add it to stages="
                )
    return asked


def drive(config: PipelineConfig, run_id: str, nodes: dict[str, Node], selected: Sequence[str]) -> int:
    """Run, track, and report. Everything that was started has ended when this returns."""
    began = time.monotonic()
    todo = [name for name in nodes if name in selected and not nodes[name].complete]
    console = Console()
    console.say(f"run        {run_id}  ({'nothing to make' if not todo else 'to make: ' + ', '.join(todo)})")
    tracker = tracker_for(config, run_id)
    with StopFlag() as stop, _recorded(config, run_id, nodes, todo) as record:
        if todo:
            artifacts = _make(config, nodes, selected, console, tracker, stop, record)
        else:
            artifacts = {name: Artifact.open(node.workspace.final) for name, node in nodes.items() if node.complete}
            record |= {"status": "finished", "code": 0}
        again = f"run={run_id}" + ("" if config.out == PipelineConfig("x").out else f" out={config.out}")
        if record["code"]:
            console.say(f"{record['why']}\nGo on with: {_python()} -m pipeline.run {again}")
        if undelivered := record.get("undelivered"):
            command = f"{_python()} -m pipeline.track {again}"
            console.say(f"warning: tracking is incomplete ({undelivered}); send the rest with: {command}")
    if record["code"] == 0:
        print(closing(artifacts, todo, tracker, time.monotonic() - began))
    return int(record["code"])


def _make(
    config: PipelineConfig,
    nodes: dict[str, Node],
    selected: Sequence[str],
    console: Console,
    tracker: Tracker,
    stop: StopFlag,
    record: dict[str, Any],
) -> dict[str, Artifact]:
    """Make what is to be made; `record` gets status, exit code, and why when it is not 0."""
    from pipeline.execute import ClusterError, Execution, StageFailed, cluster

    tracker.start()
    try:
        with cluster(config.ray, stop):
            folder = Layout(Path(config.out).resolve()).run(record["run"])
            artifacts = Execution(config, nodes, selected, console, tracker, stop, folder).run()
        record |= {"status": "finished", "code": 0}
        return artifacts
    except (ClusterError, StageFailed) as error:
        record |= {"status": "failed", "code": 1, "why": f"error: {' '.join(str(error).split())}"}
    except Stopped as error:
        record |= {"status": "killed", "code": 128 + error.signum, "why": f"stopped by {error}"}
    finally:
        console.close()
        record["undelivered"] = tracker.close(MLFLOW_STATUS[record["status"]])
        record["mlflow_run"] = tracker.parent_run_id
    return {}


def _python() -> str:
    """This interpreter as a person here would type it."""
    here = os.path.relpath(sys.executable)
    return sys.executable if here.startswith("..") else here


@contextmanager
def _recorded(config: PipelineConfig, run_id: str, nodes: dict[str, Node], todo: list[str]) -> Iterator[dict[str, Any]]:
    """Keep `config.yaml` and `run.json` of a run; the latter is final whatever happens inside."""
    folder = Layout(Path(config.out).resolve()).run(run_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.yaml", to_yaml(config))
    except OSError as error:
        raise ConfigError(f"out={config.out}: expected to write {folder}, found {error}") from error
    before = read_run(folder) if (folder / "run.json").exists() else {}
    began = time.monotonic()
    record: dict[str, Any] = {
        "run": run_id,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "code_version": code_version(),
        "stages": {name: node.workspace.identity for name, node in nodes.items()},
        "made": list(dict.fromkeys([*before.get("made", []), *todo])),
        "mlflow_run": before.get("mlflow_run", ""),
        "status": "running",
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    write_json(folder / "run.json", record)
    record |= {"status": "failed", "code": 1}  # unless proven otherwise
    try:
        yield record
    finally:
        try:
            write_json(folder / "run.json", {**record, "seconds": round(time.monotonic() - began, 1)})
        except OSError as error:  # a full disk: how the run ended is on the terminal
            print(f"warning: {folder / 'run.json'} still says running: {error}", file=sys.stderr)


def read_run(folder: Path) -> dict[str, Any]:
    """What `run.json` tells of a run; a file that is damaged tells only that."""
    try:
        told = read_json(folder / "run.json")
        if isinstance(told, dict) and {"run", "status", "made", "stages"} <= told.keys():
            return told
    except ArtifactError:
        pass
    return {"run": folder.name, "status": "unreadable", "made": list(NAMES)}


def status_of(run: Mapping[str, Any]) -> str:
    """How a run stands: `running` only when its process is there, as far as this machine can tell."""
    status = str(run["status"])
    gone = status == "running" and run["host"] == socket.gethostname() and not psutil.pid_exists(int(run["pid"]))
    return "killed" if gone else status


def tracker_for(config: PipelineConfig, run_id: str) -> Tracker:
    """The tracker of a run, not started yet."""
    layout = Layout(Path(config.out).resolve())
    model = config.tracking.registered_model or f"{config.name}-draft"
    return Tracker(
        dataclasses.replace(config.tracking, registered_model=model), layout.root, layout.run(run_id), flat(config)
    )


def closing(artifacts: dict[str, Artifact], made: Sequence[str], tracker: Tracker, seconds: float) -> str:
    """The tables at the end, and where everything is."""
    parts = ["", summary(artifacts, made)]
    if "evaluate" in artifacts:
        report = json.loads((artifacts["evaluate"].path / "report.json").read_text(encoding="utf-8"))
        parts += ["", _domains(report)]
    if "publish" in artifacts:
        parts += ["", f"release    {artifacts['publish'].path / 'release'}"]
    parts += [f"tracking   {tracker.uri}  (make ui)", f"{seconds:.1f} s in all"]
    return "\n".join(parts)


def _domains(report: dict[str, Any]) -> str:
    """What the served draft did, domain by domain."""
    acceptance = report["acceptance"]
    rows = []
    macro = {"rounds": "", "prompts": "", "interval": None, **acceptance["macro"]}
    for name, row in [*acceptance["domains"].items(), ("mean of domains", macro), ("all rounds", acceptance["pooled"])]:
        length, interval = row["acceptance_length"], row["interval"]
        told = "no rounds" if length is None else f"{length:.2f}"
        between = "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
        rows.append([name, str(row["prompts"]), str(row["rounds"]), told, between])
    return table(["domain", "prompts", "rounds", "acceptance length", "95 % interval"], rows, right=[1, 2, 3])


if __name__ == "__main__":
    command(main, HELP)
