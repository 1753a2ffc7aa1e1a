"""Which conversations are asked for: read twice as streams, remembered between as ids and digests.

The first pass checks every row, finds duplicates, and fixes shares and splits; the second gives the
chosen conversations. So memory grows with the number of conversations, not with their texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stages.corpus import Split
from stages.datagen.config import DatagenConfig, check_values
from stages.datagen.conversation import Conversation, parse
from stages.datagen.sources import rows
from stages.datagen.splits import Candidate, assign_splits, take_shares


@dataclass(frozen=True)
class SetAside:
    """A conversation that is not in the corpus: `reason` is a key of the counts."""

    id: str
    reason: str  # dropped_... by a filter, failed_... by an error
    cause: str = ""

    @property
    def failed(self) -> bool:
        return self.reason.startswith("failed_")


@dataclass(frozen=True)
class Selection:
    """What the first pass found: in = chosen + set aside."""

    is_chosen_R: np.ndarray  # bool [R], by row
    splits: dict[str, Split]  # of the chosen ones, by id
    set_aside: tuple[SetAside, ...]
    needs_template: bool  # some conversation has no token ids

    @property
    def total(self) -> int:
        return len(self.is_chosen_R)


def check(config: DatagenConfig, vocab_size: int) -> Selection:
    """Refuse a config or sources that cannot work, before any process starts; gives what was selected.

    Reads every source (up to `limit`). Raises ValueError, one line, naming key or source and line.
    """
    check_values(config)
    return select(config, vocab_size)


def load(config: DatagenConfig, vocab_size: int) -> Iterator[Conversation]:
    """All conversations of all sources, in order. Raises ValueError naming source and line."""
    for row in rows(config):
        yield parse(row, regenerate=config.regenerate, vocab_size=vocab_size)


def select(config: DatagenConfig, vocab_size: int) -> Selection:
    """The first pass. Raises ValueError for a bad row, and when two conversations claim one id."""
    candidates: list[Candidate] = []
    row_of: dict[str, int] = {}
    sources: dict[str, str] = {}
    first: dict[bytes, str] = {}
    set_aside: list[SetAside] = []
    needs_template = False
    total = 0
    for total, one in enumerate(load(config, vocab_size), start=1):
        candidate = Candidate.of(one, config)
        if candidate.key_rank in first:
            cause = f"{one.source} asks the same as {sources[first[candidate.key_rank]]}"
            set_aside.append(SetAside(one.id, "dropped_duplicate", cause))
            continue
        if one.id in sources:
            raise ValueError(
                f"{one.source}: expected ids unique over all sources, found {one.id!r} also at {sources[one.id]};"
                ' set or change "id"'
            )
        first[candidate.key_rank], sources[one.id], row_of[one.id] = one.id, one.source, total - 1
        candidates.append(candidate)
        needs_template = needs_template or not one.is_tokens
    _require_distinct_parts(sources)
    taken = take_shares(candidates, config)
    chosen = [candidate for candidate in candidates if candidate.id in taken]
    shares = [SetAside(c.id, "dropped_domain_share", c.domain) for c in candidates if c.id not in taken]
    is_chosen_R = np.zeros(total, dtype=bool)
    is_chosen_R[[row_of[candidate.id] for candidate in chosen]] = True
    return Selection(is_chosen_R, assign_splits(chosen, config), (*set_aside, *shares), needs_template)


def chosen(config: DatagenConfig, selection: Selection, vocab_size: int) -> Iterator[Conversation]:
    """The second pass: the chosen conversations, in order."""
    for is_chosen, one in zip(selection.is_chosen_R, load(config, vocab_size), strict=True):
        if is_chosen:
            yield one


def part_id(id_: str, part: int) -> str:
    """The id of one of several sequences of a conversation; `part` counts from 1."""
    return f"{id_}#{part}"


def _require_distinct_parts(sources: dict[str, str]) -> None:
    for id_, source in sources.items():
        whole, _, part = id_.rpartition("#")
        if part.isdecimal() and whole in sources:
            raise ValueError(
                f"{source}: expected no id that reads like a part of another one, found {id_!r} and {whole!r}"
                f' ({sources[whole]}); change "id"'
            )
