"""The graph on a real Ray cluster: order, failure, resume, tracking, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import psutil
import pytest
import torch

from pipeline import execute
from pipeline.config import ROOT, PipelineConfig, to_yaml
from pipeline.execute import Execution
from stages.artifacts import Workspace
from stages.draft.artifact import Draft
from stages.engine.config import EngineConfig
from stages.events import Events
from stages.hidden_states.config import HiddenStatesConfig
from stages.target import TargetConfig
from stages.train import stage
from stages.train.config import STOP, TRAINING
from stages.train.job import TrainJob, TrainStopped
from stages.train.loop import train
from tests.stages.draft_helpers import FakeReader
from tests.stages.train_helpers import group_of_one, usual_job

pytestmark = pytest.mark.e2e
TOY = Path(__file__).with_name("toy.py")


def start(out: Path, behaviour: str) -> subprocess.Popen[str]:
    command = ["env", "--default-signal=HUP", sys.executable, str(TOY), str(out), behaviour]  # also under nohup
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def status(out: Path) -> str:
    return str(json.loads((out / "runs" / "toy" / "run.json").read_text())["status"])


def test_failure_is_told_and_resumed(tmp_path: Path) -> None:
    failing = start(tmp_path, "fail")
    told, _ = failing.communicate(timeout=120)
    assert failing.returncode == 1
    assert "error: datagen: second.key=3: expected 4\n" in told
    assert "run=toy" in told
    assert status(tmp_path) == "failed"

    again = start(tmp_path, "ok")
    told, _ = again.communicate(timeout=120)
    assert again.returncode == 0, told
    assert "target     is there already" in told
    assert "was interrupted; continues" in told
    assert status(tmp_path) == "finished"

    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("dspark").experiment_id])
    by_name = {run.info.run_name: run for run in runs}
    assert set(by_name) == {"toy", "target", "datagen"}  # the second try went on in the same runs
    assert by_name["datagen"].info.status == by_name["toy"].info.status == "FINISHED"
    assert by_name["datagen"].data.metrics["count.in"] == 1
    assert [m.step for m in client.get_metric_history(by_name["datagen"].info.run_id, "loss_nat")] == [1]
    check_sent_later(tmp_path)


def check_sent_later(out: Path) -> None:
    """Another server is told of what the run made, whatever this code would make today; what is gone is named."""
    import mlflow

    folder = out / "runs" / "toy"
    (folder / "config.yaml").write_text(to_yaml(PipelineConfig("other", out=str(out), target=TargetConfig("gone"))))
    other = f"sqlite:///{out / 'other.db'}"
    told = track(out, other)
    assert (told.returncode, told.stdout) == (0, f"sent toy to {other}\n"), told.stderr
    client = mlflow.MlflowClient(other)
    runs = client.search_runs([client.get_experiment_by_name("dspark").experiment_id])
    assert {run.info.run_name: run.info.status for run in runs} == dict.fromkeys(
        ("toy", "target", "datagen"), "FINISHED"
    )

    [made] = (out / "artifacts").glob("datagen-*/")
    (made / "record.json").write_text("{")
    told = track(out, other)
    assert (told.returncode, told.stderr) == (1, "error: datagen: no artifact of run toy is left to tell of\n")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({key: record[key] for key in ("run", "status", "made")}))
    told = track(out, other)
    assert (told.returncode, "a run.json that cannot be read" in told.stderr) == (1, True), told.stderr


def track(out: Path, uri: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.track", "run=toy", f"out={out}", f"tracking.uri={uri}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.soak)])
def test_signal_while_ray_starts_is_obeyed(signum: signal.Signals, tmp_path: Path) -> None:
    with start(tmp_path, "ok") as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().startswith("run ")  # what is said before Ray is started
        started = psutil.Process(driver.pid)
        time.sleep(0.5)
        os.kill(driver.pid, signum)
        told = driver.stdout.read()
        driver.wait(timeout=60)
        assert not started.is_running()
    assert driver.returncode == 128 + signum
    assert "Traceback" not in told
    assert status(tmp_path) == "killed"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_driver_leaves_no_process(signum: signal.Signals, tmp_path: Path) -> None:
    driver = start(tmp_path, "sleep")
    deadline = time.monotonic() + 90
    while not (children := list(tmp_path.glob("artifacts/*.partial/child"))):
        assert time.monotonic() < deadline
        assert driver.poll() is None
        time.sleep(0.1)
    started = psutil.Process(driver.pid).children(recursive=True)
    names = {p.pid: p.name() for p in started}
    assert any("raylet" in name for name in names.values())
    stopped_at = time.monotonic()
    os.kill(driver.pid, signum)
    driver.wait(timeout=30)
    child = int(children[0].read_text())
    if signum != signal.SIGKILL:
        _, alive = psutil.wait_procs(started, timeout=max(0.0, 10 - (time.monotonic() - stopped_at)))
        assert not [names[p.pid] for p in alive]
        assert not psutil.pid_exists(child)
        assert driver.returncode == 128 + signum
        assert status(tmp_path) == "killed"
    else:  # nobody could clean up: the kernel ends Ray, whose agents look for it only now and then
        expected = [p for p in started if p.pid != child and "Agent" not in names[p.pid]]
        _, alive = psutil.wait_procs(expected, timeout=20)
        for process in started:
            if process.pid == child and process.is_running():
                process.kill()
        assert not [names[p.pid] for p in alive]


@dataclass
class Asker:
    """A driver that is stopped at moments of its choice, while training runs in this process."""

    job: TrainJob

    def __post_init__(self) -> None:
        config = SimpleNamespace(train=SimpleNamespace(grace_s=60.0))
        self.driver = Mock(nodes={"train": SimpleNamespace(workspace=self.job.out)}, config=config)

    def ask(self) -> None:
        """Returns when the driver waits no longer."""
        Execution._let_save(self.driver)

    def in_vain(self) -> None:
        before = time.monotonic()
        self.ask()
        assert time.monotonic() - before < 1
        assert not (self.job.out.path / STOP).exists()

    @contextmanager
    def states(self, *_: object, **__: object) -> Iterator[Mock]:
        self.in_vain()  # extractors start
        yield Mock()

    def fit(self, job: TrainJob, _: object) -> None:
        """As Ray's workers do: each try is stopped after its first step."""
        self.in_vain()  # workers start
        tell, asking = Events.progress, threading.Thread(target=self.ask)

        def told(events: Events, *progress: object) -> None:
            tell(events, *progress)
            asking.start()
            while not (job.out.path / STOP).exists():
                time.sleep(0.01)

        with patch.object(Events, "progress", told), group_of_one():
            train(job, lambda: FakeReader(job.target.folder), torch.device("cpu"))
        asking.join(30)
        assert not asking.is_alive()
        raise TrainStopped


