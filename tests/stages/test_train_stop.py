"""Training behind the pipeline's driver and real Ray: stopped by Ctrl-C, and killed at random moments."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from pipeline.config import ROOT
from stages.artifacts import Record
from stages.train import checkpoint
from stages.train.config import TrainConfig
from tests.stages.draft_helpers import CONFIG
from tests.stages.train_helpers import WEIGHTS, losses, result, rows, run_ranks, usual_job, weights

pytestmark = pytest.mark.e2e
DRIVER = Path(__file__).with_name("train_driver.py")
KILLS = ["rank"] * 4 + ["driver"] * 3 + ["job"] * 3


class Run:
    """A driver in `root`, and whatever it started in all its lives."""

    def __init__(self, root: Path, config: TrainConfig) -> None:
        self.root, self.config = root, config
        usual_job(root)  # what it reads
        self.started: set[psutil.Process] = set()
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(DRIVER), str(self.root), json.dumps(asdict(self.config))]
        with (self.root / "driver.log").open("a") as log:
            self.driver = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
            )

    @property
    def partial(self) -> Path | None:
        return next(self.root.glob("artifacts/train-*.partial"), None)

    def step(self) -> int:
        """The last one that was told."""
        try:
            lines = (self.partial / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (TypeError, OSError, IndexError, ValueError):
            return 0

    def until(self, true: Callable[[], bool], limit_s: float = 600) -> None:
        deadline = time.monotonic() + limit_s
        while not true():
            assert self.driver.poll() is None, (self.root / "driver.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    def processes(self) -> list[psutil.Process]:
        found = psutil.Process(self.driver.pid).children(recursive=True)
        self.started |= set(found)
        return found

    def workers(self) -> list[psutil.Process]:
        """Both ranks of this driver, once they have said who they are."""
        files = [self.root / "pids" / f"{rank}.pid" for rank in range(2)]
        self.until(lambda: all(file.exists() for file in files))
        return [psutil.Process(int(file.read_text())) for file in files]

    def kill(self, kind: str, rank: int) -> None:
        """SIGKILL one rank, the driver, or everything at once, and see to it that there is a driver again."""
        children = self.processes()
        if kind == "rank":
            self.workers()[rank].kill()
        else:
            self.driver.kill()
        for process in children if kind == "job" else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for file in self.root.glob("pids/*"):  # so that nobody takes the dead for the living
            file.unlink(missing_ok=True)
        if kind != "rank":
            self.driver.wait(60)
            self.start()

    def end(self) -> None:
        """Leave no process behind, whatever happened."""
        with suppress(psutil.NoSuchProcess):
            self.processes()
        self.driver.kill()
        self.driver.wait(60)
        psutil.wait_procs(self.started, timeout=20)
        for process in self.started:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.soak
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopping_signal_saves_the_step_that_is_done(signum: signal.Signals, tmp_path: Path) -> None:
    run = Run(tmp_path, replace(CONFIG, epochs=200, checkpoint_every_steps=10_000, validate_every_steps=10_000))
    try:
        run.until(lambda: run.step() >= 3)
        assert run.partial is not None
        checkpoints = run.partial / "checkpoints"
        assert not checkpoints.exists()
        workers = run.workers()
        run.processes()
        asked = time.monotonic()
        run.driver.send_signal(signum)
        assert run.driver.wait(60) == 128 + signum
        _, alive = psutil.wait_procs(workers, timeout=max(0.0, 10 - (time.monotonic() - asked)))
        assert not alive
        (saved,) = checkpoints.iterdir()
        assert checkpoint.load_state(saved).step == run.step() >= 3
    finally:
        run.end()


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_ten_kills_at_random_moments_leave_no_trace(tmp_path: Path) -> None:
    """A rank, the driver or everything dies, mostly amid steps and writing, now and then while starting."""
    config = replace(CONFIG, epochs=32, max_failures=len(KILLS), validate_every_steps=7)  # 96 steps
    straight = replace(usual_job(tmp_path / "straight"), config=config)
    assert run_ranks(straight, 2) == [0, 0]

    chance = random.Random(7)
    kills = chance.sample(KILLS, len(KILLS))
    run = Run(tmp_path / "killed", config)
    try:
        for kind in kills:
            if kind == "rank" or chance.random() < 0.7:
                run.workers()
                aim = run.step() + chance.randint(1, 5)
                run.until(lambda aim=aim: run.step() >= aim)
                time.sleep(chance.uniform(0, 0.3))
            else:
                time.sleep(chance.uniform(0, 20))
            run.kill(kind, chance.randrange(2))
        run.until(lambda: run.partial is None, limit_s=600)
        assert run.driver.wait(60) == 0
    finally:
        run.end()
    (made,) = run.root.glob("artifacts/train-*[0-9a-f]/")
    assert (made / WEIGHTS).read_bytes() == weights(straight)
    record, told = Record.read(made), result(straight)
    assert (record.counts, record.facts) == (told["counts"], told["facts"])
    assert losses(made) == losses(straight.out.path)
    assert [step for step, _ in rows(made)] == [step for step, _ in rows(straight.out.path)]
