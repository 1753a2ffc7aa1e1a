"""Tracking against a real SQLite store: what is damaged or lost is sent again, and never stops a run."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from requests.exceptions import RequestException
from sqlalchemy.exc import SQLAlchemyError

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


def children(out: Path, parent: str) -> list[Run]:
    """Runs of stages, oldest first."""
    client = MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    experiment = client.get_run(parent).info.experiment_id
    found = client.search_runs([experiment], filter_string=f"tags.`mlflow.parentRunId` = '{parent}'")
    return sorted(found, key=lambda run: run.info.start_time)


@contextmanager
def tracked(out: Path, status: str, **params: float) -> Iterator[Tracker]:
    (out / "runs" / "r").mkdir(parents=True, exist_ok=True)
    tracker = Tracker(TrackingConfig(), out, out / "runs" / "r", params)
    tracker.start()
    yield tracker
    assert tracker.close(status, timeout_s=120) is None


def test_a_stage_that_is_tried_again_goes_on_in_its_run_and_another_config_in_one_of_its_own(tmp_path: Path) -> None:
    with tracked(tmp_path, "FAILED", lr=0.1) as tracker:
        tracker.stage("train", tmp_path / "artifacts" / "train-1", {"lr": 0.1})
        tracker.failed("train", "out of memory")
    [failed] = children(tmp_path, tracker.parent_run_id)
    assert failed.data.tags["dspark.failure"] == "out of memory"
    assert failed.info.status == "FAILED"

    with tracked(tmp_path, "KILLED", lr=0.1) as tracker:
        client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
        deadline = time.monotonic() + 60
        while client.get_run(failed.data.tags["mlflow.parentRunId"]).info.status != "RUNNING":
            assert time.monotonic() < deadline
            time.sleep(0.1)

    with Workspace(tmp_path / "artifacts" / "train-1", "1").locked() as out:
        out.events.metrics({"loss_nat": 1.0}, 7)
        made = out.commit(Artifact, counts={}, metrics={}, facts={})
    with tracked(tmp_path, "FINISHED", lr=0.1) as tracker:
        tracker.stage("train", made.path, {"lr": 0.1})
        tracker.finished("train", made)
    [again] = children(tmp_path, tracker.parent_run_id)
    assert again.info.run_id == failed.info.run_id
    assert "dspark.failure" not in again.data.tags
    assert again.info.status == "FINISHED"

    with Workspace(tmp_path / "artifacts" / "train-2", "2").locked() as out:
        out.events.metrics({"loss_nat": 9.0}, 3)  # fewer steps than the other had
        made = out.commit(Artifact, counts={}, metrics={}, facts={})
    with tracked(tmp_path, "FINISHED", lr=0.9) as tracker:
        tracker.stage("train", made.path, {"lr": 0.9})
        tracker.finished("train", made)
    first, other = children(tmp_path, tracker.parent_run_id)
    assert [run.data.params["lr"] for run in (first, other)] == ["0.1", "0.9"]
    assert [run.data.metrics["loss_nat"] for run in (first, other)] == [1.0, 9.0]
    assert [run.data.tags["dspark.identity"] for run in (first, other)] == ["1", "2"]
    parent = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(tracker.parent_run_id)
    assert (parent.data.params["lr"], parent.data.tags["dspark.now.lr"]) == ("0.1", "0.9")


def test_a_stage_that_was_killed_and_has_another_config_now_does_not_run_for_ever(tmp_path: Path) -> None:
    with tracked(tmp_path, "KILLED") as tracker:
        tracker.stage("train", tmp_path / "artifacts" / "train-1", {})
    [killed] = children(tmp_path, tracker.parent_run_id)
    assert killed.info.status == "RUNNING"  # as far as is known: the next run may go on with it
    with tracked(tmp_path, "KILLED") as tracker:
        tracker.stage("train", tmp_path / "artifacts" / "train-2", {})
    assert [run.info.status for run in children(tmp_path, tracker.parent_run_id)] == ["KILLED", "RUNNING"]


@pytest.mark.parametrize("server", ["silent", "none"])
def test_a_server_that_does_not_answer_is_named_and_told_later(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1" if server == "none" else "60")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        uri = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if server == "none":
            listener.close()
        (tmp_path / "runs" / "r").mkdir(parents=True)
        with Workspace(tmp_path / "artifacts" / "datagen-1", "1").locked() as out:
            out.events.metrics({"loss_nat": 1.0}, 1)
            made = out.commit(Artifact, counts={}, metrics={}, facts={})
        tracker = Tracker(TrackingConfig(uri=uri), tmp_path, tmp_path / "runs" / "r", {})
        tracker.start()
        tracker.stage("datagen", made.path, {})
        tracker.finished("datagen", made)
        why = tracker.close("FINISHED", timeout_s=2.0 if server == "silent" else 60.0)
    assert why is not None
    assert why.startswith(uri)
    assert ("did not answer within 2 s" in why) == (server == "silent")
    assert steps(tmp_path, send(tmp_path, made)) == [1]


@pytest.mark.parametrize("error", [OSError("disk full"), SQLAlchemyError("locked"), RequestException("reset")])
def test_whatever_a_server_or_its_disk_raises_is_told_and_ends_no_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(uri: str) -> NoReturn:
        raise error

    monkeypatch.setattr("stages.tracking.connect", connect)
    tracker = Tracker(TrackingConfig(), tmp_path, tmp_path, {})
    tracker.start()
    assert str(tracker.close("FINISHED", timeout_s=60)).endswith(f": {error}")
