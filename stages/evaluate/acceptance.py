"""Acceptance statistics of verification rounds. Pure: numbers in, numbers out.

A round is one pass of the target over B drafted tokens. With j of them accepted it emits j + 1 tokens:
the accepted ones and the bonus token, which is the target's own. Hence, as in the DSpark paper and in
vLLM (`v1/spec_decode/metrics.py`), acceptance length = emitted / rounds = 1 + accepted / rounds.

Legend: P prompts, B drafted tokens a round, K = B + 1 outcomes of a round (0 to B accepted),
S bootstrap samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

INTERVAL = (2.5, 97.5)  # percentiles of a 95 % interval


@dataclass(frozen=True)
class Acceptance:
    """What the rounds of a set of prompts say. None: no round to say it."""

    prompts: int
    prompts_without_rounds: int  # answered by the first token alone, which costs no round
    rounds: int
    accepted: int
    acceptance_length: float | None
    interval: tuple[float, float] | None  # 95 %, bootstrap over prompts
    survival: tuple[float | None, ...]  # share of rounds with at least k accepted, k = 1 … B
    conditional: tuple[float | None, ...]  # the same, among rounds with at least k - 1 accepted


def describe(rounds_PK: np.ndarray, *, samples: int, rng: np.random.Generator) -> Acceptance:
    """Pooled statistics of int64 [P, K] counts of rounds by number of accepted tokens."""
    total_K = rounds_PK.sum(axis=0)
    reached_K = total_K[::-1].cumsum()[::-1]  # rounds with at least k accepted, k = 0 … B
    return Acceptance(
        prompts=len(rounds_PK),
        prompts_without_rounds=int((rounds_PK.sum(axis=1) == 0).sum()),
        rounds=int(reached_K[0]),
        accepted=int(reached_K[1:].sum()),
        acceptance_length=_ratio(int(reached_K.sum()), int(reached_K[0])),
        interval=_interval(bootstrap_lengths(rounds_PK, samples, rng)),
        survival=tuple(_ratio(int(count), int(reached_K[0])) for count in reached_K[1:]),
        conditional=tuple(_ratio(int(now), int(before)) for before, now in pairwise(reached_K)),
    )


def bootstrap_lengths(rounds_PK: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Acceptance lengths, float64 [S], of prompts drawn with replacement; NaN for draws without a round.

    Prompts are drawn, not rounds: rounds of one answer are alike, and counting them as independent
    would make the interval too narrow.
    """
    accepted_P = rounds_PK @ np.arange(rounds_PK.shape[1])
    drawn_SP = rng.integers(0, len(rounds_PK), (samples, len(rounds_PK)))
    rounds_S = rounds_PK.sum(axis=1)[drawn_SP].sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(1.0 + accepted_P[drawn_SP].sum(axis=1) / rounds_S)


def by_domain(rounds: Mapping[str, np.ndarray], *, samples: int, seed: int) -> dict[str, Acceptance]:
    """Statistics of every domain; each draws from its own generator, so domains do not move each other."""
    return {
        domain: describe(rounds_PK, samples=samples, rng=_generator(seed, domain))
        for domain, rounds_PK in sorted(rounds.items())
    }


def pooled(rounds: Mapping[str, np.ndarray], *, samples: int, seed: int) -> Acceptance:
    """Statistics over all rounds of all domains: long answers weigh more."""
    together_PK = np.concatenate([rounds[domain] for domain in sorted(rounds)])
    return describe(together_PK, samples=samples, rng=_generator(seed, "all domains"))


def macro(
    rounds: Mapping[str, np.ndarray], *, samples: int, seed: int
) -> tuple[float | None, tuple[float, float] | None]:
    """Mean of the domains' acceptance lengths and its 95 % interval: every domain weighs the same.

    Domains without a round are left out. Prompts are drawn within their domain.
    """
    measured = {domain: rounds_PK for domain, rounds_PK in sorted(rounds.items()) if rounds_PK.sum() > 0}
    if not measured:
        return None, None
    lengths = [1.0 + float((r @ np.arange(r.shape[1])).sum() / r.sum()) for r in measured.values()]
    draws = [bootstrap_lengths(rounds_PK, samples, _generator(seed, domain)) for domain, rounds_PK in measured.items()]
    return float(np.mean(lengths)), _interval(np.mean(draws, axis=0))


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, *name.encode()])


def _interval(values_S: np.ndarray) -> tuple[float, float] | None:
    finite = values_S[np.isfinite(values_S)]
    if len(finite) == 0:
        return None
    low, high = np.percentile(finite, INTERVAL)
    return float(low), float(high)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
