"""What becomes of conversations: the limits they must keep to, and an account of every one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from stages.corpus import TokenSequence
from stages.datagen.config import DatagenConfig
from stages.datagen.conversation import Conversation
from stages.datagen.prompts import SetAside, part_id
from stages.datagen.transcript import Part


@dataclass(frozen=True)
class Settled:
    """One conversation's end: sequences, or the reason for none. Its parts = sequences + lost parts."""

    sequences: tuple[TokenSequence, ...]
    lost_parts: Counter[str]  # by reason
    set_aside: SetAside | None = None
    turns_left_out: int = 0  # wanted an answer, but the conversation ended before

    @classmethod
    def without(cls, set_aside: SetAside) -> Self:
        """A conversation that came to nothing."""
        return cls((), Counter(), set_aside)


@dataclass
class ShardOutcome:
    """What became of a shard's conversations: each is in `kept` or in `set_aside`, in their order."""

    sequences: list[TokenSequence] = field(default_factory=list)
    kept: list[tuple[str, int]] = field(default_factory=list)  # id and number of sequences
    set_aside: list[SetAside] = field(default_factory=list)
    lost_parts: Counter[str] = field(default_factory=Counter)  # of kept conversations
    turns_left_out: int = 0  # of kept conversations
    generated_tokens: int = 0
    generate_s: float = 0.0

    def add(self, id_: str, settled: Settled) -> None:
        """Account for the next conversation."""
        if settled.set_aside is not None:
            self.set_aside.append(settled.set_aside)
            return
        self.sequences += settled.sequences
        self.kept.append((id_, len(settled.sequences)))
        self.lost_parts += settled.lost_parts
        self.turns_left_out += settled.turns_left_out


@dataclass(frozen=True)
class Limits:
    """Where generation and filters draw the line."""

    config: DatagenConfig
    max_model_len: int

    @property
    def max_sequence_tokens(self) -> int:
        """Extraction prefills the whole sequence and samples one token, so the engine needs room for it."""
        return min(self.config.max_sequence_tokens, self.max_model_len - 1)

    def has_room(self, prompt_tokens: int) -> bool:
        """Whether an answer to so many tokens can be generated and kept."""
        new = self.config.max_new_tokens
        return prompt_tokens < self.max_sequence_tokens and prompt_tokens + new <= self.max_model_len

    def settle(self, conversation: Conversation, parts: Sequence[Part]) -> Settled:
        """The sequences of `parts` that keep to the limits; with none left, the reason of the last one."""
        sequences: list[TokenSequence] = []
        lost: Counter[str] = Counter()
        last = ("", "")
        for number, part in enumerate(parts, start=1):
            id_ = conversation.id if len(parts) == 1 else part_id(conversation.id, number)
            sequence = TokenSequence(
                id_,
                conversation.domain,
                part.input_ids,
                part.loss_mask,
                json.dumps(part.messages, ensure_ascii=False) if part.messages else "",
            )
            if not self.config.regenerate:
                sequence = sequence.truncated(self.max_sequence_tokens)
            supervised = int(sequence.loss_mask.sum())
            if len(sequence) > self.max_sequence_tokens:
                last = ("dropped_too_long", f"{len(sequence)} tokens")
            elif not supervised and part.loss_mask.any():
                last = ("dropped_truncated_away", f"no supervised token among the first {len(sequence)}")
            elif supervised < self.config.min_supervised_tokens:
                last = ("dropped_too_few_supervised", f"{supervised} tokens")
            else:
                sequences.append(sequence)
                continue
            lost[last[0]] += 1
        if sequences:
            return Settled(tuple(sequences), lost)
        return Settled((), lost, SetAside(conversation.id, *last))
