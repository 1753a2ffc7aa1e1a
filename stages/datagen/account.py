"""From shards to the corpus: split files in the sources' order, and an account of every conversation."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from stages.artifacts import file_digest, remove, write_whole
from stages.corpus import SPLITS, Split, TokenSequence, write_shard
from stages.datagen.prompts import Selection
from stages.datagen.shards import Shard

SET_ASIDE = "set_aside.jsonl"
SEQUENCES_PER_FILE = 1024
"""Rows of a split file. Not a config: the bytes of a corpus must not depend on how it was made."""


@dataclass
class Tally:
    """What the corpus holds, added up while it is written."""

    kept: dict[str, Counter[Split]] = field(default_factory=lambda: defaultdict(Counter))  # conversations, by domain
    sequences: Counter[Split] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)
    lost_parts: Counter[str] = field(default_factory=Counter)
    turns_left_out: int = 0
    set_aside_ids: set[str] = field(default_factory=set)
    tokens: int = 0
    supervised_tokens: int = 0
    generated_tokens: int = 0
    generate_s: float = 0.0
    files: dict[str, str] = field(default_factory=dict)  # SHA-256 by name

    def keep(self, id_: str, sequences: Sequence[TokenSequence], split: Split) -> None:
        self.kept[sequences[0].domain][split] += 1
        self.sequences[split] += len(sequences)
        self.ids.add(id_)
        self.tokens += sum(map(len, sequences))
        self.supervised_tokens += sum(int(sequence.loss_mask.sum()) for sequence in sequences)

    @property
    def per_split(self) -> Counter[Split]:
        return sum(self.kept.values(), Counter())

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / self.tokens

    def check(self, selection: Selection) -> None:
        """Refuse a corpus that must not be trained on.

        Raises RuntimeError unless every conversation is accounted for once, ValueError when nothing is
        left to train on or the loss mask is all zeros or all ones.
        """
        ids, total = selection.splits.keys(), selection.total
        accounted = len(self.ids) + self.reasons.total()
        if self.ids | self.set_aside_ids != ids or self.ids & self.set_aside_ids or accounted != total:
            raise RuntimeError(
                f"datagen: expected {total} prompts kept or set aside once,"
                f" found {len(self.ids)} kept and {dict(self.reasons)}"
            )
        if not self.per_split["train"]:
            raise ValueError(
                f"datagen: expected conversations to train on, found none left of {total} prompts:"
                f" {dict(self.reasons)}; see {SET_ASIDE} for causes"
            )
        if not 0.0 < self.supervised_share < 1.0:
            raise ValueError(
                f"datagen: expected a supervised share between 0 and 1, found {self.supervised_share:g};"
                " see what the chat template renders, or the loss masks that were given"
            )

    def counts(self, prompts_in: int) -> dict[str, int]:
        """Conversations: prompts_in = kept + dropped_... + failed_...; and what the kept ones are: sequences.

        `parts_dropped_...` are sequences that they lost, `turns_left_out` their turns without an answer
        after one that was cut, left no room, or cannot be shown by the template.
        """
        return {
            "prompts_in": prompts_in,
            "kept": len(self.ids),
            **{f"kept_{split}": self.per_split[split] for split in SPLITS},
            **{f"sequences_{split}": self.sequences[split] for split in SPLITS},
            "turns_left_out": self.turns_left_out,
            **dict(sorted(self.reasons.items())),
            **{f"parts_{reason}": lost for reason, lost in sorted(self.lost_parts.items())},
        }

    def metrics(self) -> dict[str, float]:
        """Speeds are over the time in `generate`, of all tries, without starting engines."""
        sequences = self.sequences.total()
        shape = {
            "supervised_share": self.supervised_share,
            "mean_sequence_tokens": self.tokens / sequences,
            "mean_supervised_tokens": self.supervised_tokens / sequences,
        }
        if not self.generated_tokens:
            return shape
        return shape | {
            "generated_tokens": self.generated_tokens,
            "generate_s": self.generate_s,
            "generated_tok_per_s": self.generated_tokens / max(self.generate_s, 1e-9),
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


def write_corpus(shards: Sequence[Shard], selection: Selection, folder: Path) -> Tally:
    """Write `<split>-<number>.parquet` and the list of what was set aside into `folder`.

    All `shards` must be whole. Sequences of one conversation lie in one split, one after the other.
    """
    for split in SPLITS:  # of a try that died here
        for stale in folder.glob(f"{split}-*.parquet"):
            remove(stale)
    tally = Tally()
    pending: dict[Split, list[TokenSequence]] = {split: [] for split in SPLITS}
    written: Counter[Split] = Counter()

    def flush(split: Split, least: int) -> None:
        while len(pending[split]) >= least:
            path = folder / f"{split}-{written[split]:05d}.parquet"
            write_shard(path, pending[split][:SEQUENCES_PER_FILE])
            tally.files[path.name] = file_digest(path)
            written[split] += 1
            del pending[split][:SEQUENCES_PER_FILE]

    lost = list(selection.set_aside)
    for shard in shards:
        outcome = shard.load()
        tally.generated_tokens += outcome.generated_tokens
        tally.generate_s += outcome.generate_s
        tally.lost_parts += outcome.lost_parts
        tally.turns_left_out += outcome.turns_left_out
        lost += outcome.set_aside
        sequences = iter(outcome.sequences)
        for id_, number in outcome.kept:
            split, of_one = selection.splits[id_], list(islice(sequences, number))
            tally.keep(id_, of_one, split)
            pending[split] += of_one
            flush(split, SEQUENCES_PER_FILE)
    for split in SPLITS:
        flush(split, 1)
    tally.reasons.update(one.reason for one in lost)
    tally.set_aside_ids.update(one.id for one in lost[len(selection.set_aside) :])
    write_whole(folder / SET_ASIDE, "".join(json.dumps(asdict(one)) + "\n" for one in lost))
    return tally
