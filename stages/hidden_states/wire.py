"""Types that cross processes on the hidden-state path.

Producer: the connector inside a vLLM engine (`connector.py`), through the extractor actor.
Consumer: a training or calibrating process (`reader.py`).
Legend: T tokens of one sequence (or of a packed batch), L captured layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from stages.corpus import TokenSequence
from stages.hidden_states.flow import Flow


class HiddenStatesError(RuntimeError):
    """Hidden states that must not be trained on, or that cannot be had."""


def check_set_aside(set_aside: Sequence[tuple[str, str]], asked: int, max_share: float) -> None:
    """Raise HiddenStatesError, with the last reason, when too many of the `asked` sequences were set aside.

    Up to `max_share` of them may be, and one unless the share is 0.
    """
    if len(set_aside) > max(max_share * asked, 1 if max_share > 0 else 0):
        name, reason = set_aside[-1]
        raise HiddenStatesError(
            f"{len(set_aside)} of {asked} sequences could not be had, "
            f"hidden_states.max_set_aside_share={max_share}; the last, {name}: {reason}"
        )


@dataclass(frozen=True)
class Manifest:
    """Everything a consumer must know of one sequence's states before it reads a byte."""

    key: str  # of the Mooncake object
    num_tokens: int
    layer_ids: tuple[int, ...]  # in the order of the tensor's second axis; the last is the final layer
    hidden_size: int
    dtype: str  # "bfloat16", host byte order
    pre_norm: bool  # the final layer's states are before the target's final norm
    target: str  # identity of the target artifact
    tokens_crc32: int
    total_bytes: int
    attempt: int


@dataclass(frozen=True)
class HiddenBatch:
    """States of several sequences, packed along the token axis in the order of `sequences`."""

    sequences: tuple[TokenSequence, ...]
    states_TLD: torch.Tensor  # layers in the order asked for, on the CPU
    wait_s: float  # how long the consumer waited for it
    set_aside: tuple[tuple[str, str], ...] = field(default=())  # (sequence id, reason): asked for, not delivered


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
