"""What a tracking server has been told of one pipeline run: `mlflow.json` in the run's folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from stages.artifacts import ArtifactError, read_json, write_json

logger = logging.getLogger(__name__)

STATE = "mlflow.json"
PARENT_S = 20.0  # how long a release waits for the id of the run that makes it


@dataclass
class Sent:
    """What the server knows of one stage."""

    identity: str = ""  # of the artifact; another one is told in a run of its own
    run_id: str = ""
    last_step: dict[str, int] = field(default_factory=dict)  # by metric
    done: bool = False
    failed: bool = False
    open: bool = False  # its MLflow run has been opened by this process


def store_uri(uri: str, out: Path) -> str:
    """Where runs of the output root `out` are tracked: `uri`, or SQLite beside the artifacts when it is empty."""
    return uri or f"sqlite:///{(out / 'mlflow.db').resolve()}"


def await_parent_run(uri: str, run_folder: Path, timeout_s: float = PARENT_S) -> str | None:
    """The parent run's id, once the tracker of another process has it; None when the server gives none in time."""
    deadline = time.monotonic() + timeout_s
    while not (parent := read_state(run_folder / STATE, uri)[0]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return parent or None


def read_state(path: Path, uri: str) -> tuple[str, dict[str, Sent]]:
    """The parent run's id and what was sent of each stage; empty for another server or an unreadable file."""
    if not path.exists():
        return "", {}
    try:
        state = read_json(path)
        if state["uri"] != uri:
            return "", {}
        sent = {name: Sent(**{**value, "open": False}) for name, value in state["stages"].items()}
        return str(state["parent"]), sent
    except (ArtifactError, LookupError, TypeError, AttributeError) as error:
        logger.warning("%s: not readable (%s); everything is sent anew", path, error)
        return "", {}


def write_state(path: Path, uri: str, parent: str, sent: Mapping[str, Sent]) -> None:
    """Replace the file, whole."""
    stages = {name: asdict(value) for name, value in sent.items()}
    write_json(path, {"uri": uri, "parent": parent, "stages": stages})
