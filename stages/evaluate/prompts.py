"""Which prompts of the evaluation split are served, and what became of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stages.artifacts import digest
from stages.corpus import TokenSequence
from stages.evaluate.config import EvaluateConfig


@dataclass(frozen=True)
class EvaluationPrompt:
    """What the user said, as the target reads it, and how long the answer may get."""

    id: str
    domain: str
    token_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class PromptChoice:
    """The prompts to serve, in the corpus' order, and the counts of all that came in."""

    prompts: tuple[EvaluationPrompt, ...]
    counts: dict[str, int]  # prompts_in = evaluated + dropped_…

    @property
    def digest(self) -> str:
        """Names exactly these token ids, in this order, with these limits."""
        return digest([[p.id, p.domain, list(p.token_ids), p.max_new_tokens] for p in self.prompts])

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(sorted({prompt.domain for prompt in self.prompts}))


def choose_prompts(
    sequences: Iterable[TokenSequence], config: EvaluateConfig, *, max_model_len: int, num_speculative_tokens: int
) -> PromptChoice:
    """The first `prompts_per_domain` usable conversations of every domain, cut before the first answer.

    The answer's limit leaves room for a whole block before `max_model_len`, since vLLM drafts less
    near the end of the context. Raises ValueError when nothing is left.
    """
    counts: Counter[str] = Counter(dropped_not_supervised=0, dropped_prompt_too_long=0, dropped_over_limit=0)
    chosen: list[EvaluationPrompt] = []
    taken: Counter[str] = Counter()
    for sequence in sequences:
        counts["prompts_in"] += 1
        prompt = _prompt_ids(sequence)
        room = max_model_len - len(prompt) - num_speculative_tokens - 1
        if not prompt:
            counts["dropped_not_supervised"] += 1
        elif room < 1:
            counts["dropped_prompt_too_long"] += 1
        elif taken[sequence.domain] >= config.prompts_per_domain:
            counts["dropped_over_limit"] += 1
        else:
            taken[sequence.domain] += 1
            chosen.append(EvaluationPrompt(sequence.id, sequence.domain, prompt, min(config.max_new_tokens, room)))
    counts["evaluated"] = len(chosen)
    if not chosen:
        raise ValueError(
            f"evaluate: expected prompts in the corpus' evaluation split, found none to serve of {dict(counts)}"
        )
    _check_conserved(counts)
    return PromptChoice(tuple(chosen), dict(counts))


def chunked(prompts: Sequence[EvaluationPrompt], size: int) -> list[tuple[EvaluationPrompt, ...]]:
    """Consecutive pieces of at most `size` prompts."""
    return [tuple(prompts[start : start + size]) for start in range(0, len(prompts), size)]


def _prompt_ids(sequence: TokenSequence) -> tuple[int, ...]:
    """Tokens before the first that the target wrote; empty when it wrote none, or all."""
    supervised = np.flatnonzero(sequence.loss_mask)
    return tuple(sequence.input_ids[: supervised[0]].tolist()) if len(supervised) else ()


def _check_conserved(counts: Counter[str]) -> None:
    out = sum(count for key, count in counts.items() if key != "prompts_in")
    if out != counts["prompts_in"]:
        raise RuntimeError(
            f"evaluate: {counts['prompts_in']} prompts came in and {out} are accounted for ({dict(counts)})"
        )
