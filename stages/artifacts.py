"""What stages hand to each other: artifacts, their identity, and where they lie on disk.

An artifact is a folder whose `record.json` was written last. While a stage works, the folder is
called `<name>.partial`; `Workspace.commit` writes the record and renames it, so whoever finds
`<name>` finds all of it. The record lists every file with its size and digest: what was lost or changed
later is found before it is used. This module makes every path under an output root and knows no stage.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

from stages.events import Events

RECORD = "record.json"


class ArtifactError(ValueError):
    """A folder that was asked for is not a complete artifact of the expected kind."""


def resource(default: Any) -> Any:
    """A config field that never changes a result (a size of a pool, a path, an address)."""
    return field(default=default, metadata={"identity": False})


def fingerprint(config: Any) -> Any:
    """`config` as plain JSON values, without the fields declared by `resource`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {
            f.name: fingerprint(getattr(config, f.name))
            for f in dataclasses.fields(config)
            if f.metadata.get("identity", True)
        }
    if isinstance(config, Mapping):
        return {str(key): fingerprint(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [fingerprint(value) for value in config]
    return str(config) if isinstance(config, Path) else config


def digest(value: Any) -> str:
    """Sixteen hex digits of SHA-256 over the canonical JSON of `value`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises ArtifactError naming the file when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: expected JSON, found {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or all of the new."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def write_json(path: Path, value: Any) -> None:
    """`write_whole` of indented JSON; NaN is refused, since few readers accept it."""
    write_whole(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Record:
    """What `record.json` says of an artifact.

    `counts` are whole numbers of things (samples, rounds), `metrics` carry their unit in the key,
    `facts` are whatever the kind needs to be read again (layer ids, sampling parameters). `files` are
    [bytes, SHA-256] by path inside the artifact.
    """

    kind: str
    identity: str
    format_version: int
    config: dict[str, Any]
    inputs: dict[str, str]
    counts: dict[str, int]
    metrics: dict[str, float]
    facts: dict[str, Any]
    code_version: str
    created: str
    seconds: float
    files: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Raises ArtifactError when there is no readable record in folder `path`."""
        try:
            record = cls(**read_json(path / RECORD))
        except TypeError as error:
            raise ArtifactError(f"{path / RECORD}: expected a complete artifact's record, found {error}") from error
        for name in ("config", "inputs", "counts", "metrics", "facts", "files"):
            if not isinstance(found := getattr(record, name), dict):
                raise ArtifactError(f"{path / RECORD}: {name}: expected an object, found {found!r}")
        return record


@dataclass(frozen=True)
class Artifact:
    """A finished output: a folder and its record. Subclasses name the files inside."""

    path: Path
    record: Record

    @classmethod
    def load(cls, path: Path) -> Self:
        """Open a finished artifact. Raises ArtifactError when incomplete or of another kind."""
        record = Record.read(path)
        if record.kind != cls.__name__:
            raise ArtifactError(f"{path}: expected a {cls.__name__}, found a {record.kind}")
        return cls(path, record)

    @classmethod
    def open(cls, path: Path) -> Artifact:
        """Open a finished artifact of any kind, as a plain Artifact."""
        return Artifact(path, Record.read(path))

    def check_files(self, *, contents: bool) -> None:
        """Raise ArtifactError for the first file of the record that is missing or has another size.

        With `contents` also for one with another digest, which reads everything.
        """
        for name, (size_bytes, sha256) in self.record.files.items():
            path = self.path / name
            found = path.stat().st_size if path.is_file() else None
            if found != size_bytes:
                told = "no such file" if found is None else f"{found}"
                raise ArtifactError(f"{path}: expected {size_bytes} bytes, found {told}")
            if contents and (digest_now := file_digest(path)) != sha256:
                raise ArtifactError(
                    f"{path}: changed since it was made: expected SHA-256 {sha256[:16]}…, found {digest_now[:16]}…; "
                    "delete the artifact's folder to have it made again"
                )

    @property
    def identity(self) -> str:
        """Sixteen hex digits that follow from the config and the inputs."""
        return self.record.identity


A = TypeVar("A", bound=Artifact)


@contextmanager
def exclusive(lock_file: Path, otherwise: str) -> Iterator[None]:
    """Hold a lock that dies with the process; raises BlockingIOError saying `otherwise` when another has it."""
    with lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(otherwise) from error
        yield


@dataclass(frozen=True)
class Workspace:
    """Where one stage builds one artifact.

    `path` is the `.partial` folder. It survives a crash, and the next try of the same identity
    finds in it whatever shards or checkpoints were whole.
    """

    final: Path
    identity: str
    format_version: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path:
        return self.final.with_name(self.final.name + ".partial")

    @property
    def events(self) -> Events:
        return Events(self.path)

    @property
    def busy(self) -> bool:
        """Whether a process holds the workspace now."""
        try:
            with self._lock_file.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def _lock_file(self) -> Path:
        return self.final.with_name(self.final.name + ".lock")

    @property
    def layout(self) -> Layout:
        """Of the output root that this is under."""
        return Layout(self.final.parent.parent)

    @contextmanager
    def locked(self) -> Iterator[Self]:
        """Hold the workspace against other processes; the lock dies with this one.

        Raises BlockingIOError with the folder's name when another run is building it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with exclusive(self._lock_file, f"{self.path}: another run is building this artifact; wait for it or stop it"):
            yield dataclasses.replace(self, started=time.monotonic())

    def commit(
        self,
        kind: type[A],
        *,
        counts: Mapping[str, int],
        metrics: Mapping[str, float],
        facts: Mapping[str, Any],
        drop: Sequence[str] = (),
    ) -> A:
        """Write the record, make the folder visible, then remove the working files named in `drop`.

        In this order: a process that is killed in between leaves rubbish behind, but never takes away
        what a resumed stage would need. Hidden files are the remains of killed writers and go first.
        """
        self.events.finish()
        for path in self.path.rglob(".*"):
            remove(path)
        record = Record(
            kind=kind.__name__,
            identity=self.identity,
            format_version=self.format_version,
            config=self.config,
            inputs=self.inputs,
            counts=dict(counts),
            metrics=dict(metrics),
            facts=dict(facts),
            code_version=code_version(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - self.started, 3),
            files=_listed(self.path, {*drop, RECORD}),
        )
        write_json(self.path / RECORD, dataclasses.asdict(record))
        remove(self.final)
        self.path.rename(self.final)
        for name in drop:
            remove(self.final / name)
        return kind.load(self.final)


def _listed(folder: Path, but: Set[str]) -> dict[str, list[Any]]:
    """[bytes, SHA-256] of every file in `folder`, without the entries named in `but`."""
    parts = [path for path in sorted(folder.iterdir()) if path.name not in but]
    files = [file for part in parts for file in (sorted(part.rglob("*")) if part.is_dir() else [part])]
    return {
        file.relative_to(folder).as_posix(): [file.stat().st_size, file_digest(file)]
        for file in files
        if file.is_file()
    }


def remove(path: Path) -> None:
    """Delete a file or a folder; a missing one is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Layout:
    """Every path under one output root."""

    root: Path

    def artifact(self, stage: str, identity: str) -> Path:
        return self.root / "artifacts" / f"{stage}-{identity}"

    def states(self, identity: str) -> Path:
        """Hidden states that are kept, of all runs that use the same."""
        return self.root / "states" / identity

    def run(self, run_id: str) -> Path:
        return self.root / "runs" / run_id

    def runs(self) -> list[Path]:
        """Folders of all runs, oldest first."""
        return sorted(path for path in (self.root / "runs").glob("*") if (path / "run.json").exists())

    def others(self, stage: str, identity: str) -> list[Path]:
        """Complete artifacts of `stage` with another identity, newest first."""
        found = [p for p in (self.root / "artifacts").glob(f"{stage}-*") if (p / RECORD).exists()]
        found = [p for p in found if p != self.artifact(stage, identity)]
        return sorted(found, key=lambda p: (p / RECORD).stat().st_mtime, reverse=True)


@cache
def code_version() -> str:
    """The git commit of this code, with `+changes` when files differ; `unknown` outside a checkout."""
    here = Path(__file__).parent
    git: Callable[..., str] = lambda *args: subprocess.run(  # noqa: E731
        ["git", *args], cwd=here, capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("DSPARK_CODE_VERSION", "unknown")
