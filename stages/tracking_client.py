"""Calls to an MLflow server that `tracking.py` makes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.events import read_rows
from stages.tracking_state import Sent

if TYPE_CHECKING:
    from mlflow import MlflowClient

PARAM = 6000  # characters of a value, the most that the server takes
BATCH = 500  # rows of one log_batch; the server refuses more than 1000


def connect(uri: str) -> MlflowClient:
    """A client whose calls give up within a minute."""
    # By default one call to a dead server blocks for four minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
    import mlflow

    for name in ("mlflow", "alembic"):  # they tell of every table they create
        logging.getLogger(name).setLevel(logging.WARNING)
    return mlflow.MlflowClient(uri, registry_uri=uri)


def send_rows(client: MlflowClient, sent: Sent, file: Path) -> None:
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


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, Any]) -> None:
    """Send config values; long ones are cut."""
    from mlflow.entities import Param

    items = [Param(key, str(value)[:PARAM]) for key, value in params.items()]
    for start in range(0, len(items), 100):
        client.log_batch(run_id, params=items[start : start + 100])


def errors() -> tuple[type[Exception], ...]:
    """Everything that a tracking server, its database or its disk may raise."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, RequestException, SQLAlchemyError, OSError)
