"""Tracking against a real SQLite store: what is damaged or lost is sent again, and never stops a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from stages.artifacts import Artifact, Workspace
from stages.tracking import Tracker, TrackingConfig
from stages.tracking_state import await_parent_run, store_uri


def send(out: Path, made: Artifact) -> str:
    tracker = Tracker(TrackingConfig(), out, out / "runs" / "r", {"a.b": 1})
    tracker.start()
    tracker.stage("datagen", made.path, {"a.b": 1})
    tracker.finished("datagen", made)
    assert tracker.close("FINISHED", timeout_s=120) is None
    return tracker.parent_run_id


def steps(out: Path, parent: str) -> list[int]:
    client = MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    [run] = client.search_runs(
        [client.get_run(parent).info.experiment_id], filter_string=f"tags.`mlflow.parentRunId` = '{parent}'"
    )
    return [metric.step for metric in client.get_metric_history(run.info.run_id, "loss_nat")]


def test_parent_run_is_known_to_other_processes_before_any_stage(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    uri = store_uri("", tmp_path)
    tracker = Tracker(TrackingConfig(), tmp_path, folder, {})
    assert await_parent_run(uri, folder, timeout_s=0.2) is None
    tracker.start()
    told = await_parent_run(uri, folder, timeout_s=60)
    assert told == tracker.parent_run_id
    assert told
    assert tracker.close("FINISHED", timeout_s=120) is None
    assert await_parent_run("http://another", folder, timeout_s=0) is None


def test_what_was_lost_is_sent_again(tmp_path: Path) -> None:
    (tmp_path / "runs" / "r").mkdir(parents=True)
    with Workspace(tmp_path / "artifacts" / "datagen-1", "1").locked() as out:
        for step in range(1, 5):
            out.events.metrics({"loss_nat": 1.0 / step}, step)
        lines = (out.path / "metrics.jsonl").read_text().splitlines()
        (out.path / "metrics.jsonl").write_text(
            "\n".join([lines[0], "{{{", '{"step": 2}', *lines[2:]]) + "\n" + lines[0]
        )
        made = out.commit(Artifact, counts={}, metrics={}, facts={})

    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 2"):
        first = send(tmp_path, made)
    assert steps(tmp_path, first) == [1, 3, 4]
    assert send(tmp_path, made) == first
    assert steps(tmp_path, first) == [1, 3, 4]

    state = tmp_path / "runs" / "r" / "mlflow.json"
    state.write_text(state.read_text().replace(first, "0" * 32))  # a run that the server does not have
    second = send(tmp_path, made)
    assert second not in (first, "0" * 32)
    assert steps(tmp_path, second) == [1, 3, 4]

    state.write_text("")
    third = send(tmp_path, made)
    assert third != second
    assert steps(tmp_path, third) == [1, 3, 4]
