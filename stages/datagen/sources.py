"""Where rows come from: JSONL and Parquet files, folders of them, and data sets of the Hub.

Owns the contents of sources and streams their rows. Knows nothing of what a row means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from stages.artifacts import digest, file_digest
from stages.datagen.config import DatagenConfig, HubDataset

REPOSITORY = Path(__file__).resolve().parents[2]
SUFFIXES = (".jsonl", ".parquet")
FORMS = ("input_ids", "turns", "messages", "conversations", "prompt")  # a row has the form of the first one present
COLUMNS = ("id", "domain", "tools", "loss_mask", *FORMS)  # other columns are not read


class Row(NamedTuple):
    """One row of a source. `stem` is the default domain and begins the default id, `line` (from 1) ends it."""

    where: str  # source:line, for messages to people
    stem: str
    line: int
    value: Any


@dataclass(frozen=True)
class File:
    """A JSONL or Parquet file; `name` is how the config gets to it."""

    name: str
    path: Path

    @property
    def stem(self) -> str:
        return self.path.stem

    def identity(self) -> str:
        """SHA-256 of the content."""
        return file_digest(self.path)

    def told(self) -> str:
        """What a record says of this source."""
        return self.identity()

    def rows(self) -> Iterator[tuple[int, Any]]:
        return _parquet_rows(self.path, self.name) if self.path.suffix == ".parquet" else _jsonl_rows(self)


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set, under `stem` in the config. Raises ValueError when it cannot be reached or read."""

    stem: str
    dataset: HubDataset

    @property
    def name(self) -> str:
        return f"datagen.hub.{self.stem}"

    @property
    def _is_local(self) -> bool:
        return Path(self.dataset.path).expanduser().is_dir()

    def identity(self) -> list[str | None]:
        """Content of the folder or commit of the Hub's repository, and what is read of it."""
        return [self._content(), self.dataset.name, self.dataset.split]

    def told(self) -> dict[str, Any]:
        """What a record says: a revision that moves, and where it was."""
        d, content = self.dataset, self._content()
        said = {"path": d.path, "name": d.name, "split": d.split}
        if self._is_local:
            return said | {"sha256": content}
        return said | {"revision": d.revision, "commit": content, "revision_moves": d.revision != content}

    def rows(self) -> Iterator[tuple[int, Any]]:
        from datasets import load_dataset  # seconds to import, and only this kind of source needs it
        from datasets.exceptions import DatasetsError

        d, line = self.dataset, 0
        folder = self._folder()
        try:
            for row in load_dataset(str(folder), d.name, split=d.split, streaming=True):
                line += 1
                yield line, _dense(row)
        except (DatasetsError, ValueError, OSError, RuntimeError) as error:
            raise ValueError(
                f"{self.name}: expected rows of split {d.split!r} of {d.path}"
                f"{f', configuration {d.name!r}' if d.name else ''}, found none after row {line} ({_first_line(error)})"
            ) from error

    def _content(self) -> str:
        if not self._is_local:
            return self._commit()
        folder = Path(self.dataset.path).expanduser()
        return digest([[str(path), file_digest(folder / path)] for path in _visible_files(folder)])

    def _folder(self) -> Path:
        """A folder that holds the data set; one of the Hub comes through its cache, whole."""
        if self._is_local:
            return Path(self.dataset.path).expanduser()
        from huggingface_hub import snapshot_download

        commit = self._commit()
        try:
            return Path(snapshot_download(self.dataset.path, repo_type="dataset", revision=commit))
        except OSError as error:
            raise self._unreachable(error) from error

    def _commit(self) -> str:
        """The commit that the revision names now; when the Hub cannot be asked, when it was last asked."""
        d = self.dataset
        if d.path.startswith((".", "/", "~")) or d.path.count("/") != 1:
            raise ValueError(
                f"{self.name}.path={d.path}: expected an existing folder or a Hub id (owner/name), found neither"
            )
        if d.revision is None:
            raise ValueError(
                f"{self.name}.revision: must be set for a Hub id ({self.name}.path={d.path}), found null; "
                "a branch moves: give a commit, or name the branch to follow it"
            )
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionResolutionError

        try:
            return str(HfApi().resolve_revision(d.path, repo_type="dataset", revision=d.revision).resolved)
        except (RevisionResolutionError, OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ValueError:
        d = self.dataset
        return ValueError(
            f"{self.name}: expected {d.path} at revision {d.revision} on the Hub or in its cache here, found neither"
            f" ({_first_line(error)})"
        )


Source = File | HubSplit


def sources(config: DatagenConfig) -> list[Source]:
    """All sources, in reading order.

    A path is relative to the current directory, or to the repository when it is not there.
    Raises ValueError for a missing path, an unknown suffix or a folder without prompt files.
    """
    if not config.prompts and not config.hub:
        raise ValueError(
            "datagen.prompts: expected at least one JSONL or Parquet file or folder (or a data set in datagen.hub),"
            " found none"
        )
    found: dict[str, Source] = {}
    for name in config.prompts:
        path = next((p for p in (Path(name).expanduser(), REPOSITORY / name) if p.exists()), None)
        if path is None:
            raise ValueError(
                f"datagen.prompts={name}: expected a file or folder here or under the repository, found nothing"
            )
        if path.is_file():
            if path.suffix not in SUFFIXES:
                raise ValueError(
                    f"datagen.prompts={name}: expected a file ending in {' or '.join(SUFFIXES)}, found {path.name}"
                )
            found[name] = File(name, path)
            continue
        inside = [File(str(Path(name) / p), path / p) for p in _visible_files(path) if p.suffix in SUFFIXES]
        if not inside:
            raise ValueError(
                f"datagen.prompts={name}: expected {' or '.join(SUFFIXES)} files in this folder, found none"
            )
        found.update({file.name: file for file in inside})
    return [*found.values(), *(HubSplit(stem, dataset) for stem, dataset in config.hub.items())]


def content(config: DatagenConfig) -> list[list[Any]]:
    """What an identity depends on: the contents behind the names, never the places."""
    return [[source.stem, source.identity()] for source in sources(config)]


def told(config: DatagenConfig) -> dict[str, Any]:
    """What a record says of every source, by its name in the config."""
    return {source.name: source.told() for source in sources(config)}


def rows(config: DatagenConfig) -> Iterator[Row]:
    """All rows of all sources, streamed. Raises ValueError naming source and line."""
    for source in sources(config):
        line = 0
        for line, value in islice(source.rows(), config.limit):
            yield Row(f"{source.name}:{line}", source.stem, line, value)
        if not line:
            raise ValueError(f"{source.name}: expected at least one row, found it empty")


def _visible_files(folder: Path) -> list[Path]:
    """Files below `folder` without hidden ones, relative to it, sorted."""
    inside = [p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file()]
    return [p for p in inside if not any(part.startswith(".") for part in p.parts)]


def _jsonl_rows(file: File) -> Iterator[tuple[int, Any]]:
    with file.path.open("rb") as lines:
        for line, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            try:
                yield line, json.loads(raw)
            except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
                raise ValueError(
                    f"{file.name}:{line}: expected one JSON object a line, found {short(raw)} ({error})"
                ) from error


def _parquet_rows(path: Path, name: str) -> Iterator[tuple[int, Any]]:
    line = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = [c for c in COLUMNS if c in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    line += 1
                    yield line, _dense(row)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{name}: expected a Parquet file, found one that cannot be read after row {line} ({_first_line(error)})"
        ) from error


def _dense(value: Any) -> Any:
    """Without the nulls that Arrow puts where a key is absent: all structs of a column have all keys."""
    if isinstance(value, dict):
        return {key: _dense(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_dense(inner) for inner in value]
    return value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def short(value: Any) -> str:
    """A value as a message to people shows it."""
    text = value.decode(errors="replace").strip() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
