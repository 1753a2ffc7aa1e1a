"""Real vLLM engines, a real master and real Ray: the contract, bit-equality, and engines that are killed.

The target is a hybrid, whose caches have other blocks than the hidden states': in slots of the wrong ones, as
reckoned from the engine's own block size, nothing would pass.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import ray
import torch
from store_helpers import master_process
from tiny_targets import tiny_target
from transformers import MinistralForCausalLM

from stages.artifacts import Workspace
from stages.corpus import TokenSequence
from stages.engine.config import EngineConfig
from stages.engine.requests import EngineError
from stages.events import METRICS, read_rows
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.contract import SHORT_PROMPTS
from stages.hidden_states.layout import TRAILER_BYTES
from stages.hidden_states.pool import ExtractorPool, extractor_pool, open_reader, states_of
from stages.hidden_states.proof import layer_rms
from stages.hidden_states.store import HiddenStatesStore
from stages.hidden_states.wire import HiddenBatch
from stages.target import Target

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
LAYER_IDS = (1, 2, 3)
ENGINE = EngineConfig(max_model_len=256, max_num_batched_tokens=128, max_num_seqs=8, num_actors=2, kv_cache_gib=0.25)
CONFIG = HiddenStatesConfig(segment_gib=1 / 64, sample_timeout_s=900.0)  # engines start within half of it anywhere


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


def engine_core(work: Path, actor: int) -> psutil.Process:
    """The process of an actor's newest engine, as its log names it: titles of processes depend on the environment."""
    pids = re.findall(r"\(EngineCore pid=(\d+)\)", (work / f"engine-{actor}.log").read_text())
    return psutil.Process(int(pids[-1]))


