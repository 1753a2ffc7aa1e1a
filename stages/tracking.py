"""The one door to MLflow.

A background thread compares what stages have on disk (`metrics.jsonl`, records, reports) with
what the server was told (`mlflow.json` in the run's folder) and sends the difference. So a server
that is down or slow never stops a run, a killed run continues its MLflow runs, and
`python -m pipeline.track run=ID` sends what is missing later.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from stages.artifacts import Artifact, Record, resource
from stages.draft.artifact import RELEASE
from stages.events import METRICS
from stages.tracking_client import PARAM, connect, errors, log_params, send_rows
from stages.tracking_state import STATE, Sent, read_state, store_uri, write_state

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

SMALL_FILES = ("*.json", "*.jsonl", "*.md", "*.png")
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
FAILURE = "dspark.failure"  # tag: why a stage did not end
STOPPED = "stopped"  # the failure of a stage that a person ended
INTERVAL_S = 1.0
RETRY_S = 15.0


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
        self._parent_open = False  # told of this run of the pipeline
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
            sent = self._sent.get(name)
            if sent is not None and sent.identity == folder.name and sent.failed:  # tried again: in the same MLflow run
                sent.done = sent.failed = False

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
            except errors() as error:
                # SQLAlchemy puts a remark in front of the cause.
                lines = [line for line in str(error).splitlines() if not line.startswith("(raised as a result")]
                self.error = f"{self._uri}: {lines[0] if lines else type(error).__name__}"
            if last:
                self._ended = True
                return
            self._wake.wait(INTERVAL_S if self.error is None else RETRY_S)
            self._wake.clear()

    def _sync(self) -> None:
        client = self._client = self._client or connect(self._uri)
        with self._lock:
            stages = dict(self._stages)
        if not self._parent_open:
            self._open_parent(client)
            self._parent_open = True
            write_state(self._state, self._uri, self._parent, self._sent)  # a release may wait for it
        for name, stage in stages.items():
            sent = self._sent.get(name)
            if sent is None or sent.identity != stage.folder.name:
                if (
                    sent is not None and sent.run_id and not sent.done
                ):  # was killed, and is now made with another config
                    client.set_terminated(sent.run_id, "KILLED")
                sent = self._sent[name] = Sent(stage.folder.name)
            if not sent.done:
                self._sync_stage(client, name, stage, sent)
                write_state(self._state, self._uri, self._parent, self._sent)
        if self._status is not None:
            client.set_terminated(self._parent, self._status)
            write_state(self._state, self._uri, self._parent, self._sent)

    def _open_parent(self, client: MlflowClient) -> None:
        """Create the parent run, or go on in it; params never change in MLflow, so tags say what has changed."""
        told = self._known_params(client) if self._parent else None
        if told is None:
            self._parent, self._sent, told = self._create_run(client, self._name, {}), {}, {}
        else:
            client.update_run(self._parent, status="RUNNING")
        params = {key: str(value)[:PARAM] for key, value in self._params.items()}
        for key, value in params.items():
            if told.get(key, value) != value:
                client.set_tag(self._parent, f"dspark.now.{key}", value)
        log_params(client, self._parent, {key: value for key, value in params.items() if key not in told})

    def _known_params(self, client: MlflowClient) -> dict[str, str] | None:
        """What the server knows of the parent run; None when it has lost it."""
        from mlflow.exceptions import MlflowException

        try:
            return dict(client.get_run(self._parent).data.params)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("%s does not know run %s any more; everything is sent anew", self._uri, self._parent)
            return None

    def _sync_stage(self, client: MlflowClient, name: str, stage: _Stage, sent: Sent) -> None:
        if not sent.run_id:
            sent.run_id = self._create_run(client, name, {"mlflow.parentRunId": self._parent, "dspark.stage": name})
            log_params(client, sent.run_id, stage.params)
            sent.open = True
        elif not sent.open:
            client.update_run(sent.run_id, status="RUNNING")
            if FAILURE in client.get_run(sent.run_id).data.tags:
                client.delete_tag(sent.run_id, FAILURE)
            sent.open = True
        record, failure = stage.record, stage.failure
        send_rows(client, sent, stage.live_folder / METRICS)
        if failure is not None:
            client.set_tag(sent.run_id, FAILURE, failure[:4000])
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

    def _create_run(self, client: MlflowClient, name: str, tags: dict[str, str]) -> str:
        experiment = client.get_experiment_by_name(self._config.experiment)
        if experiment is None:
            local = self._artifacts.as_uri() if self._uri.startswith("sqlite:") else None
            experiment_id = client.create_experiment(self._config.experiment, artifact_location=local)
        else:
            experiment_id = experiment.experiment_id
        return str(client.create_run(experiment_id, run_name=name, tags=tags).info.run_id)
