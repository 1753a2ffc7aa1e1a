"""Types that cross processes on the way to an engine: what is asked of it and what it answers.

Producer: a stage's driver, through `EnginePool`. Consumer: `VllmActor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class EngineError(RuntimeError):
    """An engine that could not start, or that died and could not come back."""


@dataclass(frozen=True)
class GenerationRequest:
    """Exactly these prompt tokens, continued with this sampling. `id` is unique within a call."""

    id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class GenerationResult:
    """The answer to the request of the same `id`.

    `finish_reason` is vLLM's: "stop" (an end-of-turn token, which is the last of `token_ids`),
    "length" or "error". After "error" `error` says why vLLM refused this request; the engine lives.
    """

    id: str
    token_ids: tuple[int, ...]
    finish_reason: str
    error: str = ""


@dataclass(frozen=True)
class Extraction:
    """What a connector says of captured states, and the engine's log-probabilities if asked for.

    `life` names the engine process that will store the states: another one, after a restart, will not.
    `logprobs` (nat) belong to the last positions of the prompt: each is of the token that follows there,
    which after the last position is `next_token`, drawn by the engine.
    """

    reference: dict[str, Any]
    life: str
    logprobs: tuple[float, ...] = ()
    next_token: int = -1
