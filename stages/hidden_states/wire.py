"""Types that cross processes on the hidden-state path.

Producer: the connector inside a vLLM engine (`connector.py`), through the extractor actor.
Consumer: a training or calibrating process (`reader.py`).
Legend: T tokens of one sequence (or of a packed batch), L captured layers, D hidden size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
import xxhash

from stages.corpus import TokenSequence
from stages.hidden_states.config import Encoding
from stages.hidden_states.flow import Flow


class HiddenStatesError(RuntimeError):
    """Hidden states that must not be trained on, or that cannot be had."""


def kind_of(reason: str) -> str:
    """The kind of a reason for which a sequence was set aside: that of the last try, up to its first colon.

    There are few kinds, and they are counted: which object, engine or value it was is said after the colon.
    """
    return re.sub(r"^\d+ tries, the last: ", "", reason).partition(":")[0]


def most_set_aside(asked: int, max_share: float) -> float:
    """How many of `asked` sequences may be set aside: `max_share` of them, and one unless the share is 0."""
    return max(max_share * asked, 1 if max_share > 0 else 0)


def check_set_aside(set_aside: Sequence[tuple[str, str]], asked: int, max_share: float) -> None:
    """Raise HiddenStatesError, with the last reason, when too many of the `asked` sequences were set aside."""
    if len(set_aside) > most_set_aside(asked, max_share):
        name, reason = set_aside[-1]
        raise HiddenStatesError(
            f"{len(set_aside)} of {asked} sequences could not be had, "
            f"hidden_states.max_set_aside_share={max_share}; the last, {name}: {reason}"
        )


@dataclass(frozen=True)
class Manifest:
    """Everything a consumer must know of one sequence's states before it reads a byte, streamed or kept on disk.

    Whoever wrote them says one, the consumer expects one, and they must be equal. Of streamed states its digest is
    in every trailer, so that bytes written for another manifest are found out as well. The checksum of the
    bytes is beside it, in the trailer or the shard: the manifest leaves the engine before they exist.
    """

    key: str  # stripe i is the store's object `key.i`; on disk the tensor's name
    shape: tuple[int, int, int]  # T, L, D
    encoding: Encoding
    stripes: int  # writers that share the tokens (see `Layout.spans`)
    layer_ids: tuple[int, ...]  # in the order of L; the last is the final layer
    pre_norm: bool  # the final layer's states are before the target's final norm
    target: str  # identity of the target artifact: its files' contents, or the Hub id and revision
    tokens_crc32: int
    attempt: int  # 0 on disk, where nothing is asked for twice
    step_tokens: int  # prefilled at once at most: a longer prompt in chunks, which on some hardware changes states

    @property
    def digest(self) -> int:
        """XXH3-64 of the fields."""
        return int(xxhash.xxh3_64_intdigest(json.dumps(asdict(self), sort_keys=True).encode()))

    def check(self, found: Mapping[str, object]) -> None:
        """Raise HiddenStatesError naming every field of a connector's answer that is not as in this one."""
        listed = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        wrong = [name for name, value in asdict(self).items() if listed.get(name) != value]
        if wrong:
            said = "; ".join(f"{name}: expected {getattr(self, name)!r}, found {listed.get(name)!r}" for name in wrong)
            raise HiddenStatesError(f"manifest differs: {said}")


@dataclass(frozen=True)
class HiddenBatch:
    """States of several sequences, packed along the token axis in the order of `sequences`."""

    sequences: tuple[TokenSequence, ...]
    states_TLD: torch.Tensor  # bfloat16, layers in the order asked for, on the CPU
    set_aside: tuple[tuple[str, str], ...] = field(default=())  # (sequence id, reason, see `kind_of`): not delivered


class HiddenStatesReader(Protocol):
    """Gives batches in exactly the order asked, fetching ahead within its byte budget."""

    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        """One HiddenBatch per element of `batches`. Raises HiddenStatesError when states cannot be had."""
        ...

    def flow(self) -> Flow:
        """What has flowed since the reader was opened."""
        ...

    def close(self) -> None:
        """Stop fetching and release memory; safe to call twice."""
        ...


OpenReader = Callable[[int], HiddenStatesReader]  # given the number of ranks that read; close what it gives
