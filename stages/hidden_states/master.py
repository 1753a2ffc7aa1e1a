"""A Mooncake master that lives as long as a pool of extractors."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from stages.engine.cpu import die_with_parent
from stages.engine.log import tail
from stages.hidden_states.wire import HiddenStatesError

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0


@contextmanager
def mooncake_master(host: str, log: Path) -> Iterator[str]:
    """Run `mooncake_master` on free ports of `host`, an address of this machine; gives its RPC's host:port.

    It never evicts: a full store refuses a put by name instead of dropping a sample that nobody has
    read. The kernel ends it with the calling thread, so keep that thread as long as the context.
    Raises HiddenStatesError with the end of its log when it does not come up, and from what ends the
    context when it has died by then.
    """
    rpc_port, metrics_port = _free_ports(host, 2)
    flags = {
        "rpc_address": host,
        "rpc_port": rpc_port,
        "metrics_host": host,
        "metrics_port": metrics_port,
        "eviction_high_watermark_ratio": 1.0,
        "eviction_ratio": 0,
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(_binary()), *(f"-{name}={value}" for name, value in flags.items())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
    try:
        _wait(process, host, rpc_port, log)
        try:
            yield f"{host}:{rpc_port}"
        except Exception as error:
            if process.poll() is None:
                raise
            raise _died(process, log) from error
    finally:
        _end(process)


def _binary() -> Path:
    package = find_spec("mooncake")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).with_name("mooncake_master")


def _wait(process: subprocess.Popen[bytes], host: str, port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise _died(process, log)


def _died(process: subprocess.Popen[bytes], log: Path) -> HiddenStatesError:
    state = "does not answer" if process.poll() is None else f"ended with status {process.returncode}"
    return HiddenStatesError(f"mooncake_master {state}; {log} ends with:\n{tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(host: str, count: int) -> list[int]:
    probes = [socket.create_server((host, 0)) for _ in range(count)]  # all open at once: never the same twice
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
