"""A thin client of the Mooncake store. Every return code is checked; nothing here knows vLLM or Ray.

Codes seen: -200 no space, -600 bad buffer, -704 no such object, -800 transfer failed, -900 the master does not
answer (-901 not in time).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.hidden_states.wire import HiddenStatesError

NOT_FOUND = -704
_NO_ANSWER = (-900, -901)
_PROBE_TIMEOUT_S = 5.0
_BACK_WITHIN_S = 15.0  # what a master may take to be started again under its address, by whoever runs it
_AGAIN_S = 0.1
_ONE_BREAK_S = 2.0
METADATA = "P2PHANDSHAKE"  # clients tell each other where their memory is; no metadata server


def stripe_name(key: str, stripe: int) -> str:
    """The store's name of one stripe of a sample."""
    return f"{key}.{stripe}"


def error_name(key: str) -> str:
    """The store's name of the marker by which a producer says that it cannot store a sample."""
    return f"{key}.error"


class StoreGoneError(HiddenStatesError):
    """The master cannot be reached: no object can be had any more, and asking again does not help."""


@dataclass(frozen=True)
class StoreAddress:
    """Where the store is and how it is reached. Picklable."""

    master: str  # host:port
    protocol: str
    device: str


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
    """A reader's connection. It lends no memory, so nothing is lost with it.

    Raises HiddenStatesError with Mooncake's code, and StoreGoneError from the first call on that finds
    the master gone (Mooncake itself tries for 4 s in every call). A master that is started again meanwhile has
    forgotten all objects, and no call finds any of them any more: who asked before `breaks` grew asks again.
    """

    def __init__(self, address: StoreAddress) -> None:
        self._master = address.master
        self._gone: str | None = None
        self._broke = 0.0  # monotonic time of the last
        self.breaks = 0  # times that the master did not answer and was there afterwards
        _probe(address.master)
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # Mooncake logs every call at INFO to stderr
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            local_hostname(address.master),
            METADATA,
            0,  # lends no memory
            0,  # and stages nothing: objects go into registered memory
            address.protocol,
            address.device,
            address.master,
        )
        self._check("setup", address.master, code)

    def register(self, memory: torch.Tensor) -> None:
        """Let the store write into `memory` (contiguous, on the CPU)."""
        code = self._store.register_buffer(memory.data_ptr(), memory.nbytes)
        self._check("register_buffer", str(memory.nbytes), code)

    def unregister(self, memory: torch.Tensor) -> None:
        self._check("unregister_buffer", str(memory.nbytes), self._store.unregister_buffer(memory.data_ptr()))

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which of the keys are there, in one round trip."""
        self._check_master()
        codes = self._store.batch_is_exist(list(keys))
        for key, code in zip(keys, codes, strict=True):
            self._check("exist", key, code)
        return [code == 1 for code in codes]

    def get_into(self, parts: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Read objects into registered memory in one call, each split over its parts, whose sum is its size.

        Raises HiddenStatesError with Mooncake's code when one is missing or of another size.
        """
        self._check_master()
        pointers = [[part.data_ptr() for part in split] for split in parts.values()]
        sizes = [[part.nbytes for part in split] for split in parts.values()]
        codes = self._store.batch_get_into_multi_buffers(list(parts), pointers, sizes)
        for key, code, wanted in zip(parts, codes, map(sum, sizes), strict=True):
            self._check("get", key, code)
            if code != wanted:
                raise HiddenStatesError(f"Mooncake get: {key}: expected {wanted} bytes, found {code}")

    def get_error(self, key: str) -> str:
        """The producer's message under a key's error marker, which exists."""
        self._check_master()
        marker = error_name(key)
        size = self._store.get_size(marker)
        self._check("size", marker, size)
        memory = torch.empty(size, dtype=torch.uint8)
        self.register(memory)
        try:
            self.get_into({marker: [memory]})
        finally:
            self.unregister(memory)
        return memory.numpy().tobytes().decode(errors="replace")

    def remove(self, keys: Sequence[str]) -> None:
        """Delete objects at once, read leases or not; missing ones are fine."""
        self._check_master()
        for key, code in zip(keys, self._store.batch_remove(list(keys), True), strict=True):
            if code != NOT_FOUND:
                self._check("remove", key, code)

    def close(self) -> None:
        self._check("close", "", self._store.close())

    def _check_master(self) -> None:
        if self._gone is not None:
            raise StoreGoneError(self._gone)

    def _check(self, operation: str, what: str, code: int) -> None:
        if isinstance(code, int) and code >= 0:
            return
        found = f"Mooncake {operation}: {what}: expected success, found code {code}"
        if code in _NO_ANSWER:
            try:
                _probe(self._master, _BACK_WITHIN_S)  # a connection that broke is made again by the next call
            except StoreGoneError as error:
                self._gone = f"{found}; {error}"
                raise StoreGoneError(self._gone) from error
            if time.monotonic() - self._broke > _ONE_BREAK_S:  # several connections broke at once
                self.breaks += 1
            self._broke = time.monotonic()
        raise HiddenStatesError(found)


def _probe(master: str, within_s: float = 0.0) -> None:
    """Raise StoreGoneError when nobody accepts a connection by then; Mooncake's setup takes 90 s to say so."""
    host, port = master.rsplit(":", 1)
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_PROBE_TIMEOUT_S).close()
        except OSError as error:
            if time.monotonic() >= deadline:
                asked = f"hidden_states.master_address={master}"
                raise StoreGoneError(f"{asked}: expected a Mooncake master, found {error}") from error
            time.sleep(_AGAIN_S)
        else:
            return
