"""The one door to MLflow.

A background thread compares what stages have on disk (`metrics.jsonl`, records, reports) with
what the server was told (`mlflow.json` in the run's folder) and sends the difference. So a server
that is down or slow never stops a run, a killed run continues its MLflow runs, and
`python -m pipeline.track run=ID` sends what is missing later.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stages.artifacts import Artifact, Record, resource
from stages.draft.artifact import RELEASE
from stages.events import METRICS, read_rows
from stages.tracking_state import STATE, Sent, read_state, store_uri, write_state

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

SMALL_FILES = ("*.json", "*.jsonl", "*.md", "*.png")
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
STOPPED = "stopped"  # the failure of a stage that a person ended
INTERVAL_S = 1.0
RETRY_S = 15.0
BATCH = 500  # rows of one log_batch; the server refuses more than 1000


@dataclass(frozen=True)
class TrackingConfig:
    """Where runs are tracked."""

    uri: str = resource("")  # empty: SQLite in the output folder
    experiment: str = resource("dspark")
    registered_model: str = resource("")  # empty: <name of the config>-draft


def check_tracking(config: TrackingConfig) -> None:
    """Raise ValueError for a URI that MLflow cannot use, or that would write a password into every run's folder."""
    parts = urlsplit(config.uri)
    if parts.password:
        raise ValueError(
            "tracking.uri: expected no password, since the config is stored and shown, found one; a server takes "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD from the environment, PostgreSQL PGPASSWORD"
        )
    if config.uri and parts.scheme.split("+")[0] not in SCHEMES:
        raise ValueError(f"tracking.uri={config.uri}: expected one of {', '.join(SCHEMES)}, found {parts.scheme!r}")


@dataclass
class _Stage:
    """What there is to tell of one stage."""

    folder: Path  # of the finished artifact; its `.partial` while the stage runs
    params: Mapping[str, Any]
    record: Record | None = None
    failure: str | None = None

    @property
    def live_folder(self) -> Path:
        partial = self.folder.with_name(self.folder.name + ".partial")
        return partial if partial.exists() else self.folder


