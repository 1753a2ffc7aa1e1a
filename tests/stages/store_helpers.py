"""A real master and its store, as tests look at them from outside, use them and harm them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import psutil

from stages.hidden_states.master import _binary, _wait
from stages.hidden_states.store import METADATA, StoreAddress, in_own_memory, local_hostname

SEGMENT_BYTES = 16 << 20  # the least that Mooncake takes


def address_of(master: str) -> StoreAddress:
    """How readers reach the store of the master at host:port."""
    return StoreAddress(master, "tcp", "")


def master_process(master: str, parent: int | None = None) -> psutil.Process:
    """The process of a master that this process, or `parent`, has started."""
    flag = f"-rpc_port={master.rpartition(':')[2]}"
    [process] = [p for p in psutil.Process(parent).children() if flag in p.cmdline()]
    return process


def kill_master(master: str) -> None:
    """Kill it and wait until the kernel has closed its sockets; its parent has yet to reap it."""
    process = master_process(master)
    process.kill()
    wait_until_dead(process)
    host, port = master.rsplit(":", 1)
    with contextlib.suppress(ConnectionError):  # a thread of the dead may still listen for a moment
        while True:
            socket.create_connection((host, int(port)), timeout=5).close()


def wait_until_dead(process: psutil.Process) -> None:
    """Wait until it has ended, whether or not somebody has reaped it."""
    deadline = time.monotonic() + 5
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"{process} lives"
            time.sleep(0.01)


def metrics_url(process: psutil.Process) -> str:
    [port] = [flag.partition("=")[2] for flag in process.cmdline() if flag.startswith("-metrics_port=")]
    return f"http://127.0.0.1:{port}/metrics"


def stored_bytes(master: str) -> int:
    """Bytes of all objects in the store."""
    with urlopen(metrics_url(master_process(master)), timeout=5) as answer:
        [line] = [x for x in answer.read().decode().splitlines() if x.startswith("master_allocated_bytes ")]
    return int(float(line.split()[1]))


def start_master(rpc_port: int, metrics_port: int, log: Path) -> subprocess.Popen[bytes]:
    """A master that nobody looks after, as one that others run; returns when it answers."""
    ports = [f"-rpc_port={rpc_port}", f"-metrics_port={metrics_port}", "-rpc_address=127.0.0.1"]
    flags = [*ports, "-metrics_host=127.0.0.1", "-eviction_high_watermark_ratio=1.0", "-eviction_ratio=0"]
    with log.open("ab") as output:
        process = subprocess.Popen([str(_binary()), *flags], stdout=output, stderr=output)
    _wait(process, "127.0.0.1", rpc_port, log)
    return process


class Lender:
    """Lends a segment to the store and puts objects into it, as an extractor's connector does."""

    def __init__(self, master: str, local_buffer_bytes: int = 4 << 20) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        lent = (SEGMENT_BYTES, local_buffer_bytes, "tcp", "", master)
        assert self.store.setup(local_hostname(master), METADATA, *lent) == 0

    def put(self, key: str, value: bytes) -> int:
        """Mooncake's code: 0 or negative."""
        return int(self.store.put(key, value, in_own_memory(self.store)))

    def put_anywhere(self, key: str, value: bytes) -> int:
        """The same, in any extractor's memory."""
        return int(self.store.put(key, value))

    def close(self) -> None:
        self.store.close()
