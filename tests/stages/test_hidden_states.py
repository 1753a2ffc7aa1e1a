"""Hidden states: bytes and checks, the master and the store."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.request import urlopen

import numpy as np
import pytest
import torch
from store_helpers import SEGMENT_BYTES, Lender, address_of, kill_master, master_process, metrics_url, wait_until_dead

from stages.hidden_states import pool
from stages.hidden_states.arrivals import Arrivals
from stages.hidden_states.layout import TRAILER_BYTES, Layout, as_bytes, check_seal, seal
from stages.hidden_states.master import mooncake_master
from stages.hidden_states.reader import ByteBudget
from stages.hidden_states.store import HiddenStatesStore, StoreAddress, StoreGoneError
from stages.hidden_states.wire import HiddenStatesError, Manifest
from stages.hidden_states.writer import SealedStore

ROOT = Path(__file__).parents[2]


# Bytes and checks


MANIFEST = Manifest("k", (9, 2, 8), "bfloat16", 2, (1, 3), True, "tiny", 7, 0, 128)


def test_trailer_vouches_for_bytes_tokens_and_manifest() -> None:
    states, span = as_bytes(torch.randn(5, 2, 8, dtype=torch.bfloat16)), slice(0, 5)
    trailer = seal(states, MANIFEST, span)
    check_seal(trailer, states, MANIFEST, span)
    for damaged_byte in (11, len(states) + 20, len(states) + 60):
        whole = bytearray(states.tobytes() + trailer)
        whole[damaged_byte] ^= 1
        with pytest.raises(HiddenStatesError, match="damaged bytes"):
            check_seal(bytes(whole[len(states) :]), np.frombuffer(whole[: len(states)], np.uint8), MANIFEST, span)
    with pytest.raises(HiddenStatesError, match=r"states of other tokens: expected 0\.\.5 of 9 .*, found 0\.\.5 of 9"):
        check_seal(trailer, states, replace(MANIFEST, tokens_crc32=8), span)
    with pytest.raises(HiddenStatesError, match=r"expected 4\.\.9 of 9 .*, found 0\.\.5 of 9"):
        check_seal(trailer, states, MANIFEST, slice(4, 9))
    with pytest.raises(HiddenStatesError, match="not written whole"):
        check_seal(bytes(len(trailer)), states, MANIFEST, span)


WRITE_ONE = """
import os, threading
import numpy as np, torch
from stages.hidden_states.rows import CachedStates
from stages.hidden_states.wire import Manifest
from stages.hidden_states.writer import SealedStore

store = object.__new__(SealedStore)
store._sweep = lambda: None
store._staging_buffer = lambda _, size: torch.empty(size, dtype=torch.uint8)
store._put = lambda name, *_: print(len(os.listdir("/proc/self/task")) - before)
manifest = Manifest("k", (2048, 3, 256), "bfloat16", 1, (1, 2, 3), True, "tiny", 7, 0, 128)
states = CachedStates(torch.randn(1, 3, 2048, 256).to(torch.bfloat16), torch.arange(2048))
torch.randn(2048, 2048).to(torch.bfloat16)  # an operator of the engine's own threads
before = len(os.listdir("/proc/self/task"))
writer = threading.Thread(target=store.put_stripe, args=(manifest, 0, np.arange(2048), states))
writer.start()
writer.join()
"""


def test_a_writer_is_one_thread() -> None:
    """More OpenMP threads than cores, and libgomp puts the engine's to sleep after every operator."""
    found = subprocess.run(
        [sys.executable, "-c", WRITE_ONE], env=os.environ | {"OMP_NUM_THREADS": "2"}, cwd=ROOT, capture_output=True
    )
    assert found.stdout.decode().split() == ["1"], found.stderr.decode()


@pytest.mark.parametrize(
    "change",
    [{"key": "j"}, {"attempt": 1}, {"layer_ids": (3, 1)}, {"target": "other"}, {"pre_norm": False}, {"stripes": 3}],
)
def test_bytes_of_another_manifest_are_refused(change: dict[str, Any]) -> None:
    states, span = as_bytes(torch.randn(5, 2, 8, dtype=torch.bfloat16)), slice(0, 5)
    with pytest.raises(HiddenStatesError, match="another manifest"):
        check_seal(seal(states, replace(MANIFEST, **change), span), states, MANIFEST, span)
    [name] = change
    said = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(MANIFEST).items()}
    MANIFEST.check(said)
    with pytest.raises(HiddenStatesError, match=f"manifest differs: {name}: expected"):
        MANIFEST.check(said | change)
    del said[name]
    with pytest.raises(HiddenStatesError, match=f"{name}: expected .*, found None"):
        MANIFEST.check(said)


