"""Hidden states: bytes and checks, the master and the store."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from urllib.request import urlopen

import pytest
import torch
from hidden_states_helpers import (
    SEGMENT_BYTES,
    Lender,
    address_of,
    kill_master,
    master_process,
    metrics_url,
    wait_until_dead,
)

from stages.hidden_states.arrivals import Arrivals
from stages.hidden_states.layout import as_bytes, check_trailer, trailer
from stages.hidden_states.master import mooncake_master
from stages.hidden_states.reader import ByteBudget
from stages.hidden_states.store import HiddenStatesStore, StoreAddress, StoreGoneError
from stages.hidden_states.wire import HiddenStatesError

ROOT = Path(__file__).parents[2]


# Bytes and checks


def test_trailer_vouches_for_bytes_and_tokens() -> None:
    states = as_bytes(torch.randn(4, 2, 8, dtype=torch.bfloat16))
    seal = trailer(states, 7, 4)
    check_trailer(seal, states, 7, 4)
    damaged = states.copy()
    damaged[11] ^= 1
    with pytest.raises(HiddenStatesError, match="damaged bytes"):
        check_trailer(seal, damaged, 7, 4)
    with pytest.raises(HiddenStatesError, match="states of other tokens"):
        check_trailer(seal, states, 8, 4)
    with pytest.raises(HiddenStatesError, match="not written whole"):
        check_trailer(bytes(len(seal)), states, 7, 4)


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
    reader.get_into("a", (memory[:60], memory[80:120]))
    assert memory[:60].tolist() == list(range(60))
    assert memory[80:120].tolist() == list(range(60, 100))
    with pytest.raises(HiddenStatesError, match="get a: expected success, found code"):
        reader.get_into("a", (memory[:50],))
    assert reader.exist(["a", "b"]) == [True, False]
    reader.remove("a")
    reader.remove("a")  # already gone
    assert reader.exist(["a"]) == [False]
    with pytest.raises(HiddenStatesError, match="-704"):
        reader.get_into("a", (memory[:100],))
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
        HiddenStatesStore(StoreAddress("127.0.0.1:1", "tcp", "", 0))
    assert time.monotonic() - started < 10


def test_a_master_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    def run(fail: bool) -> None:
        with mooncake_master("127.0.0.1", tmp_path / "master.log") as running:
            store = HiddenStatesStore(address_of(running))
            kill_master(running)
            for call in (lambda: store.exist(["a"]), lambda: store.remove("a"), lambda: store.get_error("a")):
                with pytest.raises(StoreGoneError, match=r"Mooncake exist a: .* code -900.*expected a Mooncake master"):
                    call()  # the later ones without waiting for the master again
            if fail:
                raise OSError("what the body ran into")

    with pytest.raises(HiddenStatesError, match=r"(?s)ended with status -9.*Master") as failed:
        run(fail=True)
    assert isinstance(failed.value.__cause__, OSError)
    run(fail=False)  # what is finished does not fail any more


def test_an_unreadable_error_marker_fails_its_own_sample_only() -> None:
    class Store:
        def exist(self, keys: list[str]) -> list[bool]:
            return [key in ("bad:error", "good") for key in keys]

        def get_error(self, key: str) -> str:
            raise HiddenStatesError("code -704")

    async def wait() -> list[object]:
        arrivals = Arrivals(cast("HiddenStatesStore", Store()))
        async with asyncio.timeout(5):
            return await asyncio.gather(arrivals.wait("bad"), arrivals.wait("good"), return_exceptions=True)

    bad, good = asyncio.run(wait())
    assert "why cannot be read: code -704" in str(bad)
    assert good is None


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
