"""Faults of whole parts: engines that hang or leave, a store that others fill, a consumer that is slow, a master that
is started again. After each every sequence is read exactly once and in order, or set aside by name, and nothing stays
in the store."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import pytest
import ray
import torch
from hidden_states_helpers import extractors, sequence, states_of
from store_helpers import SEGMENT_BYTES, Lender, address_of, kill_master, start_master, stored_bytes

from stages.corpus import TokenSequence
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.master import _free_ports
from stages.hidden_states.pool import open_reader
from stages.hidden_states.reader import StreamingReader, misfit
from stages.hidden_states.samples import Endpoint
from stages.hidden_states.store import HiddenStatesStore
from stages.hidden_states.wire import HiddenBatch, HiddenStatesError, kind_of

ROOT = Path(__file__).parents[2]
CONFIG = HiddenStatesConfig(sample_timeout_s=60.0, max_set_aside_share=0.0)
EXIT = 7000


@dataclass
class World:
    """Pretended extractors, and a master that somebody else runs."""

    endpoint: Endpoint
    master: str
    process: subprocess.Popen[bytes]
    restart: Callable[[], subprocess.Popen[bytes]]

    def break_down(self, how: str, *actors: int) -> None:
        ray.get([self.endpoint.actors[actor].break_down.remote(how) for actor in actors])

    def asked(self, first: int) -> list[int]:
        """How often every extractor was asked for the sequence of this first token."""
        return [log.count(first) for log in ray.get([actor.log.remote() for actor in self.endpoint.actors])]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("faults")
    ports = _free_ports("127.0.0.1", 2)

    def start() -> subprocess.Popen[bytes]:
        return start_master(ports[0], ports[1], folder / "master.log")

    environment = {"env_vars": {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    master = f"127.0.0.1:{ports[0]}"
    running = World(None, master, start(), start)  # type: ignore[arg-type]
    try:
        with extractors(master, folder, 2, {EXIT: ["exit"]}) as running.endpoint:
            yield running
    finally:
        ray.shutdown()
        running.process.kill()
        running.process.wait()


@contextmanager
def reading(world: World, config: HiddenStatesConfig = CONFIG) -> Iterator[StreamingReader]:
    """A reader that leaves nothing behind in the store."""
    with closing(open_reader(world.endpoint, config, num_ranks=1)) as reader:
        yield reader
    deadline = time.monotonic() + 10
    while stored_bytes(world.master):  # what was on its way when the read ended
        assert time.monotonic() < deadline, "something stays in the store"
        time.sleep(0.1)


def check(batch: HiddenBatch, wanted: list[TokenSequence]) -> None:
    assert [s.id for s in batch.sequences] == [s.id for s in wanted]
    assert not batch.set_aside
    assert torch.equal(batch.states_TLD, torch.cat([states_of(s.input_ids) for s in wanted]))


def batches(count: int, first: int = 0, tokens: int = 5) -> list[list[TokenSequence]]:
    return [[sequence(first + 10 * b + i, tokens) for i in range(4)] for b in range(count)]


@pytest.mark.parametrize("how", ["stall", "mute"])
def test_an_engine_that_hangs_is_given_up_and_costs_one_time_out(world: World, how: str) -> None:
    wanted = batches(40)
    with reading(world, replace(CONFIG, sample_timeout_s=2.0)) as reader:
        world.break_down(how, 0)
        started = time.monotonic()
        try:
            for batch, sequences in zip(reader.read(wanted), wanted, strict=True):
                check(batch, sequences)
            assert time.monotonic() - started < 6  # 160 sequences, a few of which waited for it
            dispatcher = reader._samples.dispatcher
            assert dispatcher._recovering.keys() | dispatcher._dead.keys() == {0}
            if how == "mute":
                while not dispatcher._dead:
                    assert time.monotonic() - started < 30
                    time.sleep(0.1)
                why = "engine 0 came back, but: no states in time: none within hidden_states.sample_timeout_s=2.0"
                assert dispatcher._dead == {0: why}
        finally:
            world.break_down("", 0)


def test_a_slow_consumer_holds_the_producers_back(world: World) -> None:
    tokens, wanted = 64, batches(6, tokens=64)
    window = 3 * world.endpoint.layout.object_bytes(tokens)
    config = replace(CONFIG, window_share=window / world.endpoint.store_bytes)
    seen, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(stored_bytes(world.master))

    before = sum(world.asked(0)), sum(world.asked(53))
    with reading(world, config) as reader:
        started = time.monotonic()
        for batch, sequences in zip(reader.read(wanted), wanted, strict=True):
            check(batch, sequences)
        batch_s = (time.monotonic() - started) / len(wanted)
        watching = threading.Thread(target=watch)
        watching.start()
        for batch, sequences in zip(reader.read(wanted), wanted, strict=True):
            time.sleep(10 * batch_s)
            check(batch, sequences)
        done.set()
        watching.join()
        assert reader.flow().bottleneck == "trainer"
    assert 0 < max(seen) <= window
    assert (sum(world.asked(0)), sum(world.asked(53))) == (before[0] + 2, before[1] + 2)  # none was lost unread


def test_a_store_that_others_fill_costs_tries_and_then_the_sequence(world: World) -> None:
    large = sequence(901, (2 << 20) // 32)  # 2 MiB; what a stranger leaves free is less
    with reading(world, replace(CONFIG, attempts=2, max_set_aside_share=0.5)) as reader:
        with stranger(world.master, 900 << 10):
            [found] = reader.read([[sequence(1), large, sequence(2)]])
        [(name, why)] = found.set_aside
        assert name == large.id
        assert "2 tries, the last: the engine could not store them: Mooncake put of " in why
        assert ".0 (" in why  # the object's name
        assert kind_of(why) == "the engine could not store them"
        assert "code -200; the store is full: raise hidden_states.segment_gib or lower" in why
        assert [s.id for s in found.sequences] == ["s1", "s2"]  # small ones have room
        assert sorted(world.asked(901)) == [1, 1]
        [found] = reader.read([[large]])
        check(found, [large])


@contextmanager
def stranger(master: str, size: int) -> Iterator[None]:
    """Another user of the store, who fills it with objects of `size` bytes."""
    lender = Lender(master, local_buffer_bytes=SEGMENT_BYTES)
    names = [f"stranger-{number}" for number in range(1000)]
    try:
        taken = list(takewhile(lambda name: lender.put_anywhere(name, bytes(size)) == 0, names))
        assert len(taken) > SEGMENT_BYTES // size
        yield
    finally:
        store = HiddenStatesStore(address_of(master))
        store.remove(taken)
        store.close()
        lender.close()


def test_a_store_that_is_too_small_for_the_window_only_slows_the_read_down(world: World) -> None:
    """As if three readers each believed that the whole store is theirs: puts wait until somebody has read."""
    tokens = 3 << 16  # 6 MiB each; a segment holds two
    wanted = [[sequence(i, tokens)] for i in range(8)]
    config = replace(CONFIG, window_share=3.0)
    with reading(world, config) as reader:
        for batch, sequences in zip(reader.read(wanted), wanted, strict=True):
            check(batch, sequences)


def test_a_sample_larger_than_what_an_engine_lends_is_refused_by_its_keys(world: World) -> None:
    size = SEGMENT_BYTES + 1
    assert misfit(sequence(1), size - 1, 2 * size, SEGMENT_BYTES) is None
    why = misfit(sequence(1), size, 2 * size, SEGMENT_BYTES)
    assert why is not None
    assert f"object of {size} bytes" in why
    assert "raise hidden_states.segment_gib" in why
    with reading(world, replace(CONFIG, window_share=1.0)) as reader:
        with pytest.raises(HiddenStatesError, match=r"sequence s777 of 600000 tokens .*hidden_states\.segment_gib"):
            list(reader.read([[sequence(777, 600_000)]]))
        assert world.asked(777) == [0, 0]


@pytest.mark.parametrize("idle", [True, False])
def test_a_master_that_is_started_again_loses_nothing(world: World, idle: bool) -> None:
    """Idle: between two reads. Otherwise: while many samples are on their way."""
    wanted = batches(60, first=1)
    with reading(world) as reader:
        read = reader.read(wanted)
        check(next(read), wanted[0])
        if idle:
            time.sleep(0.5)
        restarted = threading.Thread(target=_start_again, args=(world,))
        restarted.start()
        if idle:
            restarted.join()
        started = time.monotonic()
        for batch, sequences in zip(read, wanted[1:], strict=True):
            check(batch, sequences)
        restarted.join()
        assert time.monotonic() - started < CONFIG.sample_timeout_s / 2  # nobody waited for what was forgotten


def _start_again(world: World) -> None:
    with suppress(FileNotFoundError):
        kill_master(world.master)
    world.process.wait()
    world.process = world.restart()


def test_an_engine_that_leaves_politely_is_dead_too(world: World) -> None:
    wanted = [*batches(3, first=1), [sequence(EXIT), sequence(2)], *batches(20, first=501)]
    started = time.monotonic()
    with reading(world) as reader:
        for batch, sequences in zip(reader.read(wanted), wanted, strict=True):
            check(batch, sequences)
    assert time.monotonic() - started < CONFIG.sample_timeout_s / 2  # nobody waited for an answer
