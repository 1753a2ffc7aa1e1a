"""Where prompts come from: JSONL and Parquet files, read and checked before anything starts.

Owns the row format and the notion of "the same prompt". Knows nothing of tokens or models.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.artifacts import digest, file_digest
from stages.datagen.config import DatagenConfig, check_values

REPOSITORY = Path(__file__).resolve().parents[2]
SUFFIXES = (".jsonl", ".parquet")
TEXT_FIELDS = ("turns", "messages", "prompt")  # the first one present is read
EXPECTED_ROW = '"turns": [text, ...], "messages": [{"role", "content"}, ...] or "prompt": text'


@dataclass(frozen=True)
class Prompt:
    """What one conversation's human side says: an optional system message and the user's turns."""

    id: str
    domain: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""  # file:line, for messages to people

    @cached_property
    def key(self) -> str:
        """Digest of all normalised user turns: equal for prompts that count as duplicates."""
        return digest([normalised(turn) for turn in self.turns])

    @cached_property
    def opening(self) -> str:
        """The normalised first user turn: prompts that share it never lie in different splits."""
        return normalised(self.turns[0])


def normalised(text: str) -> str:
    """`text` without differences of case, of white space and of Unicode composition."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def check(config: DatagenConfig) -> None:
    """Refuse a config or prompt files that cannot work, before any process starts.

    Reads every prompt file (up to `limit`). Raises ValueError, one line, naming key or file and line.
    """
    check_values(config)
    unique(load_prompts(config))


def prompt_files(config: DatagenConfig) -> dict[str, Path]:
    """The files behind `config.prompts`, by the name the config gives them, in reading order.

    A path is relative to the current directory, or to the repository when it is not there.
    Raises ValueError for a missing path, an unknown suffix or a folder without prompt files.
    """
    if not config.prompts:
        raise ValueError("datagen.prompts: expected at least one JSONL or Parquet file or folder, found none")
    files: dict[str, Path] = {}
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
            files[name] = path
            continue
        inside = [p.relative_to(path) for p in sorted(path.rglob("*")) if p.suffix in SUFFIXES]
        visible = [p for p in inside if not any(part.startswith(".") for part in p.parts)]
        if not visible:
            raise ValueError(
                f"datagen.prompts={name}: expected {' or '.join(SUFFIXES)} files in this folder, found none"
            )
        files.update({str(Path(name) / p): path / p for p in visible})
    return files


def source_digests(config: DatagenConfig) -> dict[str, str]:
    """SHA-256 of every prompt file, by its name in the config: the contents behind `prompts`."""
    return {name: file_digest(path) for name, path in prompt_files(config).items()}


def load_prompts(config: DatagenConfig) -> list[Prompt]:
    """All prompts of all files, in order, duplicates included. Raises ValueError naming file and line."""
    prompts = []
    for name, path in prompt_files(config).items():
        rows = _parquet_rows(path, name) if path.suffix == ".parquet" else _jsonl_rows(path, name)
        found = [_prompt(row, f"{name}:{line}", path.stem, line) for line, row in islice(rows, config.limit)]
        if not found:
            raise ValueError(f"{name}: expected at least one row with {EXPECTED_ROW}, found an empty file")
        prompts += found
    return prompts


def unique(prompts: list[Prompt]) -> tuple[list[Prompt], list[tuple[Prompt, Prompt]]]:
    """Split into the first of each prompt, and (duplicate, first) pairs.

    Raises ValueError when two different prompts claim one id, for everything later goes by id.
    """
    first: dict[str, Prompt] = {}
    by_id: dict[str, Prompt] = {}
    duplicates = []
    for prompt in prompts:
        if prompt.key in first:
            duplicates.append((prompt, first[prompt.key]))
            continue
        if prompt.id in by_id:
            other = by_id[prompt.id].source
            raise ValueError(
                f"{prompt.source}: expected ids unique over all files, found {prompt.id!r} also at {other};"
                ' set or change "id"'
            )
        first[prompt.key] = by_id[prompt.id] = prompt
    return list(first.values()), duplicates


def _jsonl_rows(path: Path, name: str) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                yield line, json.loads(raw)
            except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
                raise ValueError(
                    f"{name}:{line}: expected one JSON object a line, found {_short(raw)} ({error})"
                ) from error


def _parquet_rows(path: Path, name: str) -> Iterator[tuple[int, Any]]:
    line = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = [c for c in ("id", "domain", *TEXT_FIELDS) if c in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    line += 1
                    yield line, row
    except pa.ArrowInvalid as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(
            f"{name}: expected a Parquet file, found one that cannot be read after row {line} ({first_line})"
        ) from error


def _prompt(row: Any, where: str, stem: str, line: int) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, found {_short(row)}")
    fields = {key: value for key, value in row.items() if value is not None}
    given = next((field for field in TEXT_FIELDS if field in fields), None)
    if given is None:
        raise ValueError(f"{where}: expected {EXPECTED_ROW}, found only {sorted(fields)}")
    system = None
    if given == "messages":
        system, turns = _human_side(fields["messages"], where)
    else:
        texts = [fields["prompt"]] if given == "prompt" else fields["turns"]
        if not isinstance(texts, list) or not texts:
            raise ValueError(f'{where}: expected "turns" to be a list of at least one text, found {_short(texts)}')
        turns = tuple(_text(text, where, f'"{given}"') for text in texts)
    id_ = fields.get("id", f"{stem}-{line}")
    if isinstance(id_, bool) or not isinstance(id_, str | int):
        raise ValueError(f'{where}: expected "id" to be a text or a whole number, found {_short(id_)}')
    domain = _text(fields.get("domain", stem), where, '"domain"')
    return Prompt(_text(str(id_), where, '"id"'), domain, turns, system, where)


def _human_side(messages: Any, where: str) -> tuple[str | None, tuple[str, ...]]:
    """System text and user turns; what the assistant said is dropped, the target says its own."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(
            f'{where}: expected "messages" to be a list of {{"role", "content"}}, found {_short(messages)}'
        )
    system, turns = None, []
    for place, message in enumerate(messages):
        role, what = message.get("role"), f'"content" of message {place}'
        if role == "system" and place == 0:
            system = _text(message.get("content"), where, what)
        elif role == "user":
            turns.append(_text(message.get("content"), where, what))
        elif role != "assistant":
            raise ValueError(
                f"{where}: expected roles user and assistant after at most one leading system,"
                f" found {role!r} in message {place}"
            )
    if not turns:
        raise ValueError(f'{where}: expected "messages" with at least one from the user, found none')
    return system, tuple(turns)


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected {what} to be a text that is not empty, found {_short(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON lets half a surrogate pair through, tokenizers do not
        raise ValueError(
            f"{where}: expected {what} to be valid Unicode, found {error.reason} at character {error.start}"
        ) from error
    return value


def _short(value: Any) -> str:
    text = value.decode(errors="replace").strip() if isinstance(value, bytes) else repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
