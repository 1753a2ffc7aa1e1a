"""Runs the graph on Ray: tasks chained by references, watched from the driver.

The driver starts tasks, follows the files in which stages tell their progress and metrics, and
ends everything it started, whatever happens. It computes nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from pipeline.config import PipelineConfig, RayConfig
from pipeline.console import Console
from pipeline.dag import Node, finished, stage_params, typed
from pipeline.signals import StopFlag, Stopped
from stages.artifacts import Artifact, Workspace, remove, write_whole
from stages.tracking import STOPPED, Tracker
from stages.train.config import STOP, TRAINING

POLL_S = 0.25
CANCEL_S = 5.0
CONNECT_S = 10.0
LONGEST_CAUSE = 600  # characters


class StageFailed(RuntimeError):
    """A stage ended with an error; `stage` names it, the message is the cause."""

    def __init__(self, stage: str, cause: str) -> None:
        super().__init__(f"{stage}: {cause}")
        self.stage = stage


class ClusterError(RuntimeError):
    """No Ray cluster could be had."""


@contextmanager
def cluster(config: RayConfig, stop: StopFlag) -> Iterator[None]:
    """Join the cluster that is asked for, or own one for as long as this lasts.

    Raises ClusterError, naming the address, when there is none.
    """
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    own: dict[str, Any] = {}
    if address == "local":
        own = {"num_cpus": config.num_cpus or os.cpu_count(), "include_dashboard": True, "dashboard_host": "127.0.0.1"}
    logging.getLogger("ray._private").setLevel(logging.ERROR)  # it warns of the thread below and of its own defaults
    _probe(address)
    # In a thread of its own: ray.init would replace the handlers of signals, and one that comes meanwhile would
    # raise inside compiled code. The thread stays: the kernel ends Ray's processes with the one that started them.
    with ThreadPoolExecutor(1, thread_name_prefix="ray.init") as starting:
        init = partial(ray.init, address=address, log_to_driver=False, configure_logging=False, **own)
        try:
            starting.submit(init).result()
        except (OSError, RuntimeError, ValueError) as error:  # what Ray raises: ConnectionError, RaySystemError, …
            raise ClusterError(f"ray.address={address}: Ray did not start: {short(error)}") from error
        stop.arm()  # Ray's compiled core has taken SIGTERM, to abort
        try:
            yield
        finally:
            ray.shutdown()


def _probe(address: str) -> None:
    """Raise ClusterError when nobody listens at host:port; Ray itself would try for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ClusterError(f"ray.address={address}: expected a Ray cluster (or RAY_ADDRESS), found {error}") from error


def short(error: BaseException) -> str:
    """The beginning of an error's message on one line; Ray's go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) or type(error).__name__
    return text if len(text) <= LONGEST_CAUSE else text[:LONGEST_CAUSE] + " …"


@ray.remote(num_cpus=0, max_retries=0)
def run_stage(
    config: PipelineConfig, node: Node, run_folder: Path, names: tuple[str, ...], *inputs: Artifact
) -> Artifact:
    """One stage as a Ray task. Holds no CPU: what it starts asks for its own."""
    with node.workspace.locked() as out:
        out.events.finish()  # what an earlier try told last is not how far this one is
        if (made := finished(node, config)) is None:
            given = typed(dict(zip(names, inputs, strict=True)))
            given["run"] = run_folder
            made = node.stage.run(config, given, out)
        else:
            remove(out.path)
    return Artifact(made.path, made.record)  # the driver needs no stage's classes


@dataclass
class Execution:
    """One pass over the graph: complete stages are given on, the selected others are made."""

    config: PipelineConfig
    nodes: Mapping[str, Node]
    selected: Sequence[str]
    console: Console
    tracker: Tracker
    stop: StopFlag
    run_folder: Path  # errors go there

    def run(self) -> dict[str, Artifact]:
        """The artifacts of every stage that is complete in the end, in data order.

        Raises StageFailed with the cause of the first failure, or Stopped.
        """
        self.stop.check()
        artifacts: dict[str, Artifact] = {}
        tasks: dict[str, ray.ObjectRef] = {}
        for name, node in self.nodes.items():
            if node.complete:
                artifacts[name] = Artifact.open(node.workspace.final)
                self.console.kept(name, artifacts[name].record)
            elif name in self.selected:
                inputs = [artifacts[i] if i in artifacts else tasks[i] for i in node.stage.inputs]
                task = run_stage.options(name=f"dspark.{name}")
                tasks[name] = task.remote(self.config, node, self.run_folder, node.stage.inputs, *inputs)
        name = ""
        try:
            for name, task in tasks.items():
                artifacts[name] = self._follow(name, task)
        except BaseException as error:
            if name == "train" and isinstance(error, Stopped):
                self._let_save()
            _cancel(list(tasks.values()))
            raise
        return {name: artifacts[name] for name in self.nodes if name in artifacts}

    def _follow(self, name: str, task: ray.ObjectRef) -> Artifact:
        """Wait for one stage. Ray has started it as soon as its inputs were there."""
        node = self.nodes[name]
        self.tracker.stage(name, node.workspace.final, stage_params(self.config, node.stage))
        self.console.begin(name, node.reason)
        try:
            while not ray.wait([task], timeout=POLL_S)[0]:
                self.stop.check()
                self.console.follow(name, node.workspace.events.read_progress())
            artifact: Artifact = ray.get(task)
        except Stopped:
            self.tracker.failed(name, STOPPED)
            raise
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
            failure = StageFailed(name, self._full_disk(cause) or short(cause))
            self.tracker.failed(name, str(failure))
            self.console.fail(name, self._keep(name, str(error)))
            raise failure from error
        self.tracker.finished(name, artifact)
        self.console.made(name, artifact.record)
        return artifact

    def _keep(self, name: str, error: str) -> Path:
        """Write a stage's whole error beside the run's records."""
        path = self.run_folder / f"{name}.error.txt"
        with suppress(OSError):  # a full disk is what the error may tell of
            write_whole(path, error)
        return path

    def _full_disk(self, cause: BaseException) -> str | None:
        """What to say when the cause is a full disk, of which libraries tell in many ways."""
        told = f"{cause}".lower()
        if not any(words in told for words in ("no space left", "disk is full", "disk quota exceeded")):
            return None
        out = Path(self.config.out).resolve()
        free_mib = shutil.disk_usage(out).free / 2**20
        return f"{out}: its disk is full ({free_mib:.0f} MiB free); free some and give the same command again"

    def _let_save(self) -> None:
        """Ask training for a checkpoint of the step it is in, and give it `train.grace_s`; before the first, none."""
        workspace, deadline = self.nodes["train"].workspace, time.monotonic() + self.config.train.grace_s
        if not _trains(workspace):
            return
        asked = workspace.path / STOP
        asked.touch()
        # Training renames the file when it has saved. What was told may be of an earlier try, until this one begins.
        while asked.exists() and _trains(workspace) and time.monotonic() < deadline:
            time.sleep(0.05)


def _trains(workspace: Workspace) -> bool:
    """Whether training has done a step."""
    said = workspace.events.read_progress()
    return said is not None and said.label == TRAINING


def _cancel(tasks: list[ray.ObjectRef]) -> None:
    """Stop tasks and all that they started; wait for their clean-up, but not for ever."""
    _, pending = ray.wait(tasks, num_returns=len(tasks), timeout=0)
    for task in pending:
        ray.cancel(task, recursive=True)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=CANCEL_S)
