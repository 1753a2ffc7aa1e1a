"""The corpus: token ids and loss masks of conversations, in Parquet, split by prompt."""

from __future__ import annotations

import json
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.artifacts import Artifact, ArtifactError

Split = Literal["train", "validation", "calibration", "evaluation"]
SPLITS: tuple[Split, ...] = ("train", "validation", "calibration", "evaluation")

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),  # true where the target wrote the token
        ("messages", pa.string()),  # JSON; empty for rows that came as token ids
    ]
)


@dataclass(frozen=True)
class TokenSequence:
    """One conversation as the target reads and wrote it. Both arrays have length T."""

    id: str
    domain: str
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    messages: str = ""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def opening(self) -> str:
        """What the sequence's prompt begins with: see `opening`."""
        messages = json.loads(self.messages) if self.messages else ()
        return opening(messages, self.input_ids, self.loss_mask)

    @property
    def checksum(self) -> int:
        """CRC-32 of the token ids; travels with hidden states so that they cannot be swapped."""
        return tokens_checksum(self.input_ids)

    def truncated(self, max_tokens: int) -> TokenSequence:
        """The first `max_tokens` tokens."""
        return TokenSequence(
            self.id, self.domain, self.input_ids[:max_tokens], self.loss_mask[:max_tokens], self.messages
        )


def normalised(text: str) -> str:
    """`text` without differences of case, of white space and of Unicode composition."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def opening(messages: Sequence[Mapping[str, Any]], input_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """The normalised first user message; without messages, the ids before the first supervised one (or all).

    Sequences that share it are variants of one prompt, and never lie in different splits.
    """
    for message in messages:
        if message["role"] == "user":
            return normalised(message["content"])
    prompt_ids = input_ids[: np.argmax(loss_mask) or None]
    return " ".join(map(str, prompt_ids.tolist()))


def tokens_checksum(token_ids: np.ndarray | list[int]) -> int:
    """CRC-32 over the ids as little-endian int32."""
    return zlib.crc32(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())


@dataclass(frozen=True)
class Corpus(Artifact):
    """Conversations that a target wrote, with the provenance in the record."""

    def files(self, split: Split) -> list[Path]:
        """The split's shards; where the record lists files, those alone: what came later is not part of the corpus."""
        listed = self.record.files
        return [path for path in sorted(self.path.glob(f"{split}-*.parquet")) if not listed or path.name in listed]

    def sequences(self, split: Split) -> list[TokenSequence]:
        """All conversations of a split, in the corpus' order.

        Raises ArtifactError when they are not as many as the record counts.
        """
        files = self.files(split)
        sequences = [sequence for file in files for sequence in read_shard(file)]
        if len(sequences) != (expected := self.record.counts.get(f"sequences_{split}", len(sequences))):
            raise ArtifactError(
                f"{self.path}: {split}: expected {expected} sequences, found {len(sequences)} in {len(files)} files; "
                "delete the artifact's folder to have it made again"
            )
        return sequences


def write_shard(path: Path, sequences: list[TokenSequence]) -> None:
    """Write one Parquet file, the same bytes for the same sequences. Written beside, then renamed."""
    table = pa.Table.from_pydict(
        {
            "id": [s.id for s in sequences],
            "domain": [s.domain for s in sequences],
            "input_ids": [s.input_ids for s in sequences],
            "loss_mask": [s.loss_mask for s in sequences],
            "messages": [s.messages for s in sequences],
        },
        schema=SCHEMA,
    )
    beside = path.with_name(f".{path.name}.partial")
    pq.write_table(table, beside, compression="zstd")
    beside.replace(path)


def read_shard(path: Path) -> list[TokenSequence]:
    """Read one Parquet file of a corpus."""
    table = pq.read_table(path, schema=SCHEMA)
    columns = [table.column(name) for name in SCHEMA.names]
    return [
        TokenSequence(
            id_.as_py(),
            domain.as_py(),
            np.asarray(ids.values, dtype=np.int32),
            np.asarray(mask.values.to_numpy(zero_copy_only=False), dtype=bool),
            messages.as_py(),
        )
        for id_, domain, ids, mask, messages in zip(*columns, strict=True)
    ]