def test_training_is_asked_to_save_from_its_first_step_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that nobody would answer, and the grace time would pass for nothing; also after an earlier try."""
    job = usual_job(tmp_path)
    asker = Asker(job)
    asker.in_vain()
    monkeypatch.setattr(stage, "states_of", asker.states)
    monkeypatch.setattr(stage, "fit", asker.fit)
    monkeypatch.setattr(execute, "finished", lambda *_: None)

    def run(_: object, __: object, out: Workspace) -> Draft:
        asker.in_vain()  # the inputs are read
        given = {"draft": job.draft, "engine": EngineConfig(max_model_len=64), "hidden_states": HiddenStatesConfig()}
        return stage.run(job.config, job.target, job.corpus, out=out, **given)

    node = SimpleNamespace(workspace=job.out, stage=SimpleNamespace(run=run))
    for step in (1, 2):
        with pytest.raises(TrainStopped):
            execute.run_stage._function(None, node, tmp_path, ())
        said = job.out.events.read_progress()
        assert said is not None
        assert (said.label, said.done) == (TRAINING, step)


def test_a_driver_stops_waiting_for_steps_of_an_earlier_try(tmp_path: Path) -> None:
    asker = Asker(usual_job(tmp_path))
    asker.job.out.events.progress(TRAINING, 4, 9, "step")
    asking = threading.Thread(target=asker.ask)
    asking.start()
    while not (asker.job.out.path / STOP).exists():
        time.sleep(0.01)
    asker.job.out.events.progress("starting extractors", 0, 9, "step")
    asking.join(5)
    assert not asking.is_alive()
