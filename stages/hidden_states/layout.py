"""The bytes of one sequence's object: states [T, L, D] in C order, then a trailer that vouches for them.

The trailer travels inside the object because the manifest leaves the engine before the bytes exist.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
import xxhash

from stages.hidden_states.wire import HiddenStatesError

_TRAILER = struct.Struct("<8sQQQ32x")  # magic, XXH3-64 of the states' bytes, tokens' CRC-32, number of tokens
_MAGIC = b"DSPARKH1"
TRAILER_BYTES = _TRAILER.size


def states_bytes(num_tokens: int, num_layers: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of the states alone."""
    return num_tokens * num_layers * hidden_size * dtype.itemsize


def object_bytes(num_tokens: int, num_layers: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of the stored object: the states and their trailer."""
    return states_bytes(num_tokens, num_layers, hidden_size, dtype) + TRAILER_BYTES


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor's memory as uint8, without a copy."""
    return np.asarray(tensor.reshape(-1).view(torch.uint8).numpy())


def trailer(states: np.ndarray, tokens_crc32: int, num_tokens: int) -> bytes:
    """The trailer of these bytes (uint8)."""
    return _TRAILER.pack(_MAGIC, xxhash.xxh3_64_intdigest(states.data), tokens_crc32, num_tokens)


def check_trailer(trailer: bytes, states: np.ndarray, tokens_crc32: int, num_tokens: int) -> None:
    """Raise HiddenStatesError unless the trailer was written for exactly these bytes and tokens."""
    magic, checksum, crc, tokens = _TRAILER.unpack(trailer)
    if magic != _MAGIC:
        raise HiddenStatesError(f"no trailer: expected {_MAGIC!r}, found {magic!r}; the object was not written whole")
    if (crc, tokens) != (tokens_crc32, num_tokens):
        raise HiddenStatesError(
            f"states of other tokens: expected {num_tokens} with CRC-32 {tokens_crc32:08x}, "
            f"found {tokens} with {crc:08x}"
        )
    if (found := xxhash.xxh3_64_intdigest(states.data)) != checksum:
        raise HiddenStatesError(f"damaged bytes: written with XXH3 {checksum:016x}, read with {found:016x}")