def all_gone(processes: list[psutil.Process], within_s: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def sequences(count: int) -> list[TokenSequence]:
    random = np.random.default_rng(0)
    lengths = random.integers(10, 257, count)  # some longer than one prefill chunk, some as long as the model allows
    ids = [random.integers(2, 256, length, dtype=np.int32) for length in [256, *lengths[1:]]]
    return [TokenSequence(f"s{i}", "test", tokens, np.ones(len(tokens), bool)) for i, tokens in enumerate(ids)]


def joined(batches: list[HiddenBatch]) -> torch.Tensor:
    assert not [batch.set_aside for batch in batches if batch.set_aside]
    return torch.cat([batch.states_TLD for batch in batches])


def check_against_transformers(target: Target, batch: HiddenBatch) -> None:
    """Layer k of vLLM is entry k of transformers' hidden states (k < num_layers: the residual stream)."""
    model = MinistralForCausalLM.from_pretrained(target.model, dtype=torch.float32)
    start = 0
    for sequence in batch.sequences:
        states_TLD = batch.states_TLD[start : start + len(sequence)].float()
        start += len(sequence)
        with torch.no_grad():
            wanted = model(torch.from_numpy(sequence.input_ids)[None].long(), output_hidden_states=True).hidden_states
        for index in (0, 1):
            similarity = torch.cosine_similarity(states_TLD[:, index], wanted[LAYER_IDS[index]][0], dim=-1)
            assert similarity.min() > 0.99  # another layer's: 0.7


def check_proof(target: Target, pool: ExtractorPool) -> None:
    """What the engines proved of the first layers is what they measure in transformers, within rounding."""
    model = MinistralForCausalLM.from_pretrained(target.model, dtype=torch.float32)
    short = [ids for ids, _ in pool.endpoint.contract.prompts()[:SHORT_PROMPTS]]
    with torch.no_grad():
        states = [model(torch.from_numpy(ids)[None].long(), output_hidden_states=True).hidden_states for ids in short]
    sizes = layer_rms(torch.cat([torch.stack([of[layer][0] for layer in (1, 2)], dim=1) for of in states]))
    assert sizes[1] / sizes[0] > 1.1
    assert pool.proof.rms.keys() == set(LAYER_IDS)
    for layer, size in zip((1, 2), sizes, strict=True):
        assert pool.proof.rms[layer] == pytest.approx(size, rel=0.005)


def check_disk(target: Target, pool: ExtractorPool, streamed: list[HiddenBatch], out: Workspace) -> None:
    """Kept on disk are the same bits; once they are there, no engine is asked for."""
    batches = [batch.sequences for batch in streamed]
    config = replace(CONFIG, transport="disk")
    for engines in (nullcontext(pool), None):
        with (
            patch("stages.hidden_states.pool.extractor_pool", side_effect=[engines] if engines else AssertionError),
            states_of(
                sequences(24), target, LAYER_IDS, ENGINE, config, work=out.path, out=out, references=()
            ) as open_kept,
            closing(open_kept(1)) as reader,
        ):
            assert torch.equal(joined(list(reader.read(batches))), joined(streamed))
    [flowed] = [row.values for row in read_rows(out.path / METRICS) if "extraction/flow/tok_per_s" in row.values]
    assert flowed["extraction/flow/tok_per_s"] > 0
    assert "extraction/bottleneck/extractors" in flowed


def test_extraction_survives_its_engines(target: Target, cluster: None, tmp_path: Path) -> None:
    wanted = sequences(24)
    batches = [wanted[i : i + 4] for i in range(0, 24, 4)]
    with extractor_pool(target, LAYER_IDS, ENGINE, CONFIG, work=tmp_path) as pool:
        assert 0.5 < pool.proof.agreement.ratio < 1.2  # of the rounding expected
        check_proof(target, pool)
        actors = ray.get([actor.ready.remote() for actor in pool.endpoint.actors])
        reader = open_reader(pool.endpoint, CONFIG, num_ranks=1)
        undisturbed = list(reader.read(batches))
        check_against_transformers(target, undisturbed[0])
        one_by_one = list(reader.read([[sequence] for sequence in wanted]))
        assert torch.equal(joined(undisturbed), joined(one_by_one))
        with Workspace(tmp_path / "out" / "artifacts" / "train-x", "x").locked() as out:
            check_disk(target, pool, undisturbed, out)

        reader.close()

        narrow = replace(CONFIG, window_share=10 / 32 / 16)  # ten of the longest: most is asked for after a kill
        reader = open_reader(pool.endpoint, narrow, num_ranks=1)
        started, disturbed = time.monotonic(), []
        cores = [engine_core(tmp_path, actor) for actor in (0, 1)]
        for index, batch in enumerate(reader.read(batches)):
            disturbed.append(batch)
            if index == 1:  # the engine of one actor: its requests and its unread samples are lost
                cores[0].send_signal(signal.SIGKILL)
            if index == 2:  # another actor, in the middle of what the first has left to it: nothing of its engine stays
                os.kill(actors[1], signal.SIGKILL)
        assert all_gone(cores, within_s=10)
        assert torch.equal(joined(undisturbed), joined(disturbed))
        assert reader._samples._asked > len(wanted)  # some were asked for again
        assert time.monotonic() - started < CONFIG.sample_timeout_s / 2  # nobody waited for what cannot come
        reader.close()
        again = ray.get([actor.ready.remote() for actor in pool.endpoint.actors])
        assert not set(again) & set(actors)
        everything = [psutil.Process(pid) for pid in again] + [engine_core(tmp_path, actor) for actor in (0, 1)]
        everything.append(master_process(pool.endpoint.store.master))
    assert all_gone(everything, within_s=10)


@pytest.mark.soak
def test_ranks_of_an_engine_share_the_writing(target: Target, cluster: None, tmp_path: Path) -> None:
    """Tensor parallel 2: two processes, each with half of the tokens in memory of its own."""
    engine = replace(ENGINE, num_actors=1, tensor_parallel=2)
    with extractor_pool(target, LAYER_IDS, engine, replace(CONFIG, segment_gib=1 / 32), work=tmp_path) as pool:
        assert 0.5 < pool.proof.agreement.ratio < 1.2
        reader = open_reader(pool.endpoint, CONFIG, num_ranks=1)
        [batch] = reader.read([sequences(4)])
        reader.close()
        check_against_transformers(target, batch)
        capture = {"key": "k", "attempt": 0, "encoding": "bfloat16"}
        token_ids = sequences(1)[0].input_ids
        ray.get(pool.endpoint.actors[0].extract.remote(token_ids, capture))
        store, names = HiddenStatesStore(pool.endpoint.store), ["k.0", "k.1"]
        while store.exist(names) != [True, True]:
            time.sleep(0.01)
        stored = [store._store.get_replica_desc(name)[0].get_memory_descriptor().buffer_descriptor for name in names]
        assert [part.size for part in stored] == [len(token_ids) // 2 * 3 * 64 * 2 + TRAILER_BYTES] * 2
        listeners = {c.laddr.port: c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        writers = {listeners[int(part.transport_endpoint.rpartition(":")[2])] for part in stored}
        assert len(writers) == 2
        assert all(psutil.Process(pid).ppid() == engine_core(tmp_path, 0).pid for pid in writers)
        store.close()


def test_a_start_that_fails_says_why(target: Target, cluster: None, tmp_path: Path) -> None:
    engine = EngineConfig(max_model_len=256, max_num_batched_tokens=256, kv_cache_gib=1e-5)
    started = time.monotonic()
    with (
        pytest.raises(EngineError, match=r"ValueError: .*(KV cache|memory)"),
        extractor_pool(target, LAYER_IDS, engine, CONFIG, work=tmp_path),
    ):
        pytest.fail("started")
    assert time.monotonic() - started < 400
