"""Which conversation serves which purpose: training, validation, calibration or evaluation."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple, Self

from stages.corpus import Split
from stages.datagen.config import DatagenConfig
from stages.datagen.conversation import Conversation

MIN_PROMPTS_TO_HOLD_OUT = 10
"""A domain of at least so many prompts gives at least one to every split with a share above 0."""


class Candidate(NamedTuple):
    """What is remembered of a conversation while all of them are looked at: no texts.

    Ranks are equal for equal texts, in an order that only the seed decides.
    """

    id: str
    domain: str
    opening_rank: bytes
    key_rank: bytes

    @classmethod
    def of(cls, one: Conversation, config: DatagenConfig) -> Self:
        key = one.key(config.regenerate)
        return cls(one.id, one.domain, _rank(config.seed, one.opening), _rank(config.seed, key))


def assign_splits(candidates: Iterable[Candidate], config: DatagenConfig) -> dict[str, Split]:
    """The split of each conversation, by id; a pure function of `seed` and the set of conversations.

    Stratified: each domain is ordered by a hash of (seed, opening) and cut by the shares. Those with
    one opening (a conversation and its longer variant) go together, into the domain of the first of
    them: otherwise an evaluation prompt would be trained on as the start of another one.
    """
    members: dict[bytes, list[str]] = defaultdict(list)
    openings: dict[str, list[bytes]] = defaultdict(list)
    for candidate in candidates:
        if candidate.opening_rank not in members:
            openings[candidate.domain].append(candidate.opening_rank)
        members[candidate.opening_rank].append(candidate.id)
    splits: dict[str, Split] = {}
    for of_domain in openings.values():
        for opening, split in zip(sorted(of_domain), _cut(len(of_domain), config), strict=True):
            splits.update(dict.fromkeys(members[opening], split))
    return splits


def take_shares(candidates: Iterable[Candidate], config: DatagenConfig) -> set[str]:
    """Ids of as many conversations as have the domains in `domain_shares`; which, a hash with the seed decides.

    Raises ValueError when a domain has no share, or a share no conversation.
    """
    by_domain: dict[str, list[tuple[bytes, str]]] = defaultdict(list)
    for candidate in candidates:
        by_domain[candidate.domain].append((candidate.key_rank, candidate.id))
    if not config.domain_shares:
        return {id_ for of_domain in by_domain.values() for _, id_ in of_domain}
    for domain in by_domain.keys() - config.domain_shares.keys():
        raise ValueError(
            f"datagen.domain_shares: expected a share (0 to leave it out) for every domain, found none for {domain!r}"
        )
    shares = {domain: share for domain, share in config.domain_shares.items() if share > 0}
    for domain in shares.keys() - by_domain.keys():
        raise ValueError(
            f"datagen.domain_shares={config.domain_shares}: expected conversations of {domain!r}, found none"
        )
    total = min(len(by_domain[domain]) / share for domain, share in shares.items())
    return {
        id_
        for domain, share in shares.items()
        for _, id_ in sorted(by_domain[domain])[: max(1, int(total * share + 1e-6))]
    }


def _cut(count: int, config: DatagenConfig) -> list[Split]:
    """Splits of a domain's ordered prompts, held-out ones first; training keeps at least one."""
    shares: tuple[tuple[Split, float], ...] = (
        ("evaluation", config.evaluation_share),
        ("calibration", config.calibration_share),
        ("validation", config.validation_share),
    )
    held_out: list[Split] = []
    for split, share in shares:
        least = 1 if share > 0 and count >= MIN_PROMPTS_TO_HOLD_OUT else 0
        held_out += [split] * max(least, int(share * count + 0.5))
    held_out = held_out[: max(0, count - 1)]
    return held_out + ["train"] * (count - len(held_out))


def _rank(seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{text}".encode()).digest()
