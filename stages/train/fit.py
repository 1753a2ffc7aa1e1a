"""The worker group: Ray Train starts it, restarts it when a process dies, and ends it.

Checkpoints are our own (`checkpoint.py`), so Ray is told of none: whether it restarts the group or the
whole job starts anew, every worker resumes from the newest complete one.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.util.placement_group import placement_group, remove_placement_group

from stages.artifacts import remove, write_json
from stages.hidden_states.wire import HiddenStatesError, OpenReader
from stages.train.config import STOP, TrainConfig
from stages.train.job import RESULT, STOPPED, TrainError, TrainJob, TrainStopped
from stages.train.loop import train
from stages.train.prepare import allow_tf32

RAY = "ray"  # Ray Train's own folder in the workspace
FAILURE = "failure.json"  # why training must not go on, written by the first rank that knows
ROOM_S = 60.0  # for others to give back what they hold, or for a cluster to grow


def fit(job: TrainJob, open_reader: OpenReader) -> None:
    """Train with `config.num_workers` processes until `result.json` is there.

    A dead process costs the steps since the last checkpoint; after `config.max_failures` of them Ray's
    error is raised. Raises TrainError or HiddenStatesError, without a restart, when a worker did; a worker's
    ValueError becomes a TrainError. Raises TrainError as well when the cluster has no room for the workers.
    Cancelling the calling task, recursively, ends the group at once; a file `stop` in the workspace lets
    it save a checkpoint after the step it is in, and then TrainStopped is raised.
    """
    config = job.config
    # A dead process is noticed within this time; Ray's default is 2 s. Ray gives it on from here to its controller.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    storage, failure = job.out.path / RAY, job.out.path / FAILURE
    stopped = job.out.path / STOPPED
    for told in (failure, stopped, job.out.path / STOP):
        remove(told)
    remove(storage)  # Ray would take up an older run of the same name by itself
    _await_room(config)
    trainer = TorchTrainer(
        _worker,
        train_loop_config={"job": job, "open_reader": open_reader},
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.num_workers, use_gpu=config.gpus_per_worker > 0, resources_per_worker=_resources(config)
        ),
        torch_config=TorchConfig(backend="nccl" if config.gpus_per_worker else "gloo"),
        run_config=ray.train.RunConfig(
            name=f"train-{job.out.identity}",
            storage_path=str(storage),
            failure_config=ray.train.FailureConfig(
                max_failures=config.max_failures,
                controller_failure_limit=config.max_failures,  # groups that did not start; Ray itself sets no end
            ),
            callbacks=[_NoRestart(failure)],
        ),
    )
    try:
        with _own_interrupt():
            trainer.fit()
    except ray.train.TrainingFailedError as error:
        if failure.exists():
            raise _told(failure) from error
        cause = getattr(error, "controller_failure", None)
        if isinstance(cause, TrainError):
            raise cause from error
        if isinstance(cause, WorkerGroupStartupTimeoutError):  # a machine has left amid the training
            raise _no_room(config) from error
        raise
    if failure.exists():
        raise _told(failure)
    if stopped.exists():
        raise TrainStopped("asked to stop, and all steps that are done are saved; run it again to go on")
    if not (job.out.path / RESULT).exists():
        raise TrainError(f"{job.out.path / RESULT}: training ended without it; put the output root on shared storage")


def _await_room(config: TrainConfig) -> None:
    """Raise TrainError when the cluster has no room for the workers, beside what runs there, within `ROOM_S`.

    Ray Train itself would say so in a log that nobody sees.
    """
    group = placement_group([_resources(config)] * config.num_workers)
    try:
        if not group.wait(ROOM_S):
            raise _no_room(config)
    finally:
        remove_placement_group(group)


def _no_room(config: TrainConfig) -> TrainError:
    asked, free, whole = _resources(config), ray.available_resources(), ray.cluster_resources()
    found = " and ".join(f"{free.get(name, 0.0):g} of {whole.get(name, 0.0):g} {name}s free" for name in asked)
    return TrainError(
        f"train.num_workers={config.num_workers}: each asks for train.cpus_per_worker={config.cpus_per_worker:g} and "
        f"train.gpus_per_worker={config.gpus_per_worker} on one machine, the cluster has {found}; lower one of them or "
        "engine.num_actors, or wait for what else runs there"
    )


@contextmanager
def _own_interrupt() -> Iterator[None]:
    """Give SIGINT back afterwards: Ray Train leaves a handler that would call a controller which is gone."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


class _NoRestart(ray.train.UserCallback):
    """Ends the run in Ray's controller: an error that leaves a worker would make Ray start the group again."""

    def __init__(self, failure: Path) -> None:
        self._failure = failure

    def after_exception(self, run_context: object, worker_exceptions: dict[int, Exception]) -> None:
        """Raise what a worker has told; the others fail in collectives with it, or wait there until they are ended.

        A full disk takes no file that tells of it, and is as full for the next group.
        """
        if self._failure.exists():
            raise _told(self._failure)
        for error in worker_exceptions.values():
            for reason in map(os.strerror, (errno.ENOSPC, errno.EDQUOT)):
                if reason in str(error):
                    folder = self._failure.parent
                    raise TrainError(
                        f"{folder}: {reason}; make room, and run again: training goes on from what is saved"
                    )


def _worker(told: dict[str, Any]) -> None:
    job: TrainJob = told["job"]
    failure = job.out.path / FAILURE
    if failure.exists():  # a process died while the failure was told, and Ray started the group again
        return
    # A fixed number of threads: sums are split by thread, and their low bits with them.
    torch.set_num_threads(max(1, round(job.config.cpus_per_worker)))
    allow_tf32(job.config)
    world = ray.train.get_context().get_world_size()
    try:
        train(job, lambda: told["open_reader"](world), get_device())
    except (TrainError, HiddenStatesError, ValueError) as error:  # a ValueError is the person's: as wrong next time
        _tell(failure, error, ray.train.get_context().get_world_rank())
        raise


def _tell(failure: Path, error: Exception, rank: int) -> None:
    """Write the file whole, unless another rank was first."""
    kind = HiddenStatesError if isinstance(error, HiddenStatesError) else TrainError
    beside = failure.with_name(f".{failure.name}.{rank}")
    write_json(beside, {"kind": kind.__name__, "message": " ".join(str(error).split())})
    with suppress(FileExistsError):
        os.link(beside, failure)
    remove(beside)


def _told(failure: Path) -> TrainError | HiddenStatesError:
    told = json.loads(failure.read_text(encoding="utf-8"))
    kind = TrainError if told["kind"] == TrainError.__name__ else HiddenStatesError
    return kind(told["message"])


def _resources(config: TrainConfig) -> dict[str, float]:
    gpus = {"GPU": float(config.gpus_per_worker)} if config.gpus_per_worker else {}
    return {"CPU": config.cpus_per_worker, **gpus}
