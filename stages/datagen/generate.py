"""One shard of conversations through a pool: every answer regenerated, every loss counted by reason.

Knows the pool only as something that generates. Knows nothing of files, splits or resume.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jinja2 import TemplateError

from stages.corpus import TokenSequence
from stages.datagen.config import DatagenConfig
from stages.datagen.prompts import Prompt
from stages.datagen.template import ChatTemplate, RewritesHistoryError, Transcript
from stages.engine.requests import GenerationRequest, GenerationResult


class Generator(Protocol):
    """A pool of engines, seen from here."""

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """One result a request, in any order."""
        ...


@dataclass(frozen=True)
class SetAside:
    """A conversation that is not in the corpus: `reason` is a key of the counts."""

    id: str
    reason: str  # dropped_... by a filter, failed_... by an error
    cause: str = ""

    @property
    def failed(self) -> bool:
        return self.reason.startswith("failed_")


@dataclass
class ShardOutcome:
    """What became of a shard's prompts: each is in `sequences` or in `set_aside`, in prompt order."""

    sequences: list[TokenSequence] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    generated_tokens: int = 0
    generate_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Where generation and filters draw the line."""

    config: DatagenConfig
    max_model_len: int

    @property
    def max_sequence_tokens(self) -> int:
        """Extraction prefills the whole sequence and samples one token, so the engine needs room for it."""
        return min(self.config.max_sequence_tokens, self.max_model_len - 1)

    def request(self, id_: str, turn: int, token_ids: Sequence[int]) -> GenerationRequest | None:
        """The request that continues `token_ids`, or None when it cannot fit."""
        new = self.config.max_new_tokens
        if len(token_ids) >= self.max_sequence_tokens or len(token_ids) + new > self.max_model_len:
            return None
        return GenerationRequest(
            id=id_,
            prompt_token_ids=tuple(token_ids),
            max_tokens=new,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            seed=request_seed(self.config.seed, id_, turn),
        )


def request_seed(seed: int, id_: str, turn: int) -> int:
    """31-bit sampling seed of one turn: the same whatever the order, the shard or the actor."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{id_}\0{turn}".encode()).digest()[:4], "big") >> 1


OnAnswer = Callable[[int], None]  # generated tokens of one answer
OnSettled = Callable[[SetAside | None], None]  # a conversation ended; None: it was kept


class ShardRun:
    """The conversations of one shard, answered turn by turn.

    All conversations advance together, one `pool.generate` a turn, so the pool is full but for the
    end of each turn; a shard much larger than the pool's streams keeps that share small.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        template: ChatTemplate,
        limits: Limits,
        on_answer: OnAnswer,
        on_settled: OnSettled,
    ) -> None:
        self.prompts = {prompt.id: prompt for prompt in prompts}
        self.limits = limits
        self.on_answer, self.on_settled = on_answer, on_settled
        self.transcripts = {
            p.id: Transcript(template, [{"role": "system", "content": p.system}] if p.system is not None else [])
            for p in prompts
        }
        self.kept: dict[str, TokenSequence] = {}
        self.set_aside: dict[str, SetAside] = {}
        self.generated_tokens = 0

    def run(self, pool: Generator) -> ShardOutcome:
        """Answer everything. Raises RuntimeError when the pool's results do not match the requests."""
        for turn in range(max(len(prompt.turns) for prompt in self.prompts.values())):
            requests = [request for id_ in self._open() if (request := self._ask(id_, turn))]
            waiting = {request.id for request in requests}
            for result in pool.generate(requests) if requests else ():
                if result.id not in waiting:
                    raise RuntimeError(
                        f"datagen turn {turn}: expected one result a request, found an extra one for {result.id!r}"
                    )
                waiting.remove(result.id)
                self._answer(result, turn)
            if waiting:
                raise RuntimeError(
                    f"datagen turn {turn}: expected {len(requests)} results,"
                    f" found {len(waiting)} missing, such as {min(waiting)!r}"
                )
        return ShardOutcome(
            [self.kept[id_] for id_ in self.prompts if id_ in self.kept],
            [self.set_aside[id_] for id_ in self.prompts if id_ in self.set_aside],
            self.generated_tokens,
        )

    def _open(self) -> list[str]:
        return [id_ for id_ in self.prompts if id_ not in self.kept and id_ not in self.set_aside]

    def _ask(self, id_: str, turn: int) -> GenerationRequest | None:
        transcript = self.transcripts[id_]
        try:
            transcript.ask(self.prompts[id_].turns[turn])
        except RewritesHistoryError as error:
            self._drop(id_, "dropped_template_rewrites_history", str(error))
            return None
        except TemplateError as error:
            self._drop(id_, "failed_template", str(error))
            return None
        request = self.limits.request(id_, turn, transcript.input_ids)
        if request is None:
            self._drop(id_, "dropped_too_long", f"{len(transcript.input_ids)} tokens before turn {turn}'s answer")
        return request

    def _answer(self, result: GenerationResult, turn: int) -> None:
        id_ = result.id
        self.generated_tokens += len(result.token_ids)
        self.on_answer(len(result.token_ids))
        if result.finish_reason not in ("stop", "length"):
            self._drop(id_, f"failed_{result.finish_reason}", result.error)
            return
        stopped = result.finish_reason == "stop"
        content = self.transcripts[id_].answer(result.token_ids, stopped=stopped)
        if not content.strip():
            self._drop(id_, "dropped_empty_answer", f"turn {turn}")
        elif not stopped or turn + 1 == len(self.prompts[id_].turns):
            self._finish(id_)

    def _finish(self, id_: str) -> None:
        transcript = self.transcripts[id_]
        length, supervised = len(transcript.input_ids), transcript.supervised_tokens
        if length > self.limits.max_sequence_tokens:
            self._drop(id_, "dropped_too_long", f"{length} tokens")
        elif supervised < self.limits.config.min_supervised_tokens:
            self._drop(id_, "dropped_too_few_supervised", f"{supervised} tokens")
        else:
            self.kept[id_] = TokenSequence(
                id_,
                self.prompts[id_].domain,
                np.array(transcript.input_ids, dtype=np.int32),
                np.array(transcript.loss_mask, dtype=bool),
                json.dumps(transcript.messages, ensure_ascii=False),
            )
            self.on_settled(None)

    def _drop(self, id_: str, reason: str, cause: str) -> None:
        self.set_aside[id_] = SetAside(id_, reason, cause)
        self.on_settled(self.set_aside[id_])
