"""Kept hidden states of pretended extractors, without engines and stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hidden_states_helpers import HIDDEN_SIZE, LAYER_IDS, STEP_TOKENS, states_of

from stages.corpus import TokenSequence
from stages.hidden_states.disk import About, KeptStates
from stages.hidden_states.flow import Flow
from stages.hidden_states.wire import HiddenBatch

ABOUT = About("tiny", LAYER_IDS, HIDDEN_SIZE, STEP_TOKENS, {})


class PretendReader:
    """A HiddenStatesReader of what pretended extractors give, but for the sequences `lost` (id and reason)."""

    def __init__(self, lost: dict[str, str] | None = None, dies_after: int | None = None) -> None:
        self.lost, self.dies_after = lost or {}, dies_after
        self.read_ids: list[str] = []

    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        for [sequence] in batches:
            if len(self.read_ids) == self.dies_after:
                raise OSError("killed")
            self.read_ids.append(sequence.id)
            if why := self.lost.get(sequence.id):
                yield HiddenBatch((), states_of(sequence.input_ids)[:0], ((sequence.id, why),))
            else:
                yield HiddenBatch((sequence,), states_of(sequence.input_ids))

    def flow(self) -> Flow:
        return Flow()

    def close(self) -> None:
        pass


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def damage(kept: KeptStates, key: str) -> None:
    """Change one bit of a sequence's states."""
    entry = kept.entries()[key]
    flip(entry.shard, entry.offset + 5)
