"""The graph on a real Ray cluster: order, failure, resume, tracking, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest

from pipeline.config import ROOT, PipelineConfig, to_yaml
from pipeline.execute import Execution
from stages.artifacts import Workspace
from stages.target import TargetConfig
from stages.train.config import STOP
from stages.train.job import STOPPED

pytestmark = pytest.mark.e2e
TOY = Path(__file__).with_name("toy.py")


def start(out: Path, behaviour: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOY), str(out), behaviour]
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
    shutil.rmtree(made)
    told = track(out, other)
    assert (told.returncode, told.stderr) == (1, "error: datagen: no artifact of run toy is left to tell of\n")


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


def test_training_is_asked_to_save_from_its_first_step_on(tmp_path: Path) -> None:
    """Before that nobody would answer, and the grace time would pass for nothing."""
    workspace = Workspace(tmp_path / "train-x", "x")
    workspace.path.mkdir()
    config = SimpleNamespace(train=SimpleNamespace(grace_s=60.0))
    execution = Mock(nodes={"train": SimpleNamespace(workspace=workspace)}, config=config)
    began = time.monotonic()
    Execution._let_save(execution)
    workspace.events.progress("starting extractors", 0, 7, "sequences")
    Execution._let_save(execution)
    assert not (workspace.path / STOP).exists()

    workspace.events.progress("train", 1, 7, "step")
    asking = threading.Thread(target=Execution._let_save, args=(execution,))
    asking.start()
    while not (workspace.path / STOP).exists():
        time.sleep(0.01)
    assert asking.is_alive()
    (workspace.path / STOP).replace(workspace.path / STOPPED)  # as training does once it has saved
    asking.join()
    assert time.monotonic() - began < 30
