"""Shards: the pieces of a corpus that survive a crash.

A shard is a Parquet file of its kept conversations and a JSON file, written last, that says which
prompts it covers and what became of the others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages.artifacts import digest, file_digest, write_json
from stages.corpus import read_shard, write_shard
from stages.datagen.generate import SetAside, ShardOutcome
from stages.datagen.prompts import Prompt


@dataclass(frozen=True)
class Shard:
    """A run of consecutive prompts, and where its outcome lies."""

    folder: Path
    index: int
    prompts: tuple[Prompt, ...]

    @property
    def data_path(self) -> Path:
        return self.folder / f"shard-{self.index:05d}.parquet"

    @property
    def note_path(self) -> Path:
        return self.data_path.with_suffix(".json")

    @property
    def covers(self) -> str:
        """Digest of the prompts, in order; another shard size or edited prompts give another one."""
        return digest([[p.id, p.domain, p.system, p.turns] for p in self.prompts])

    def save(self, outcome: ShardOutcome) -> None:
        write_shard(self.data_path, outcome.sequences)
        note = {
            "covers": self.covers,
            "sha256": file_digest(self.data_path),
            "set_aside": [dataclasses.asdict(one) for one in outcome.set_aside],
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
        set_aside = [SetAside(**row) for row in note["set_aside"]]
        return ShardOutcome([], set_aside, note["generated_tokens"], note["generate_s"])

    def load(self) -> ShardOutcome:
        """The saved outcome. The shard must be whole."""
        outcome = self.summary()
        assert outcome is not None, f"{self.note_path}: the shard is not whole"
        outcome.sequences = read_shard(self.data_path)
        return outcome


def cut(prompts: Sequence[Prompt], folder: Path, shard_conversations: int) -> list[Shard]:
    """Shards of consecutive prompts in the given order; the last may be shorter.

    The first try fixes the size in `folder`, so that a rerun with another one finds its shards.
    """
    size_path = folder / "shard_size.json"
    if not size_path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(size_path, shard_conversations)
    size = json.loads(size_path.read_text(encoding="utf-8"))
    starts = range(0, len(prompts), size)
    return [Shard(folder, index, tuple(prompts[start : start + size])) for index, start in enumerate(starts)]
