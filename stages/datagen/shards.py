"""Shards: the pieces of a corpus that survive a crash.

A shard is a Parquet file of its sequences and a JSON file, written last, that says which
conversations it covers and what became of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from stages.artifacts import digest, file_digest, write_json
from stages.corpus import read_shard, write_shard
from stages.datagen.conversation import Conversation
from stages.datagen.outcome import ShardOutcome
from stages.datagen.prompts import SetAside


@dataclass(frozen=True)
class Shard:
    """Where the outcome of a run of consecutive conversations lies; `covers` is a digest of them, in order."""

    folder: Path
    index: int
    covers: str

    @property
    def data_path(self) -> Path:
        return self.folder / f"shard-{self.index:05d}.parquet"

    @property
    def note_path(self) -> Path:
        return self.data_path.with_suffix(".json")

    def save(self, outcome: ShardOutcome) -> None:
        write_shard(self.data_path, outcome.sequences)
        note = {
            "covers": self.covers,
            "sha256": file_digest(self.data_path),
            "kept": outcome.kept,
            "set_aside": [dataclasses.asdict(one) for one in outcome.set_aside],
            "lost_parts": outcome.lost_parts,
            "turns_left_out": outcome.turns_left_out,
            "generated_tokens": outcome.generated_tokens,
            "generate_s": outcome.generate_s,
        }
        write_json(self.note_path, note)

    def summary(self) -> ShardOutcome | None:
        """The saved outcome without its sequences, or None unless the shard is whole on disk."""
        try:
            note = json.loads(self.note_path.read_text(encoding="utf-8"))
            if note["covers"] != self.covers or note["sha256"] != file_digest(self.data_path):
                return None
        except FileNotFoundError:
            return None
        return ShardOutcome(
            kept=[(id_, number) for id_, number in note["kept"]],
            set_aside=[SetAside(**row) for row in note["set_aside"]],
            lost_parts=Counter(note["lost_parts"]),
            turns_left_out=note["turns_left_out"],
            generated_tokens=note["generated_tokens"],
            generate_s=note["generate_s"],
        )

    def load(self) -> ShardOutcome:
        """The saved outcome. The shard must be whole."""
        outcome = self.summary()
        assert outcome is not None, f"{self.note_path}: the shard is not whole"
        outcome.sequences = read_shard(self.data_path)
        return outcome


def cut(
    conversations: Iterable[Conversation], folder: Path, shard_conversations: int
) -> Iterator[tuple[Shard, tuple[Conversation, ...]]]:
    """Shards of consecutive conversations in the given order, one at a time; the last may be shorter.

    The first try fixes the size in `folder`, so that a rerun with another one finds its shards.
    """
    size_path = folder / "shard_size.json"
    if not size_path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(size_path, shard_conversations)
    size = json.loads(size_path.read_text(encoding="utf-8"))
    several = iter(conversations)
    for index in count():
        batch = tuple(islice(several, size))
        if not batch:
            return
        yield Shard(folder, index, digest([one.covers for one in batch])), batch
