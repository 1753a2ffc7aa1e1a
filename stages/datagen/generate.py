"""One shard of conversations through a pool: every answer regenerated, every loss counted by reason.

Knows the pool only as something that generates. Knows nothing of files, splits or resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from stages.datagen.conversation import Conversation, Turn
from stages.datagen.outcome import Limits, Settled, ShardOutcome
from stages.datagen.prompts import SetAside
from stages.datagen.template import ChatTemplate, TemplateRefusal
from stages.datagen.transcript import Transcript
from stages.engine.requests import GenerationRequest, GenerationResult


class Generator(Protocol):
    """A pool of engines, seen from here."""

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        """One result a request, in any order."""
        ...


def request_seed(seed: int, id_: str, turn: int) -> int:
    """31-bit sampling seed of one turn: the same whatever the order, the shard or the actor."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{id_}\0{turn}".encode()).digest()[:4], "big") >> 1


OnAnswer = Callable[[int], None]  # tokens of one answer
OnSettled = Callable[[SetAside | None], None]  # a conversation ended; None: it was kept


class ShardRun:
    """The conversations of one shard, answered turn by turn.

    All conversations advance together, one `pool.generate` a turn, so the pool is full but for the
    end of each turn; a shard much larger than the pool's streams keeps that share small.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        template: ChatTemplate,
        limits: Limits,
        on_answer: OnAnswer,
        on_settled: OnSettled,
    ) -> None:
        self.conversations = {one.id: one for one in conversations}
        self.turns: dict[str, list[Turn]] = {one.id: one.turns(regenerate=True) for one in conversations}
        self.transcripts = {one.id: Transcript(template, one.tools) for one in conversations}
        self.limits = limits
        self.on_answer, self.on_settled = on_answer, on_settled
        self.settled: dict[str, Settled] = {}
        self.generated_tokens = 0

    def run(self, pool: Generator) -> ShardOutcome:
        """Answer everything. Raises RuntimeError when the pool's results do not match the requests."""
        for turn in range(max(len(turns) for turns in self.turns.values())):
            open_ids = [id_ for id_ in self.conversations if id_ not in self.settled]
            requests = [request for id_ in open_ids if (request := self._ask(id_, turn))]
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
        outcome = ShardOutcome(generated_tokens=self.generated_tokens)
        for id_ in self.conversations:
            outcome.add(id_, self.settled[id_])
        return outcome

    def _ask(self, id_: str, turn: int) -> GenerationRequest | None:
        """The request for this turn's answer; None when the conversation has ended instead."""
        transcript = self.transcripts[id_]
        try:
            transcript.ask(self.turns[id_][turn].context)
        except TemplateRefusal as error:
            self._drop(id_, error.reason, str(error))
            return None
        token_ids, config = transcript.input_ids, self.limits.config
        if not self.limits.has_room(len(token_ids)):
            if turn:  # what was answered so far stands
                self._finish(id_, len(self.turns[id_]) - turn)
            else:
                self._drop(id_, "dropped_too_long", f"{len(token_ids)} tokens before the first answer")
            return None
        return GenerationRequest(
            id=id_,
            prompt_token_ids=tuple(token_ids),
            max_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            seed=request_seed(config.seed, id_, turn),
        )

    def _answer(self, result: GenerationResult, turn: int) -> None:
        id_, turns = result.id, self.turns[result.id]
        self.generated_tokens += len(result.token_ids)
        self.on_answer(len(result.token_ids))
        if result.finish_reason not in ("stop", "length"):
            self._drop(id_, f"failed_{result.finish_reason}", result.error)
            return
        is_last = turn + 1 == len(turns)
        # Results of tools fit only the calls that the source made, so later turns remember those.
        remembered = turns[turn].given if not is_last and turns[turn + 1].has_tool_results else None
        transcript = self.transcripts[id_]
        said = transcript.answer(result.token_ids, stopped=result.finish_reason == "stop", remembered=remembered)
        if not said["content"].strip():
            self._drop(id_, "dropped_empty_answer", f"turn {turn}")
        elif is_last or not transcript.goes_on:
            self._finish(id_, len(turns) - turn - 1)

    def _finish(self, id_: str, turns_left_out: int) -> None:
        settled = self.limits.settle(self.conversations[id_], self.transcripts[id_].parts())
        self._settle(id_, replace(settled, turns_left_out=turns_left_out))

    def _drop(self, id_: str, reason: str, cause: str) -> None:
        self._settle(id_, Settled.without(SetAside(id_, reason, cause)))

    def _settle(self, id_: str, settled: Settled) -> None:
        self.settled[id_] = settled
        self.on_settled(settled.set_aside)
