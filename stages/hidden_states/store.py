"""A thin client of the Mooncake store. Every return code is checked; nothing here knows vLLM or Ray.

Codes seen: -200 no space, -600 bad buffer, -704 no such object, -900 master gone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.hidden_states.wire import HiddenStatesError

NOT_FOUND = -704
ERROR_SUFFIX = ":error"  # of the key under which hs_connectors publishes a producer's error
_PROBE_TIMEOUT_S = 5.0
METADATA = "P2PHANDSHAKE"  # clients tell each other where their memory is; no metadata server


@dataclass(frozen=True)
class StoreAddress:
    """Where the store is and how it is reached. Picklable."""

    master: str  # host:port
    protocol: str
    device: str
    local_buffer_bytes: int


def local_hostname(master: str) -> str:
    """The address under which this process' memory is reached: of the interface that leads to the master."""
    host, port = master.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return str(probe.getsockname()[0])


def in_own_memory(store: Any) -> Any:
    """Mooncake's placement of an object in the memory that this client lends.

    Left to itself it may choose the memory of an engine that has just died, for as long as the master
    believes in it (10 s).
    """
    from mooncake.store import ReplicateConfig

    placement = ReplicateConfig()
    placement.preferred_segment = store.get_hostname()
    return placement


class HiddenStatesStore:
    """One connection. A reader lends no memory (`segment_bytes=0`), so nothing is lost with it."""

    def __init__(self, address: StoreAddress, segment_bytes: int = 0) -> None:
        _probe(address.master)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Mooncake logs every call at INFO to stderr
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            local_hostname(address.master),
            METADATA,
            segment_bytes,
            address.local_buffer_bytes,
            address.protocol,
            address.device,
            address.master,
        )
        _check("setup", address.master, code)

    def register(self, memory: torch.Tensor) -> None:
        """Let the store write into `memory` (contiguous, on the CPU)."""
        _check("register_buffer", str(memory.nbytes), self._store.register_buffer(memory.data_ptr(), memory.nbytes))

    def unregister(self, memory: torch.Tensor) -> None:
        _check("unregister_buffer", str(memory.nbytes), self._store.unregister_buffer(memory.data_ptr()))

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which of the keys are there, in one round trip."""
        codes = self._store.batch_is_exist(list(keys))
        for key, code in zip(keys, codes, strict=True):
            _check("exist", key, code)
        return [code == 1 for code in codes]

    def get_into(self, key: str, parts: Sequence[torch.Tensor]) -> None:
        """Read one object into registered memory, split over `parts`; its size must be their sum.

        Raises HiddenStatesError with Mooncake's code when the object is missing or of another size.
        """
        size = sum(part.nbytes for part in parts)
        pointers, sizes = [part.data_ptr() for part in parts], [part.nbytes for part in parts]
        [code] = self._store.batch_get_into_multi_buffers([key], [pointers], [sizes])
        _check("get", key, code)
        if code != size:
            raise HiddenStatesError(f"Mooncake get of {key}: expected {size} bytes, found {code}")

    def get_error(self, key: str) -> str:
        """The producer's message for a key whose error marker exists."""
        marker = key + ERROR_SUFFIX
        size = self._store.get_size(marker)
        _check("size", marker, size)
        memory = torch.empty(size, dtype=torch.uint8)
        self.register(memory)
        try:
            self.get_into(marker, (memory,))
        finally:
            self.unregister(memory)
        return memory.numpy().tobytes().decode(errors="replace")

    def put(self, key: str, value: bytes) -> None:
        """Write an object into this client's segment, through its local buffer."""
        _check("put", key, self._store.put(key, value, in_own_memory(self._store)))

    def remove(self, key: str) -> None:
        """Delete an object and its error marker at once, read leases or not; missing ones are fine."""
        for name in (key, key + ERROR_SUFFIX):
            if (code := self._store.remove(name, True)) != NOT_FOUND:
                _check("remove", name, code)

    def close(self) -> None:
        _check("close", "", self._store.close())


def _probe(master: str) -> None:
    """Mooncake itself tries for 90 s before it says that nobody answers."""
    host, port = master.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        asked = f"hidden_states.master_address={master}"
        raise HiddenStatesError(f"{asked}: expected a Mooncake master, found {error}") from error


def _check(operation: str, what: str, code: int) -> None:
    if not isinstance(code, int) or code < 0:
        raise HiddenStatesError(f"Mooncake {operation} {what}: expected success, found code {code}")
