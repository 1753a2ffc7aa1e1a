"""Training under Ray Train: a killed worker, errors that no restart helps, and a run that is cancelled."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch.distributed as dist
from ray.util.placement_group import placement_group, remove_placement_group

from stages.corpus import TokenSequence
from stages.hidden_states.wire import HiddenBatch, HiddenStatesError, HiddenStatesReader
from stages.train import fit as fit_module
from stages.train.fit import fit
from stages.train.job import TrainError, TrainJob
from tests.stages.draft_helpers import CONFIG, FakeReader, make_job, random_sequences
from tests.stages.train_helpers import SEQUENCES, WEIGHTS, run_ranks, usual_job

pytestmark = pytest.mark.e2e


class KillOnce:
    """Opens readers; the first group's rank 1 (the one to take the marker) dies in its third step."""

    def __init__(self, folder: Path, marker: Path) -> None:
        self.folder, self.marker = folder, marker

    def __call__(self, num_ranks: int) -> HiddenStatesReader:
        assert num_ranks == 2
        kill_at = None
        if dist.get_rank() == 1 and not self.marker.exists():
            self.marker.touch()
            kill_at = 6
        return FakeReader(self.folder, kill_at=kill_at)


class Poisoned:
    """Opens readers of which every batch is poisoned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, num_ranks: int) -> HiddenStatesReader:
        return FakeReader(self.folder, poisoned=frozenset(f"s{i}" for i in range(SEQUENCES)))


class Refused:
    """Opens readers of which rank 1's finds its states gone; the other one waits for rank 1 in a collective."""

    def __init__(self, target: Path, opened: Path, error: Exception) -> None:
        self.target, self.opened, self.error = target, opened, error

    def __call__(self, num_ranks: int) -> HiddenStatesReader:
        with self.opened.open("a") as file:
            file.write(f"{dist.get_rank()}\n")
        return GoneReader(self.target, self.error) if dist.get_rank() == 1 else FakeReader(self.target)


class GoneReader(FakeReader):
    def __init__(self, folder: Path, error: Exception) -> None:
        super().__init__(folder)
        self.error = error

    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        yield from itertools.islice(super().read(batches), 2)
        raise self.error


class Stuck:
    """Opens readers that say their process id and never give a batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, num_ranks: int) -> HiddenStatesReader:
        (self.folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
        time.sleep(600)
        raise AssertionError("the group outlived its cancellation")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A run of two ranks without Ray that nothing interrupted."""
    made = usual_job(tmp_path_factory.mktemp("straight"))
    assert run_ranks(made, 2) == [0, 0]
    return made


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    path = os.pathsep.join(sys.path)
    ray.init(address="local", num_cpus=2, runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=False)
    yield
    ray.shutdown()


def test_ray_restarts_a_killed_worker_and_the_weights_are_the_same(
    tmp_path: Path, straight: TrainJob, cluster: None
) -> None:
    job = usual_job(tmp_path)
    fit(job, KillOnce(job.target.folder, tmp_path / "marker"))
    assert (tmp_path / "marker").exists()
    for file in (WEIGHTS, *(f"checkpoints/step-00000009/part-0000{rank}-of-00002.safetensors" for rank in (0, 1))):
        assert (job.out.path / file).read_bytes() == (straight.out.path / file).read_bytes()


@pytest.mark.soak
def test_an_error_that_no_restart_helps_is_raised_as_it_is(tmp_path: Path, cluster: None) -> None:
    config = replace(CONFIG, batch_sequences=2, epochs=3, checkpoint_every_steps=1000)
    job = make_job(tmp_path, config, random_sequences(SEQUENCES, 20))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(TrainError, match="11 steps had no finite loss and gradient"):
        fit(job, Poisoned(job.target.folder))
    assert signal.getsignal(signal.SIGINT) == handler
    assert not (job.out.path / "result.json").exists()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (HiddenStatesError("the store\nis gone"), r"^the store is gone$"),
        pytest.param(
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            r"\.partial: No space left on device; make room",
            marks=pytest.mark.soak,
        ),
    ],
    ids=["states", "disk"],
)
def test_what_one_rank_cannot_have_ends_the_run_without_a_restart(
    error: Exception, told: str, tmp_path: Path, cluster: None
) -> None:
    job = usual_job(tmp_path)
    started = time.monotonic()
    with pytest.raises((HiddenStatesError, TrainError), match=told):
        fit(job, Refused(job.target.folder, tmp_path / "opened", error))
    assert time.monotonic() - started < 400  # rank 0 did not wait for gloo's time-out of half an hour
    assert sorted((tmp_path / "opened").read_text().split()) == ["0", "1"]


def test_cancelling_the_driver_task_ends_every_worker(tmp_path: Path, cluster: None) -> None:
    job = usual_job(tmp_path)
    files = [tmp_path / f"{rank}.pid" for rank in range(2)]
    task = ray.remote(num_cpus=0)(fit).remote(job, Stuck(tmp_path))
    _until(lambda: all(file.exists() and file.read_text() for file in files), 180)
    ray.cancel(task, recursive=True)
    _until(lambda: not any(Path(f"/proc/{file.read_text()}").exists() for file in files), 60)
    _until(lambda: ray.available_resources().get("CPU") == 2, 60)


def test_no_room_for_the_workers_is_told_by_its_keys(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of two CPUs are there for workers that ask for three; then one of them is an engine's."""
    monkeypatch.setattr(fit_module, "ROOM_S", 1.0)
    started = time.monotonic()
    job = usual_job(tmp_path, cpus_per_worker=1.5)
    with pytest.raises(
        TrainError, match=r"train\.num_workers=2: .*cpus_per_worker=1\.5 .* has 2 of 2 CPUs free; lower"
    ):
        fit(job, FakeReader)
    taken = placement_group([{"CPU": 1}])
    assert taken.wait(10)
    job = usual_job(tmp_path, cpus_per_worker=1.0)
    with pytest.raises(TrainError, match=r"1 of 2 CPUs free; lower one of them or engine\.num_actors"):
        fit(job, FakeReader)
    assert time.monotonic() - started < 20
    monkeypatch.setattr(fit_module, "ROOM_S", 60.0)
    giving_back = threading.Timer(1.0, remove_placement_group, (taken,))
    giving_back.start()
    fit_module._await_room(job.config)  # others end
    _until(lambda: ray.available_resources().get("CPU") == 2, 30)


def test_a_group_that_finds_no_room_any_more_is_not_waited_for(
    tmp_path: Path, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a machine leaves: there was room, and now there is none."""
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1")
    monkeypatch.setattr(fit_module, "_await_room", lambda _: None)
    with pytest.raises(TrainError, match=r"train\.num_workers=2: .* has 2 of 2 CPUs free; lower"):
        fit(usual_job(tmp_path, cpus_per_worker=1.5, max_failures=1), FakeReader)


def _until(true: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)