class Tracker:
    """Mirrors one pipeline run to MLflow: a parent run, and a child run for each stage."""

    def __init__(self, config: TrackingConfig, out: Path, run_folder: Path, params: Mapping[str, Any]) -> None:
        """`out` is the output root (default store), `run_folder` keeps `mlflow.json`."""
        self._config = config
        self._uri = store_uri(config.uri, out)
        self._artifacts = (out / "mlartifacts").resolve()
        self._state = run_folder / STATE
        self._params = params
        self._name = run_folder.name
        self._stages: dict[str, _Stage] = {}
        self._parent, self._sent = read_state(self._state, self._uri)
        self._parent_params_sent = bool(self._parent)
        self._asked = False  # whether the server still knows the parent run
        self._status: str | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._client: MlflowClient | None = None
        self._thread = threading.Thread(target=self._loop, name="tracking", daemon=True)
        self.error: str | None = None
        self._ended = False

    def start(self) -> None:
        """Begin to send in the background."""
        self._thread.start()

    def stage(self, name: str, folder: Path, params: Mapping[str, Any]) -> None:
        """A stage has begun; `folder` is where its artifact will be."""
        with self._lock:
            self._stages[name] = _Stage(folder, params)
            if name in self._sent and self._sent[name].failed:  # tried again: go on in the same MLflow run
                self._sent[name].done = self._sent[name].failed = False

    def finished(self, name: str, artifact: Artifact) -> None:
        """A stage is complete. A release is registered as a model."""
        with self._lock:
            self._stages[name].record = artifact.record
        self._wake.set()

    def failed(self, name: str, failure: str) -> None:
        """A stage has failed or was stopped."""
        with self._lock:
            self._stages[name].failure = failure

    def close(self, status: str, timeout_s: float = 20.0) -> str | None:
        """Send the rest. Returns why something could not be sent, or None.

        `status` is FINISHED, FAILED or KILLED.
        """
        self._status = status
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return f"{self._uri} did not answer within {timeout_s:.0f} s"
            if not self._ended:
                return "the tracking thread ended early; its error is above"
        return self.error

    @property
    def uri(self) -> str:
        """The tracking URI in use."""
        return self._uri

    @property
    def parent_run_id(self) -> str:
        """MLflow's id of the parent run; empty while it could not be created yet."""
        return self._parent

    def _loop(self) -> None:
        while True:
            last = self._status is not None
            try:
                self._sync()
                self.error = None
            except _errors() as error:
                # SQLAlchemy puts a remark in front of the cause.
                lines = [line for line in str(error).splitlines() if not line.startswith("(raised as a result")]
                self.error = f"{self._uri}: {lines[0] if lines else type(error).__name__}"
            if last:
                self._ended = True
                return
            self._wake.wait(INTERVAL_S if self.error is None else RETRY_S)
            self._wake.clear()

    def _sync(self) -> None:
        client = self._connect()
        with self._lock:
            stages = dict(self._stages)
        if self._parent and not self._known(client):
            logger.warning("%s does not know run %s any more; everything is sent anew", self._uri, self._parent)
            self._parent, self._sent, self._parent_params_sent = "", {}, False
        if not self._parent:
            self._parent = self._create_run(client, self._name, {})
        if not self._parent_params_sent:
            _log_params(client, self._parent, self._params)
            self._parent_params_sent = True
            write_state(self._state, self._uri, self._parent, self._sent)  # a release may wait for it
        for name, stage in stages.items():
            sent = self._sent.setdefault(name, Sent())
            if not sent.done:
                self._sync_stage(client, name, stage, sent)
                write_state(self._state, self._uri, self._parent, self._sent)
        if self._status is not None:
            client.set_terminated(self._parent, self._status)
            write_state(self._state, self._uri, self._parent, self._sent)

    def _known(self, client: MlflowClient) -> bool:
        """Whether the server still has the parent run; asked once."""
        from mlflow.exceptions import MlflowException

        if not self._asked:
            try:
                client.get_run(self._parent)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return False
            self._asked = True
        return True

    def _sync_stage(self, client: MlflowClient, name: str, stage: _Stage, sent: Sent) -> None:
        if not sent.run_id:
            sent.run_id = self._create_run(client, name, {"mlflow.parentRunId": self._parent, "dspark.stage": name})
            _log_params(client, sent.run_id, stage.params)
            sent.open = True
        elif not sent.open:
            client.update_run(sent.run_id, status="RUNNING")
            sent.open = True
        record, failure = stage.record, stage.failure
        _send_rows(client, sent, stage.live_folder / METRICS)
        if failure is not None:
            client.set_tag(sent.run_id, "dspark.failure", failure[:4000])
            client.set_terminated(sent.run_id, "KILLED" if failure == STOPPED else "FAILED")
            sent.done = sent.failed = True
        elif record is not None:
            self._finish_stage(client, name, stage, record, sent.run_id)
            sent.done = True

    def _finish_stage(self, client: MlflowClient, name: str, stage: _Stage, record: Record, run_id: str) -> None:
        from mlflow.entities import Dataset, DatasetInput

        totals = {**record.metrics, **{f"count.{key}": float(n) for key, n in record.counts.items()}}
        totals["stage_s"] = record.seconds
        for key, value in totals.items():
            client.log_metric(run_id, key, value)
            client.log_metric(self._parent, f"{name}.{key}", value)
        client.set_tag(run_id, "dspark.identity", record.identity)
        for pattern in SMALL_FILES:
            for file in sorted(stage.folder.glob(pattern)):
                client.log_artifact(run_id, str(file))
        if record.kind == "Corpus":
            profile = json.dumps(record.counts)
            dataset = Dataset(
                "corpus", record.identity, "local", json.dumps({"uri": str(stage.folder)}), profile=profile
            )
            client.log_inputs(run_id, [DatasetInput(dataset)])
            client.log_inputs(self._parent, [DatasetInput(dataset)])
        if record.kind == "Release":
            self._register(client, run_id, stage.folder / RELEASE)
        client.set_terminated(run_id, "FINISHED")

    def _register(self, client: MlflowClient, run_id: str, release: Path) -> None:
        from mlflow.exceptions import MlflowException

        client.log_artifacts(run_id, str(release), "release")
        name = self._config.registered_model
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        client.create_model_version(name, f"{client.get_run(run_id).info.artifact_uri}/release", run_id)

    def _connect(self) -> MlflowClient:
        if self._client is None:
            # By default one call to a dead server blocks for four minutes.
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
            import mlflow

            for name in ("mlflow", "alembic"):  # they tell of every table they create
                logging.getLogger(name).setLevel(logging.WARNING)
            self._client = mlflow.MlflowClient(self._uri, registry_uri=self._uri)
        return self._client

    def _create_run(self, client: MlflowClient, name: str, tags: dict[str, str]) -> str:
        experiment = client.get_experiment_by_name(self._config.experiment)
        if experiment is None:
            local = self._artifacts.as_uri() if self._uri.startswith("sqlite:") else None
            experiment_id = client.create_experiment(self._config.experiment, artifact_location=local)
        else:
            experiment_id = experiment.experiment_id
        return str(client.create_run(experiment_id, run_name=name, tags=tags).info.run_id)


def _send_rows(client: MlflowClient, sent: Sent, file: Path) -> None:
    """Send rows that are new by step, metric by metric: a resumed stage repeats steps, the axis does not."""
    from mlflow.entities import Metric

    if not file.exists():
        return
    metrics = []
    last_step = dict(sent.last_step)
    for row in read_rows(file):
        for key, value in row.values.items():
            if value is not None and row.step > last_step.get(key, -1):
                metrics.append(Metric(key, value, int(row.time_s * 1000), row.step))
                last_step[key] = row.step
    for start in range(0, len(metrics), BATCH):
        client.log_batch(sent.run_id, metrics=metrics[start : start + BATCH])
    sent.last_step = last_step


def _log_params(client: MlflowClient, run_id: str, params: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    items = [Param(key, str(value)[:6000]) for key, value in params.items()]
    for start in range(0, len(items), 100):
        client.log_batch(run_id, params=items[start : start + 100])


def _errors() -> tuple[type[Exception], ...]:
    """Everything that a tracking server, its database or its disk may raise."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, RequestException, SQLAlchemyError, OSError)
