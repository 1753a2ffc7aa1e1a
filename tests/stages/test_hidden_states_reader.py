"""The reader, against extractors that do every kind of harm, and a real store."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from hidden_states_helpers import extractors, sequence, states_of
from store_helpers import kill_master, stored_bytes
from transport_contract import DAMAGED, LOST, Open, TransportContract

from stages.hidden_states import store
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.layout import TRAILER_BYTES
from stages.hidden_states.master import mooncake_master
from stages.hidden_states.pool import open_reader
from stages.hidden_states.reader import StreamingReader
from stages.hidden_states.samples import Endpoint, check_contract
from stages.hidden_states.store import StoreGoneError
from stages.hidden_states.wire import HiddenBatch, HiddenStatesError, kind_of

ROOT = Path(__file__).parents[2]
CONFIG = HiddenStatesConfig(sample_timeout_s=2.0, attempts=3, max_set_aside_share=0.5)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mooncake_master("127.0.0.1", tmp_path_factory.mktemp("master") / "master.log") as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


HARM = {
    "lose": "no states in time: none within hidden_states.sample_timeout_s=2.0",
    "zero": "the engine could not store them: states are all zero in 1 of 3 tokens, first at token 2",
    "nan": "not finite in 1 of 3 tokens, first at token 1",
    "double": "states of tokens 1 and 4 are equal in all layers",
    "swap": "states of other tokens",
    "flip": "damaged bytes",
    "lose a stripe": "no states in time",
    "other layers": "written for another manifest",
    "short": "found code -800",
    "stall": "no states in time: none within hidden_states.sample_timeout_s=2.0",
    "refuse": "refused by the engine: ValueError: prompt too long",
    "no pre_norm": "manifest differs: pre_norm: expected True, found None",
    "manifest pre_norm": "pre_norm: expected True, found False",
    "manifest layer_ids": "layer_ids: expected (1, 3), found (1, 2)",
    "manifest target": "target: expected 'tiny', found 'other'",
    "manifest tokens_crc32": "tokens_crc32: expected",
}
KINDS = {
    "Mooncake get",
    "damaged bytes",
    "manifest differs",
    "no states in time",
    "refused by the engine",
    "states of other tokens",
    "the engine could not store them",
    "written for another manifest",
}  # of their reasons, which are counted: none names an engine, an object or a number
ONCE = {1000 + 100 * i: harm for i, harm in enumerate(HARM)}
ALWAYS = {5000 + 100 * i: harm for i, harm in enumerate(HARM)}
DIES, DIES_LATE, DEVICE = 9000, 9100, 9200
FAULTS = {first: [harm] for first, harm in ONCE.items()} | {first: [harm] * 3 for first, harm in ALWAYS.items()}
DEATHS = {DIES: ["die"], DIES_LATE: ["die late"]}
FAULTS |= {int(DAMAGED.input_ids[0]): ["flip"] * 3, int(LOST.input_ids[0]): ["refuse"] * 3, DEVICE: ["device"] * 3}
SLOW = (0, 11, 32)


@pytest.fixture(scope="module")
def endpoint(cluster: None, master: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with extractors(master, tmp_path_factory.mktemp("extractors"), 2, FAULTS, SLOW) as found:
        yield found


@contextmanager
def reading(endpoint: Endpoint, config: HiddenStatesConfig = CONFIG) -> Iterator[StreamingReader]:
    reader = open_reader(endpoint, config, num_ranks=1)
    try:
        yield reader
    finally:
        reader.close()
        reader.close()


def check_batch(batch: HiddenBatch) -> None:
    wanted = [states_of(s.input_ids) for s in batch.sequences]
    assert torch.equal(batch.states_TLD, torch.cat(wanted) if wanted else batch.states_TLD[:0])


def asked(endpoint: Endpoint, first: int) -> list[int]:
    """How often each actor was asked for the sequence that starts with `first`."""
    return [ray.get(actor.log.remote()).count(first) for actor in endpoint.actors]


class TestMooncake(TransportContract):
    """Over a real store."""

    @pytest.fixture
    def opener(self, endpoint: Endpoint) -> Open:
        return lambda share: open_reader(endpoint, replace(CONFIG, max_set_aside_share=share), num_ranks=1)


def test_batches_come_in_order_whatever_the_order_of_arrival(endpoint: Endpoint) -> None:
    batches = [[sequence(10 * b + i, 3 + i) for i in range(4)] for b in range(6)]
    with reading(endpoint) as reader:
        for batch, wanted in zip(reader.read(batches), batches, strict=True):
            assert [s.id for s in batch.sequences] == [s.id for s in wanted]
            check_batch(batch)
    assert all(len(ray.get(actor.log.remote())) > 8 for actor in endpoint.actors)  # both worked


def wait_for_checks(reader: StreamingReader) -> None:
    """Until engines that kept somebody waiting have shown that they can answer; none of that stays in the store."""
    deadline = time.monotonic() + 20
    while reader._samples.dispatcher._recovering:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not reader._samples.dispatcher._dead


def test_every_harm_is_survived_once(endpoint: Endpoint, master: str) -> None:
    before = stored_bytes(master)
    with reading(endpoint, replace(CONFIG, sample_timeout_s=2.0)) as reader:
        read = list(reader.read([[sequence(first), sequence(first + 50)] for first in ONCE]))
        wait_for_checks(reader)
    assert [len(batch.sequences) for batch in read] == [2] * len(HARM)
    for batch in read:
        check_batch(batch)
        assert not batch.set_aside
    for first in ONCE:
        assert asked(endpoint, first) == [1, 1]  # the second try went to the other actor
    assert stored_bytes(master) == before


def test_what_never_gets_well_is_set_aside_by_name(endpoint: Endpoint, master: str) -> None:
    before = stored_bytes(master)
    with reading(endpoint, replace(CONFIG, sample_timeout_s=2.0)) as reader:
        read = list(reader.read([[sequence(1), sequence(first), sequence(20, 4)] for first in ALWAYS]))
        wait_for_checks(reader)
    kinds = set()
    for batch, (first, harm) in zip(read, ALWAYS.items(), strict=True):
        assert [s.id for s in batch.sequences] == ["s1", "s20"]
        check_batch(batch)
        [(name, why)] = batch.set_aside
        assert name == f"s{first}"
        assert HARM[harm] in why
        kinds.add(kind_of(why))
        assert sum(asked(endpoint, first)) == 3
    assert kinds == KINDS
    assert stored_bytes(master) == before


def test_a_reason_of_many_lines_is_told_whole(endpoint: Endpoint) -> None:
    with reading(endpoint) as reader:
        [batch] = reader.read([[sequence(1), sequence(DEVICE)]])
    why = "3 tries, the last: the engine could not store them: RuntimeError: device lost look at 7"
    assert batch.set_aside == ((f"s{DEVICE}", why),)


def test_fp8_travels_in_half_the_bytes(endpoint: Endpoint, master: str) -> None:
    layout = replace(endpoint.layout, encoding="fp8")
    half, whole = layout.object_bytes(64), endpoint.layout.object_bytes(64)
    assert half - 2 * TRAILER_BYTES == (whole - 2 * TRAILER_BYTES) * (8 + 4) / 16  # a scale for 8 values here
    encoded, before = replace(endpoint, layout=layout), stored_bytes(master)
    checked, _ = check_contract(replace(encoded, lives=frozenset()), CONFIG)
    assert checked.lives == endpoint.lives
    with reading(encoded) as reader:
        for batch in reader.read([[sequence(10 * b + i, 3 + i) for i in range(4)] for b in range(3)]):
            wanted = torch.cat([states_of(s.input_ids) for s in batch.sequences]).double()
            error = (batch.states_TLD.double() - wanted).norm() / wanted.norm()
            assert 0 < error < 0.04
    assert stored_bytes(master) == before


def test_unread_samples_stay_within_the_budget(endpoint: Endpoint, master: str) -> None:
    size = 64  # tokens
    assert endpoint.layout.object_bytes(size) == 64 * 2 * 8 * 2 + 2 * 64
    window = 3 * endpoint.layout.object_bytes(size)
    before, seen, done = stored_bytes(master), [0], threading.Event()
    # A try that times out on a busy machine makes its engine prove itself again, with objects beside the window.
    config = replace(CONFIG, sample_timeout_s=120.0, window_share=window / endpoint.store_bytes)

    def sample() -> None:
        while not done.is_set():
            seen.append(stored_bytes(master))

    sampling = threading.Thread(target=sample)
    sampling.start()
    with reading(endpoint, config) as reader:
        for batch in reader.read([[sequence(8 * b + i, size) for i in range(8)] for b in range(8)]):
            check_batch(batch)
    done.set()
    sampling.join()
    assert before < max(seen) <= before + window


def test_a_sequence_larger_than_the_budget_is_refused_before_it_is_asked_for(endpoint: Endpoint) -> None:
    with reading(endpoint, replace(CONFIG, window_share=0.0001)) as reader:
        with pytest.raises(HiddenStatesError, match=r"sequence s777 of 200 tokens.*hidden_states\.segment_gib"):
            list(reader.read([[sequence(777, 200)]]))
        assert asked(endpoint, 777) == [0, 0]


def test_an_endpoint_travels_to_another_process(endpoint: Endpoint) -> None:
    @ray.remote(num_cpus=0)
    def read_there(endpoint: Endpoint) -> list[torch.Tensor]:
        with reading(endpoint) as reader:
            return [batch.states_TLD.float() for batch in reader.read([[sequence(1)], [sequence(2)]])]

    found = ray.get(read_there.remote(endpoint))
    assert all(torch.equal(a, states_of(sequence(i).input_ids).float()) for i, a in enumerate(found, start=1))


def test_dead_extractors_come_back_or_end_the_read(cluster: None, master: str, tmp_path: Path) -> None:
    # A time-out longer than the test: a death, also one after the answer, is noticed as such.
    config = replace(CONFIG, sample_timeout_s=900.0)
    with extractors(master, tmp_path, 1, DEATHS) as endpoint, reading(endpoint, config) as reader:
        read = list(reader.read([[sequence(1)], [sequence(DIES), sequence(3)], [sequence(DIES_LATE)]]))
        assert [len(batch.sequences) for batch in read] == [1, 2, 1]
        for batch in read:
            check_batch(batch)
        batches = reader.read([[sequence(i)] for i in range(50)])
        next(batches)
        ray.kill(endpoint.actors[0])  # for good
        with pytest.raises(HiddenStatesError, match="all 1 engines are dead"):
            list(batches)


def test_an_engine_that_dies_is_a_kind_of_reason(cluster: None, master: str, tmp_path: Path) -> None:
    config = replace(CONFIG, sample_timeout_s=900.0, attempts=1, max_set_aside_share=1.0)
    with extractors(master, tmp_path, 1, DEATHS) as endpoint, reading(endpoint, config) as reader:
        read = list(reader.read([[sequence(DIES)], [sequence(DIES_LATE)]]))
    assert {kind_of(why) for batch in read for _, why in batch.set_aside} == {"engine lost"}


def test_an_extractor_that_comes_back_wrong_gives_no_sample(cluster: None, master: str, tmp_path: Path) -> None:
    (tmp_path / "wrong-when-back").touch()
    with extractors(master, tmp_path, 2, DEATHS) as endpoint, reading(endpoint) as reader:
        read = list(reader.read([[sequence(DIES)], *([sequence(8 * b + i) for i in range(8)] for b in range(40))]))
        assert [len(batch.sequences) for batch in read] == [1, *[8] * 40]
        for batch in read:
            check_batch(batch)
        while "**" not in (lives := [(tmp_path / f"lives-{index}").read_text() for index in (0, 1)]):
            time.sleep(0.05)
        survivor = lives.index("*")
        ray.kill(endpoint.actors[survivor])
        with pytest.raises(HiddenStatesError, match="all 2 engines are dead"):
            list(reader.read([[sequence(i)] for i in range(50)]))
        why = reader._samples.dispatcher._dead[1 - survivor]
        assert "came back, but: captured states do not reproduce the engine's log-probabilities" in why


def test_a_dead_master_ends_the_read_at_once_and_is_named(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_BACK_WITHIN_S", 0.5)
    killed: list[float] = []
    set_aside: list[object] = []

    def read() -> None:
        with (
            mooncake_master("127.0.0.1", tmp_path / "master.log") as master,
            extractors(master, tmp_path, 1) as endpoint,
            reading(endpoint, replace(CONFIG, sample_timeout_s=900.0)) as reader,
        ):
            batches = reader.read([[sequence(100 * i)] for i in range(1, 9)] * 20)
            next(batches)
            kill_master(master)
            killed.append(time.monotonic())
            set_aside.extend(batch.set_aside for batch in batches if batch.set_aside)

    with pytest.raises(
        HiddenStatesError, match=r"(?s)mooncake_master ended with status -9; .*master\.log ends with"
    ) as failed:
        read()
    assert isinstance(failed.value.__cause__, StoreGoneError)
    assert "expected a Mooncake master" in str(failed.value.__cause__)
    assert time.monotonic() - killed[0] < 30
    assert not set_aside
