"""Where the bytes of a sequence's states are: sizes that producers, readers and budgets agree on, and trailers.

A sequence is stored in stripes, one for each writer, of consecutive tokens. The object of a stripe is its
states in C order (in fp8: values, then scales), then a trailer that vouches for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
import torch
import xxhash

from stages.hidden_states.config import Encoding
from stages.hidden_states.fp8 import decode
from stages.hidden_states.wire import HiddenStatesError, Manifest

# magic, XXH3-64 of the payload and of the rest of the trailer, digest of the manifest,
# CRC-32 of all tokens, number of all tokens, the stripe's first token and the one after its last
_TRAILER = struct.Struct("<8sQQ4I24x")
_MAGIC = b"DSPARKH2"
_SIGNED = 16  # bytes of the trailer before what the checksum covers
TRAILER_BYTES = _TRAILER.size


@dataclass(frozen=True)
class Layout:
    """How the states of any sequence are laid out."""

    num_layers: int
    hidden_size: int
    encoding: Encoding
    stripes: int

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        return cls(*manifest.shape[1:], manifest.encoding, manifest.stripes)

    def spans(self, num_tokens: int) -> list[slice]:
        """The tokens of each stripe: equal shares but for the last, and no empty ones."""
        share = max(1, -(-num_tokens // self.stripes))
        return [slice(start, min(start + share, num_tokens)) for start in range(0, num_tokens, share)]

    def payload_bytes(self, num_tokens: int) -> int:
        """Bytes of a stripe of so many tokens, without its trailer."""
        row = self.hidden_size + torch.float32.itemsize if self.encoding == "fp8" else 2 * self.hidden_size
        return num_tokens * self.num_layers * row

    def object_bytes(self, num_tokens: int) -> int:
        """Bytes that a sequence takes in the store, as if all stripes were as long as the first."""
        spans = self.spans(num_tokens)
        longest = spans[0].stop if spans else 0
        return len(spans) * (self.payload_bytes(longest) + TRAILER_BYTES)

    def scratch_bytes(self, num_tokens: int) -> int:
        """Bytes that a reader needs for a sequence besides the place of its states."""
        trailers = len(self.spans(num_tokens)) * TRAILER_BYTES
        return trailers + (self.payload_bytes(num_tokens) if self.encoding == "fp8" else 0)

    def allocate(
        self, lengths: Sequence[int], lease: Callable[[int], torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Out of memory (uint8) that `lease` gives, for several sequences: states packed (bfloat16 [T, L, D]), scratch
        for each."""
        shape = (sum(lengths), self.num_layers, self.hidden_size)
        packed = math.prod(shape) * torch.bfloat16.itemsize
        ends = list(accumulate(map(self.scratch_bytes, lengths), initial=packed))
        memory = lease(ends[-1])
        states_TLD = memory[:packed].view(torch.bfloat16).view(shape)
        return states_TLD, [memory[start:end] for start, end in pairwise(ends)]

    def places(self, states_TLD: torch.Tensor, scratch: torch.Tensor) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Of every stripe its tokens, and where a reader puts its payload and its trailer (uint8)."""
        found = []
        for span in self.spans(len(states_TLD)):
            payload = states_TLD[span].view(torch.uint8).view(-1)
            if self.encoding == "fp8":
                payload, scratch = scratch.split_with_sizes(_first(self.payload_bytes(span.stop - span.start), scratch))
            trailer, scratch = scratch.split_with_sizes(_first(TRAILER_BYTES, scratch))
            found.append((span, payload, trailer))
        return found

    def unpack(self, payload: torch.Tensor, states_RLD: torch.Tensor) -> None:
        """Fill the states of a stripe from its payload, where that is not their own memory."""
        if self.encoding == "fp8":
            values, scales = payload.split_with_sizes(_first(states_RLD.numel(), payload))
            scales_RL = torch.frombuffer(bytearray(scales.numpy()), dtype=torch.float32).view(states_RLD.shape[:2])
            decode(values.view(states_RLD.shape), scales_RL, states_RLD)


def _first(size: int, memory: torch.Tensor) -> list[int]:
    return [size, len(memory) - size]


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor's memory as uint8, without a copy."""
    return np.asarray(tensor.reshape(-1).view(torch.uint8).numpy())


def seal(payload: np.ndarray, manifest: Manifest, span: slice) -> bytes:
    """The trailer of the payload (uint8) of the stripe that holds the tokens of `span`."""
    fields = (manifest.digest, manifest.tokens_crc32, manifest.shape[0], span.start, span.stop)
    unsigned = _TRAILER.pack(_MAGIC, 0, *fields)
    return _TRAILER.pack(_MAGIC, _checksum(payload, unsigned), *fields)


def check_seal(trailer: bytes, payload: np.ndarray, manifest: Manifest, span: slice) -> None:
    """Raise HiddenStatesError unless the trailer was written for exactly these bytes, tokens and manifest."""
    magic, checksum, digest, tokens_crc32, *place = _TRAILER.unpack(trailer)
    if magic != _MAGIC:
        raise HiddenStatesError(f"no trailer: expected {_MAGIC!r}, found {magic!r}; the object was not written whole")
    if (found := _checksum(payload, trailer)) != checksum:
        raise HiddenStatesError(f"damaged bytes: written with XXH3 {checksum:016x}, read with {found:016x}")
    wanted = [manifest.shape[0], span.start, span.stop]
    if (tokens_crc32, place) != (manifest.tokens_crc32, wanted):
        raise HiddenStatesError(
            f"states of other tokens: expected {wanted[1]}..{wanted[2]} of {wanted[0]} with CRC-32 "
            f"{manifest.tokens_crc32:08x}, found {place[1]}..{place[2]} of {place[0]} with {tokens_crc32:08x}"
        )
    if digest != manifest.digest:
        raise HiddenStatesError(f"written for another manifest: expected {manifest}")


def _checksum(payload: np.ndarray, trailer: bytes) -> int:
    checksum = xxhash.xxh3_64(payload.data)
    checksum.update(trailer[_SIGNED:])
    return int(checksum.intdigest())
