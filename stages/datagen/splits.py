"""Which prompt serves which purpose: training, validation, calibration or evaluation."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from stages.corpus import Split
from stages.datagen.config import DatagenConfig
from stages.datagen.prompts import Prompt

MIN_PROMPTS_TO_HOLD_OUT = 10
"""A domain of at least so many prompts gives at least one to every split with a share above 0."""


def assign_splits(prompts: Sequence[Prompt], config: DatagenConfig) -> dict[str, Split]:
    """The split of each prompt, by prompt id; a pure function of `seed` and the set of prompts.

    Stratified: each domain is ordered by a hash of (seed, opening) and cut by the shares. Prompts
    with one opening (a conversation and its longer variant) go together, into the domain of the
    first of them: otherwise an evaluation prompt would be trained on as the start of another one.
    """
    members: dict[str, list[str]] = defaultdict(list)
    openings: dict[str, list[str]] = defaultdict(list)
    for prompt in prompts:
        if prompt.opening not in members:
            openings[prompt.domain].append(prompt.opening)
        members[prompt.opening].append(prompt.id)
    splits: dict[str, Split] = {}
    for of_domain in openings.values():
        ordered = sorted(of_domain, key=lambda opening: _rank(config.seed, opening))
        for opening, split in zip(ordered, _cut(len(ordered), config), strict=True):
            splits.update(dict.fromkeys(members[opening], split))
    return splits


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


def _rank(seed: int, opening: str) -> bytes:
    return hashlib.sha256(f"{seed}\0{opening}".encode()).digest()
