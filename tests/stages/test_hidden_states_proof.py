"""What engines prove of every layer: kept with artifacts, and held against each engine that comes later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from hidden_states_helpers import HIDDEN_SIZE, STRIPES, VOCAB_SIZE, extractors, sequence, states_of

from stages.artifacts import ArtifactError, Record, Workspace
from stages.engine.config import EngineConfig
from stages.events import METRICS, read_rows
from stages.hidden_states import pool
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.contract import Agreement, ContractError
from stages.hidden_states.master import mooncake_master
from stages.hidden_states.pool import open_reader
from stages.hidden_states.proof import CONTRACT, Proof, layer_rms
from stages.hidden_states.samples import Endpoint, check_contract
from stages.hidden_states.wire import HiddenStatesError
from stages.target import Target, TargetShape

ROOT = Path(__file__).parents[2]
LAYERS = (1, 2, 3)
MIXED_UP = {"swapped": (2, 1, 3), "one off": (1, 3, 3)}
AGREEMENT = Agreement(0.02, 1.0, 3.0, 700)
CONFIG = HiddenStatesConfig(sample_timeout_s=20.0, max_set_aside_share=0.0, segment_gib=1 / 16)


def proof(**rms: float) -> Proof:
    return Proof(AGREEMENT, {int(name[1:]): value for name, value in rms.items()})


def test_the_median_is_no_sinks_business() -> None:
    states = torch.ones(9, 2, 4)
    states[:, 1] = 3.0
    states[0] = 1e6
    assert layer_rms(states.bfloat16()) == [1.0, 3.0]


def test_what_was_kept_is_read_again_and_stays(tmp_path: Path) -> None:
    assert Proof.read(tmp_path) is None
    first, second = proof(l1=2.0, l3=4.0), proof(l1=2.01, l3=4.0)
    assert first.keep(tmp_path)
    assert not second.keep(tmp_path)
    assert Proof.read(tmp_path) == first
    told = json.loads((tmp_path / CONTRACT).read_text())
    assert told["rms"] == {"1": 2.0, "3": 4.0}
    assert told["tolerance"] == AGREEMENT.tolerance
    for wrong in ('{"rms": {"1": 2.0}}', "[]", json.dumps(told | {"rms": {"one": 2.0}}), "{"):
        (tmp_path / CONTRACT).write_text(wrong)
        with pytest.raises(ArtifactError, match=rf"{CONTRACT}: expected"):
            Proof.read(tmp_path)


@pytest.mark.parametrize("found", [2.05, 1.95, float("nan"), float("inf"), 0.0])
def test_another_size_names_layer_file_and_both_numbers(tmp_path: Path, found: float) -> None:
    proof(l2=2.0, l3=4.0).keep(tmp_path)
    proof(l1=7.0, l2=2.03, l3=3.97).check_kept([tmp_path, tmp_path / "none"])  # layer 1 is in the one alone
    with pytest.raises(ContractError, match=rf"layer 2: .* RMS 2, as {tmp_path / CONTRACT} has, found {found:.4g} "):
        proof(l2=found, l3=4.0).check_kept([tmp_path / "none", tmp_path])


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mooncake_master("127.0.0.1", tmp_path_factory.mktemp("master") / "master.log") as running:
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("extractors")


@pytest.fixture(scope="module")
def checked(master: str, home: Path) -> Iterator[Endpoint]:
    environment = {"env_vars": {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    with extractors(master, home, 2, layer_ids=LAYERS) as endpoint:
        yield endpoint
    ray.shutdown()


@pytest.fixture
def endpoint(checked: Endpoint) -> Iterator[Endpoint]:
    """Of engines that capture what they should; those that a test leaves otherwise are started anew, so to say."""
    yield check_contract(replace(checked, proof=None, lives=frozenset()), CONFIG)[0]
    capture(checked, LAYERS, 0, 1)


def capture(endpoint: Endpoint, layers: tuple[int, ...], *actors: int) -> None:
    ray.get([endpoint.actors[actor].capture.remote(layers) for actor in actors])


def test_sizes_are_of_the_layers_that_are_asked_for(endpoint: Endpoint) -> None:
    assert endpoint.proof is not None
    states = torch.cat([states_of(ids, LAYERS) for ids, _ in endpoint.contract.prompts()[:5]])
    assert endpoint.proof.rms == dict(zip(LAYERS, layer_rms(states), strict=True))
    sizes = list(endpoint.proof.rms.values())
    assert all(b / a > 1.04 for a, b in pairwise(sizes))


@pytest.mark.parametrize("mixed", MIXED_UP)
def test_mixed_layers_of_one_engine_end_the_start(endpoint: Endpoint, mixed: str) -> None:
    capture(endpoint, MIXED_UP[mixed], 1)
    anew = replace(endpoint, proof=None, lives=frozenset())
    layer = {"swapped": 1, "one off": 2}[mixed]
    with pytest.raises(ContractError, match=rf"layer {layer}: .*as engine 0 gave and engine 1 did not, found \d"):
        check_contract(anew, CONFIG)


def test_an_engine_that_comes_back_mixed_up_gives_no_sample(endpoint: Endpoint) -> None:
    with closing(open_reader(endpoint, CONFIG, num_ranks=1)) as reader:
        capture(endpoint, MIXED_UP["swapped"], 0)
        read = list(reader.read([[sequence(8 * b + i) for i in range(8)] for b in range(6)]))
        for batch in read:
            assert torch.equal(batch.states_TLD, torch.cat([states_of(s.input_ids, LAYERS) for s in batch.sequences]))
        capture(endpoint, MIXED_UP["one off"], 1)
        with pytest.raises(HiddenStatesError, match=r"all 2 engines are dead.*layer 2: .*the pool's first engine gave"):
            list(reader.read([[sequence(1)]]))
        assert "came back, but: layer 1: expected" in reader._samples.dispatcher._dead[0]


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint) -> Iterator[list[int]]:
    """Let `EnginePool` give pretended extractors; counts its starts."""
    starts = []

    @contextmanager
    def start(*_: Any) -> Iterator[SimpleNamespace]:
        starts.append(1)
        yield SimpleNamespace(actors=endpoint.actors)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "EnginePool", start)
        yield starts


def target(home: Path) -> Target:
    shape = asdict(TargetShape(num_layers=3, hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, max_positions=257))
    facts = {"built": False, "model": str(home), "revision": None, "trust_remote_code": False, "shape": shape}
    return Target(home, Record("Target", "tiny", 1, {}, {}, {}, {}, facts, "", "", 0.0))


@pytest.mark.parametrize("transport", ["mooncake", "disk"])
def test_artifacts_hold_engines_to_what_others_proved(
    endpoint: Endpoint, master: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Any
) -> None:
    engine = EngineConfig(
        max_model_len=256, max_num_batched_tokens=128, num_actors=2, tensor_parallel=STRIPES, kv_cache_gib=1.0
    )
    config = replace(CONFIG, transport=transport, master_address=master)

    def make(name: str, *references: Path, tokens: int = 5) -> dict[str, float]:
        """An artifact of the states of one sequence; what it logged at the start, and its batch's sizes."""
        out = Workspace(tmp_path / name / "artifacts" / "made", "made")
        out.path.mkdir(parents=True, exist_ok=True)
        made = pool.states_of(
            [sequence(3, tokens)], target(home), LAYERS, engine, config, work=out.path, out=out, references=references
        )
        with made as open_kept, closing(open_kept(1)) as reader:
            [batch] = reader.read([[sequence(3, tokens)]])
            sizes = reader.flow().metrics()
        assert torch.equal(batch.states_TLD, states_of(batch.sequences[0].input_ids, LAYERS))
        return {k: v or 0.0 for row in read_rows(out.path / METRICS) for k, v in row.values.items()} | sizes

    def contract(name: str) -> Path:
        return tmp_path / name / "artifacts" / "made.partial"

    with pretended(monkeypatch, endpoint) as starts:
        told = make("first")
        assert endpoint.proof is not None
        for layer, rms in endpoint.proof.rms.items():
            assert told[f"contract/rms_layer_{layer}"] == rms
            assert told[f"states/rms_ratio_layer_{layer}"] == told[f"states/rms_layer_{layer}"] / rms
        assert told["contract/ratio"] < told["contract/tolerance"]
        assert told["contract/positions"] > 500
        assert Proof.read(contract("first")) == endpoint.proof
        make("first", contract("first"))  # again, by engines that agree or from what is kept
        assert len(starts) == (2 if transport == "mooncake" else 1)
        capture(endpoint, MIXED_UP["swapped"], 0, 1)  # all alike: nothing in the pool is odd
        with pytest.raises(ContractError, match=rf"layer 1: .*as {contract('first') / CONTRACT} has, found"):
            make("second", contract("first"))
        with pytest.raises(ContractError, match=rf"layer 1: .*as .*{CONTRACT} has, found"):
            make("first", tokens=6)  # of another try of the same artifact, or of the folder of states
        if transport == "disk":
            proof(l1=9.0).keep(tmp_path)
            with pytest.raises(ContractError, match=rf"layer 1: .*RMS 9, as {tmp_path / CONTRACT} has"):
                make("first", tmp_path)  # no engine is needed, and none is asked
            assert len(starts) == 3
