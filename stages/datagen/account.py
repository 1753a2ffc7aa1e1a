"""From shards to the corpus: split files in prompt order, and an account of every prompt."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stages.artifacts import file_digest, remove, write_whole
from stages.corpus import SPLITS, Split, TokenSequence, write_shard
from stages.datagen.generate import SetAside
from stages.datagen.shards import Shard

SET_ASIDE = "set_aside.jsonl"
CONVERSATIONS_PER_FILE = 1024
"""Rows of a split file. Not a config: the bytes of a corpus must not depend on how it was made."""


@dataclass
class Tally:
    """What the corpus holds, added up while it is written."""

    kept: dict[str, Counter[Split]] = field(default_factory=lambda: defaultdict(Counter))  # by domain
    ids: set[str] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)
    set_aside_ids: set[str] = field(default_factory=set)
    tokens: int = 0
    supervised_tokens: int = 0
    generated_tokens: int = 0
    generate_s: float = 0.0
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by name

    def keep(self, sequence: TokenSequence, split: Split) -> None:
        self.kept[sequence.domain][split] += 1
        self.ids.add(sequence.id)
        self.tokens += len(sequence)
        self.supervised_tokens += int(sequence.loss_mask.sum())

    @property
    def per_split(self) -> Counter[Split]:
        return sum(self.kept.values(), Counter())

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / self.tokens

    def check(self, prompts_in: int, ids: set[str]) -> None:
        """Refuse a corpus that must not be trained on. `ids` are those of all prompts but duplicates.

        Raises RuntimeError unless every prompt is accounted for once, ValueError when nothing is
        left to train on or the loss mask is all zeros or all ones.
        """
        accounted = len(self.ids) + self.reasons.total()
        if self.ids | self.set_aside_ids != ids or self.ids & self.set_aside_ids or accounted != prompts_in:
            raise RuntimeError(
                f"datagen: expected {prompts_in} prompts kept or set aside once,"
                f" found {len(self.ids)} kept and {dict(self.reasons)}"
            )
        if not self.per_split["train"]:
            raise ValueError(
                f"datagen: expected conversations to train on, found none left of {prompts_in} prompts:"
                f" {dict(self.reasons)}; see set_aside.jsonl for causes"
            )
        if not 0.0 < self.supervised_share < 1.0:
            raise ValueError(
                f"datagen: expected a supervised share between 0 and 1, found {self.supervised_share:g};"
                " see what the chat template renders"
            )

    def counts(self, prompts_in: int) -> dict[str, int]:
        per_split = {f"kept_{split}": self.per_split[split] for split in SPLITS}
        return {"prompts_in": prompts_in, "kept": len(self.ids), **per_split, **dict(sorted(self.reasons.items()))}

    def metrics(self) -> dict[str, float]:
        """Speeds are over the time in `generate`, of all tries, without starting engines."""
        return {
            "generated_tokens": self.generated_tokens,
            "generate_s": self.generate_s,
            "generated_tok_per_s": self.generated_tokens / max(self.generate_s, 1e-9),
            "supervised_share": self.supervised_share,
            "mean_sequence_tokens": self.tokens / len(self.ids),
            "mean_supervised_tokens": self.supervised_tokens / len(self.ids),
        }

    def facts(self) -> dict[str, Any]:
        """`corpus_sha256` is what `sha256sum *.parquet | sha256sum` prints in the corpus' folder."""
        listing = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(self.files.items()))
        domains = {domain: {split: kept[split] for split in SPLITS} for domain, kept in sorted(self.kept.items())}
        return {
            "files": self.files,
            "corpus_sha256": hashlib.sha256(listing.encode()).hexdigest(),
            "supervised_share": self.supervised_share,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "domains": domains,
        }


def write_corpus(
    shards: Sequence[Shard], splits: Mapping[str, Split], duplicates: Sequence[SetAside], folder: Path
) -> Tally:
    """Write `<split>-<number>.parquet` and the list of what was set aside into `folder`.

    All `shards` must be whole; `splits` gives the split of each conversation by id.
    """
    for split in SPLITS:  # of a try that died here
        for stale in folder.glob(f"{split}-*.parquet"):
            remove(stale)
    tally = Tally()
    pending: dict[Split, list[TokenSequence]] = {split: [] for split in SPLITS}
    written: Counter[Split] = Counter()

    def flush(split: Split) -> None:
        path = folder / f"{split}-{written[split]:05d}.parquet"
        write_shard(path, pending[split])
        tally.files[path.name] = file_digest(path)
        written[split] += 1
        pending[split] = []

    lost = list(duplicates)
    for shard in shards:
        outcome = shard.load()
        tally.generated_tokens += outcome.generated_tokens
        tally.generate_s += outcome.generate_s
        lost += outcome.set_aside
        for sequence in outcome.sequences:
            split = splits[sequence.id]
            tally.keep(sequence, split)
            pending[split].append(sequence)
            if len(pending[split]) == CONVERSATIONS_PER_FILE:
                flush(split)
    for split in SPLITS:
        if pending[split]:
            flush(split)
    tally.reasons.update(one.reason for one in lost)
    tally.set_aside_ids.update(one.id for one in lost[len(duplicates) :])
    write_whole(folder / SET_ASIDE, "".join(json.dumps(asdict(one)) + "\n" for one in lost))
    return tally
