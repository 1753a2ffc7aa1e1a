"""Whether a draft left the target's text alone, and whether per-request and engine counts agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.engine.serving import ServedAnswer, SpeculationCounters
from stages.evaluate.prompts import EvaluationPrompt

GPU_NEAR_TIE_NAT = 0.25
"""On a GPU the batch's shape moves low bits of the logits: two bf16 steps at the usual size of a logit
(0.125 between 16 and 32). On the CPU vLLM is batch-invariant and no difference at all is allowed."""


@dataclass(frozen=True)
class Difference:
    """The first token that differs in one answer. -1: the answer had ended."""

    prompt_id: str
    position: int  # in the answer
    with_draft: int
    without_draft: int
    gap_nat: float | None  # how far the draft's token is below the target's best; None when not among its two best


def first_difference(prompt_id: str, with_draft: ServedAnswer, without_draft: ServedAnswer) -> Difference | None:
    """The first position where two answers differ, or None."""
    ours, theirs = with_draft.token_ids, without_draft.token_ids
    for position in range(max(len(ours), len(theirs))):
        a = ours[position] if position < len(ours) else -1
        b = theirs[position] if position < len(theirs) else -1
        if a != b:
            second, gap = without_draft.runner_up[position] if position < len(without_draft.runner_up) else (-1, 0.0)
            return Difference(prompt_id, position, a, b, gap if a == second and a != -1 else None)
    return None


def check_text(
    prompts: Sequence[EvaluationPrompt],
    with_draft: Sequence[ServedAnswer],
    without_draft: Sequence[ServedAnswer],
    *,
    near_tie_nat: float,
    text_of: Callable[[int], str],
) -> int:
    """The number of answers that differ from a near tie on; every other difference is refused.

    Raises RuntimeError with prompt, position and both tokens of the first real difference.
    """
    near_ties = 0
    for prompt, ours, theirs in zip(prompts, with_draft, without_draft, strict=True):
        found = first_difference(prompt.id, ours, theirs)
        if found is None:
            continue
        if found.gap_nat is not None and found.gap_nat < near_tie_nat:
            near_ties += 1
            continue
        a, b = (repr(text_of(t)) if t >= 0 else "the end" for t in (found.with_draft, found.without_draft))
        raise RuntimeError(
            f"greedy text changes with the draft: prompt {found.prompt_id}, answer token {found.position}: "
            f"{a} (id {found.with_draft}) with the draft, {b} (id {found.without_draft}) without; "
            "speculation must not change text: check vLLM's version and evaluate with engine.dtype=float32"
        )
    return near_ties


def check_counts(answers: Sequence[ServedAnswer], counters: SpeculationCounters, num_speculative_tokens: int) -> None:
    """Raise RuntimeError unless requests, engine and text tell the same number of rounds and tokens."""
    rounds, accepted, drafted = (sum(getattr(a, name) for a in answers) for name in ("rounds", "accepted", "drafted"))
    by_position = tuple(
        sum(sum(a.rounds_by_accepted[k:]) for a in answers) for k in range(1, num_speculative_tokens + 1)
    )
    told = (
        counters.rounds,
        counters.accepted,
        counters.drafted,
        counters.accepted_per_position or (0,) * len(by_position),
    )
    if told != (rounds, accepted, drafted, by_position):
        raise RuntimeError(
            f"vLLM's counters (rounds, accepted, drafted, by position) say {told}, "
            f"its requests {(rounds, accepted, drafted, by_position)}; was something else served by this engine?"
        )
    if drafted != rounds * num_speculative_tokens:
        raise RuntimeError(
            f"{rounds} rounds drafted {drafted} tokens, expected {num_speculative_tokens} each: "
            "raise engine.max_num_batched_tokens or lower evaluate.batch_sequences"
        )
    for answer in answers:
        # One token from the prefill; the last round may run past the stop token.
        overshoot = 1 + answer.accepted + answer.rounds - len(answer.token_ids)
        if not 0 <= overshoot <= num_speculative_tokens:
            raise RuntimeError(
                f"{answer.rounds} rounds with {answer.accepted} accepted tokens cannot give "
                f"{len(answer.token_ids)} tokens"
            )
