"""Runs the graph on Ray: tasks chained by references, watched from the driver.

The driver starts tasks, follows the files in which stages tell their progress and metrics, and
ends everything it started, whatever happens. It computes nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import ray
from ray.exceptions import RayError, RayTaskError

from pipeline.config import PipelineConfig, RayConfig
from pipeline.console import Console
from pipeline.dag import Node, stage_params, typed
from stages.artifacts import Artifact
from stages.tracking import STOPPED, Tracker
from stages.train.config import STOP

POLL_S = 0.25
CANCEL_S = 5.0


class StageFailed(RuntimeError):
    """A stage ended with an error; `stage` names it, the message is the cause."""

    def __init__(self, stage: str, cause: str) -> None:
        super().__init__(f"{stage}: {cause}")
        self.stage = stage


class Stopped(BaseException):
    """SIGINT or SIGTERM reached the driver."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def cluster(config: RayConfig) -> Iterator[StopFlag]:
    """Join the cluster that is asked for, or own one for as long as this lasts."""
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    own: dict[str, Any] = {}
    if address == "local":
        own = {"num_cpus": config.num_cpus or os.cpu_count(), "include_dashboard": True, "dashboard_host": "127.0.0.1"}
    # Ray Train notices dead ranks and takes reports by polling; its default of 2 s is slow and loses steps.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    ray.init(address=address, log_to_driver=False, configure_logging=False, **own)
    try:
        with StopFlag() as stop:  # after ray.init, which sets its own handlers
            yield stop
    finally:
        ray.shutdown()


class StopFlag:
    """Remembers the first SIGINT or SIGTERM; more of them do not disturb the clean-up.

    A handler that raised would do so inside Ray's compiled code, which turns it into a SystemError.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._set) for name in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _set(self, signum: int, frame: FrameType | None) -> None:
        self._signum = self._signum or signum

    def check(self) -> None:
        """Raise Stopped once a signal has come."""
        if self._signum is not None:
            raise Stopped(self._signum)


@ray.remote(num_cpus=0, max_retries=0)
def run_stage(config: PipelineConfig, node: Node, names: tuple[str, ...], *inputs: Artifact) -> Artifact:
    """One stage as a Ray task. Holds no CPU: what it starts asks for its own."""
    with node.workspace.locked() as out:
        made = node.stage.run(config, typed(dict(zip(names, inputs, strict=True))), out)
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

    def run(self) -> dict[str, Artifact]:
        """The artifacts of every stage that is complete in the end, in data order.

        Raises StageFailed with the cause of the first failure, or Stopped.
        """
        artifacts: dict[str, Artifact] = {}
        tasks: dict[str, ray.ObjectRef] = {}
        for name, node in self.nodes.items():
            if node.complete:
                artifacts[name] = Artifact.open(node.workspace.final)
                self.console.kept(name, artifacts[name].record)
            elif name in self.selected:
                inputs = [artifacts[i] if i in artifacts else tasks[i] for i in node.stage.inputs]
                task = run_stage.options(name=f"dspark.{name}")
                tasks[name] = task.remote(self.config, node, node.stage.inputs, *inputs)
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
            failure = StageFailed(name, str(cause).strip() or type(cause).__name__)
            self.tracker.failed(name, str(failure))
            self.console.fail(name, str(error))
            raise failure from error
        self.tracker.finished(name, artifact)
        self.console.made(name, artifact.record)
        return artifact

    def _let_save(self) -> None:
        """Ask training for a checkpoint of the step it is in, and give it `train.grace_s`."""
        asked, deadline = self.nodes["train"].workspace.path / STOP, time.monotonic() + self.config.train.grace_s
        if asked.parent.is_dir():
            asked.touch()
        while asked.exists() and time.monotonic() < deadline:  # training renames the file when it has saved
            time.sleep(0.05)


def _cancel(tasks: list[ray.ObjectRef]) -> None:
    """Stop tasks and all that they started; wait for their clean-up, but not for ever."""
    _, pending = ray.wait(tasks, num_returns=len(tasks), timeout=0)
    for task in pending:
        ray.cancel(task, recursive=True)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=CANCEL_S)