@pytest.mark.parametrize("stripes", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 8, 9, 64])
def test_stripes_share_all_tokens(num_tokens: int, stripes: int) -> None:
    layout = Layout(2, 8, "bfloat16", stripes)
    spans = layout.spans(num_tokens)
    assert [token for span in spans for token in range(num_tokens)[span]] == list(range(num_tokens))
    lengths = [span.stop - span.start for span in spans]
    assert len(lengths) <= stripes
    assert min(lengths, default=1) > 0
    assert max(lengths, default=0) <= -(-num_tokens // stripes)
    stored = sum(layout.payload_bytes(length) + TRAILER_BYTES for length in lengths)
    assert stored <= layout.object_bytes(num_tokens) < stored + stripes * layout.payload_bytes(1) + 1


def test_memory_for_a_batch_is_one_piece() -> None:
    leased: list[torch.Tensor] = []

    def lease(size: int) -> torch.Tensor:
        leased.append(torch.empty(size, dtype=torch.uint8))
        return leased[-1]

    states, scratch = Layout(2, 8, "bfloat16", 2).allocate([3, 0, 1], lease)
    [memory] = leased
    assert states.shape == (4, 2, 8)
    assert [len(one) for one in scratch] == [2 * TRAILER_BYTES, 0, TRAILER_BYTES]
    assert states.nbytes + sum(map(len, scratch)) == memory.nbytes
    assert states.data_ptr() == memory.data_ptr()


def test_budget_is_never_exceeded_and_serves_in_order() -> None:
    order: list[int] = []
    held = peak = 0

    async def hold(budget: ByteBudget, name: int, size: int) -> None:
        nonlocal held, peak
        async with budget.hold(size):
            order.append(name)
            held += size
            peak = max(peak, held)
            await asyncio.sleep(0.01)
            held -= size

    async def run() -> None:
        budget = ByteBudget(10)
        tasks = [asyncio.create_task(hold(budget, i, size)) for i, size in enumerate([6, 6, 4, 10, 1])]
        await asyncio.sleep(0.001)
        tasks[1].cancel()  # a waiter that goes away must not block the others
        await asyncio.gather(*tasks, return_exceptions=True)
        await hold(budget, 9, 10)  # all was given back

    asyncio.run(run())
    assert order == [0, 2, 3, 4, 9]
    assert peak == 10


# The master and the store


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mooncake_master("127.0.0.1", tmp_path_factory.mktemp("master") / "master.log") as running:
        yield running


def test_store_checks_every_code(master: str) -> None:
    store, reader = Lender(master, local_buffer_bytes=48 << 20), HiddenStatesStore(address_of(master))
    assert store.put("a", bytes(range(100))) == 0
    memory = torch.zeros(128, dtype=torch.uint8)
    reader.register(memory)
    reader.get_into({"a": [memory[:60], memory[80:120]]})
    assert memory[:60].tolist() == list(range(60))
    assert memory[80:120].tolist() == list(range(60, 100))
    with pytest.raises(HiddenStatesError, match="get: a: expected success, found code"):
        reader.get_into({"a": [memory[:50]]})
    assert reader.exist(["a", "b"]) == [True, False]
    reader.remove(["a", "b"])  # the other was never there
    reader.remove(["a"])  # already gone
    assert reader.exist(["a"]) == [False]
    with pytest.raises(HiddenStatesError, match="-704"):
        reader.get_into({"a": [memory[:100]]})
    assert store.put("big", bytes(2 * SEGMENT_BYTES)) == -200  # larger than all memory lent
    reader.unregister(memory)
    reader.close()
    store.close()


def test_a_full_store_refuses_instead_of_evicting(master: str) -> None:
    store, reader = Lender(master, local_buffer_bytes=SEGMENT_BYTES), HiddenStatesStore(address_of(master))
    keys = [f"full-{i}" for i in range(4)]
    assert [store.put(key, bytes(SEGMENT_BYTES // 5)) for key in keys] == [0] * 4
    assert store.put("one more", bytes(SEGMENT_BYTES // 3)) == -200
    time.sleep(0.5)  # eviction would be at work by now
    assert reader.exist([*keys, "one more"]) == [True] * 4 + [False]
    reader.close()
    store.close()


def test_nobody_at_the_master_address_is_said_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(StoreGoneError, match=r"hidden_states\.master_address=127\.0\.0\.1:1"):
        HiddenStatesStore(StoreAddress("127.0.0.1:1", "tcp", ""))
    assert time.monotonic() - started < 10


def test_a_master_that_dies_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.hidden_states.store._BACK_WITHIN_S", 0.5)

    def run(fail: bool) -> None:
        with mooncake_master("127.0.0.1", tmp_path / "master.log") as running:
            store = HiddenStatesStore(address_of(running))
            kill_master(running)
            for call in (lambda: store.exist(["a"]), lambda: store.remove(["a"]), lambda: store.get_error("a")):
                with pytest.raises(
                    StoreGoneError, match=r"Mooncake exist: a: .* code -900.*expected a Mooncake master"
                ):
                    call()  # the later ones without waiting for the master again
            if fail:
                raise OSError("what the body ran into")

    with pytest.raises(HiddenStatesError, match=r"(?s)ended with status -9.*Master") as failed:
        run(fail=True)
    assert isinstance(failed.value.__cause__, OSError)
    run(fail=False)  # what is finished does not fail any more


def test_an_unreadable_error_marker_fails_its_own_sample_only() -> None:
    class Store:
        breaks = 1

        def exist(self, keys: list[str]) -> list[bool]:
            return [key in ("bad.error", "bad.0", "good.0", "good.1") for key in keys]

        def get_error(self, key: str) -> str:
            raise HiddenStatesError("code -704")

    async def wait() -> list[object]:
        arrivals = Arrivals(cast("HiddenStatesStore", Store()))
        async with asyncio.timeout(5):
            return await asyncio.gather(
                arrivals.wait("bad", ["bad.0"], 1),
                arrivals.wait("good", ["good.0", "good.1"], 1),
                arrivals.wait("forgotten", ["forgotten.0"], 0),
                return_exceptions=True,
            )

    bad, good, forgotten = asyncio.run(wait())
    assert "master may have been started again" in str(forgotten)
    assert "why cannot be read: code -704" in str(bad)
    assert good is None


def test_whatever_a_look_at_the_store_raises_is_told_to_all_who_wait() -> None:
    class Store:
        breaks = 1

        def exist(self, keys: list[str]) -> list[bool]:
            raise OSError("no more sockets")

    async def wait() -> list[object]:
        arrivals = Arrivals(cast("HiddenStatesStore", Store()))
        async with asyncio.timeout(5):
            waits = [arrivals.wait(key, [f"{key}.0"], 1) for key in ("a", "b")]
            return await asyncio.gather(*waits, return_exceptions=True)

    found = asyncio.run(wait())
    assert [type(error) for error in found] == [HiddenStatesError] * 2
    assert {str(error) for error in found} == {"OSError: no more sockets"}


def test_a_marker_names_what_is_not_ours_and_is_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    store = object.__new__(SealedStore)
    monkeypatch.setattr(store, "_staging_buffer", lambda _, size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(store, "_put", lambda _, staging, size, __: told.append(bytes(staging.numpy()).decode()))
    for error in (KeyError("k"), HiddenStatesError("a row of zeros"), AssertionError(), HiddenStatesError("")):
        store.put_failure("key", error)
    assert told == ["KeyError: 'k'", "a row of zeros", "AssertionError: ", "HiddenStatesError: "]


def test_a_put_that_fails_names_the_object_and_the_way_out_of_a_full_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.hidden_states.writer.in_own_memory", lambda _: None)
    store, memory = object.__new__(SealedStore), torch.empty(8, dtype=torch.uint8)
    code = -200
    monkeypatch.setattr(store, "_require_store", lambda: SimpleNamespace(put_from=lambda *_: code))
    with pytest.raises(
        HiddenStatesError, match=r"put of k\.0 .*code -200; .*raise hidden_states\.segment_gib or lower"
    ):
        store._put("k.0", memory, 8, 0.0)
    code = -800
    with pytest.raises(HiddenStatesError, match=r"put of k\.0 \(8 bytes\): expected success, found code -800$"):
        store._put("k.0", memory, 8, 0.0)


def test_loopback_is_refused_where_others_cannot_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def cluster(*addresses: str) -> None:
        nodes = [{"NodeManagerAddress": address, "Alive": address != "10.0.0.9"} for address in addresses]
        monkeypatch.setattr("ray.nodes", lambda: nodes)
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda: addresses[0])

    for alone in (["10.0.0.1"], ["10.0.0.1", "10.0.0.1"], ["10.0.0.1", "10.0.0.9"], ["127.0.0.1"]):
        cluster(*alone)
        assert pool._own_host() == "127.0.0.1"
        pool._check_reachable("localhost:50051")
    cluster("10.0.0.1", "10.0.0.2")
    assert pool._own_host() == "10.0.0.1"
    for reached in ("10.0.0.1:50051", "master.local:50051"):
        pool._check_reachable(reached)
    for master in ("127.0.0.1:50051", "localhost:50051"):
        with pytest.raises(ValueError, match=rf"master_address={master}: expected .* all 2 machines"):
            pool._check_reachable(master)


def test_a_master_dies_with_its_sigkilled_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from stages.hidden_states.master import mooncake_master\n"
        f"with mooncake_master('127.0.0.1', Path({str(tmp_path / 'log')!r})) as master:\n"
        "    print(master, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    process = master_process(parent.stdout.readline().strip(), parent.pid)
    assert b"master_" in urlopen(metrics_url(process), timeout=5).read()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_dead(process)
