"""Engines: arguments, cores, logs, processes that end with their parent, and a pool of pretended ones."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from stages.artifacts import Record
from stages.engine import pool as pool_module
from stages.engine.actor import ActorSpec
from stages.engine.args import check_engine, engine_args, extractor_args
from stages.engine.config import EngineConfig
from stages.engine.cpu import bind_cores, cpu_environment
from stages.engine.dispatch import BackgroundLoop, Dispatcher
from stages.engine.log import root_cause
from stages.engine.pool import EnginePool
from stages.engine.requests import EngineError, GenerationRequest, GenerationResult
from stages.target import Target

ROOT = Path(__file__).parents[2]
CPU = EngineConfig(max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4, num_actors=2, kv_cache_gib=0.25)


def test_cores_are_dealt_evenly() -> None:
    cores = [0, 1, 2, 3]
    assert bind_cores(cores, 0, 1, 1) == [[0, 1, 2, 3]]
    assert [bind_cores(cores, i, 2, 1) for i in range(2)] == [[[0, 1]], [[2, 3]]]
    assert bind_cores(cores, 1, 2, 2) == [[2], [3]]
    assert [bind_cores([0, 1], i, 3, 1) for i in range(3)] == [[[0]], [[1]], [[0]]]  # fewer cores than actors


def test_tensor_parallel_ranks_are_separated() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    first, second = cpu_environment(0, 1, 2)["VLLM_CPU_OMP_THREADS_BIND"].split("|")
    assert not set(first.split(",")) & set(second.split(","))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"gpus_per_actor": 1, "tensor_parallel": 2}, "engine.gpus_per_actor"),
        ({"kv_cache_gib": None}, "engine.kv_cache_gib"),
    ],
)
def test_impossible_settings_name_their_key(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        check_engine(replace(CPU, **change))


def test_engine_arguments() -> None:
    shape = {"num_layers": 3, "hidden_size": 8, "vocab_size": 16, "max_positions": 512}
    facts = {"built": False, "model": "some/model", "revision": "abc", "trust_remote_code": False, "shape": shape}
    target = Target(Path(), Record("Target", "id", 1, {}, {}, {}, {}, facts, "", "", 0.0))
    assert engine_args(target, replace(CPU, max_model_len=512))["max_model_len"] == 512
    assert engine_args(target, CPU)["max_model_len"] == CPU.max_model_len
    backend = "distributed_executor_backend"
    assert engine_args(target, replace(CPU, gpus_per_actor=1))[backend] == "stages.engine.executor.InCoreExecutor"
    assert engine_args(target, replace(CPU, tensor_parallel=2))[backend] == "stages.engine.executor.WorkersExecutor"
    assert "speculative_config" not in engine_args(target, CPU)
    args = extractor_args(target, CPU, (1, 3), {"kv_connector": "C"})
    assert args["enable_prefix_caching"] is False
    assert args["max_model_len"] == CPU.max_model_len + 1  # the token that a prefill-only request samples
    assert args["speculative_config"]["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3]}
    assert args["kv_transfer_config"] == {"kv_role": "kv_producer", "kv_connector": "C"}


def test_root_cause_is_the_last_exception_of_this_life(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("ValueError: an earlier life\n")
    start = log.stat().st_size
    assert root_cause(log, start, "no word").startswith("no word (log: ")
    with log.open("a") as file:
        file.write("(EngineCore pid=1) ERROR [core.py:1] ValueError: too little memory\nall is well\n")
        file.write("vllm.v1.engine.exceptions.EngineDeadError: see above\n")
    assert root_cause(log, start, "no word") == f"ValueError: too little memory (log: {log})"


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_a_child_dies_with_its_sigkilled_parent() -> None:
    code = (
        "import subprocess, sys, time\n"
        "from stages.engine.cpu import die_with_parent\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent)\n"
        "print(child.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert psutil.pid_exists(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(child, within_s=5)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also when the tests were started in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_of_a_waiting_caller_stays_an_interrupt(interruptible: None) -> None:
    closed = []

    async def never() -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
            yield 1
        finally:
            await asyncio.sleep(0.2)  # as a generator that waits for its tasks
            closed.append(True)

    with BackgroundLoop("test") as loop:
        interrupt = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            next(loop.iterate(never()))
        assert closed
        interrupt.join()


class PretendActor:
    """Answers with the reversed prompt; a prompt of [666] kills it, once or always as `temperature` says."""

    def __init__(self, spec: ActorSpec) -> None:
        self.lives = spec.log.with_suffix(".lives")
        with self.lives.open("a") as file:
            file.write("*")
        if (spec.log.parent / "broken").exists():
            raise EngineError("engine did not start: ValueError: no room")
        self.other_life = len(self.lives.read_text()) > 1 or any(spec.log.parent.glob("died"))
        self.folder = spec.log.parent

    @ray.method(max_task_retries=-1)
    async def ready(self) -> int:
        return os.getpid()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        await asyncio.sleep(0.01 * (request.prompt_token_ids[0] % 3))
        if request.prompt_token_ids == (666,) and (request.temperature > 0 or not (self.folder / "died").exists()):
            (self.folder / "died").touch()
            os._exit(1)
        return GenerationResult(request.id, request.prompt_token_ids[::-1], "length")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, cluster: None) -> None:
    monkeypatch.setattr(pool_module, "VllmActor", PretendActor)


def requests(count: int) -> Iterator[GenerationRequest]:
    return (GenerationRequest(str(i), (i, i + 1), 4) for i in range(count))


def free_cpus() -> float:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and ray.available_resources().get("CPU", 0) < 4:
        time.sleep(0.1)
    return float(ray.available_resources()["CPU"])


def test_every_request_is_answered_once(pretend: None, tmp_path: Path) -> None:
    with EnginePool(CPU, {}, tmp_path) as pool:
        results = list(pool.generate(requests(50)))
        assert sorted(int(r.id) for r in results) == list(range(50))
        assert all(r.token_ids == (int(r.id) + 1, int(r.id)) for r in results)
        assert list(pool.generate([])) == []
    assert free_cpus() == 4


def test_requests_of_a_dead_actor_are_asked_again(pretend: None, tmp_path: Path) -> None:
    killer = GenerationRequest("killer", (666,), 4)
    with EnginePool(CPU, {}, tmp_path) as pool:
        results = list(pool.generate([*requests(10), killer, *requests(10)]))
    assert len(results) == 21
    assert (tmp_path / "died").exists()
    assert [r.token_ids for r in results if r.id == "killer"] == [(666,)]


def test_a_request_that_kills_every_engine_is_named(pretend: None, tmp_path: Path) -> None:
    with (
        EnginePool(CPU, {}, tmp_path) as pool,
        pytest.raises(EngineError, match="request killer was lost with 3 engines"),
    ):
        list(pool.generate([GenerationRequest("killer", (666,), 4, temperature=1.0)]))
    assert free_cpus() == 4


def test_an_engine_that_cannot_start_again_gives_the_cause(pretend: None, tmp_path: Path) -> None:
    with EnginePool(CPU, {}, tmp_path) as pool:
        (tmp_path / "broken").touch()
        killers = [GenerationRequest(str(i), (666,), 4, temperature=1.0) for i in range(4)]
        with pytest.raises(EngineError, match=r"all 2 engines are dead.*no room"):
            list(pool.generate(killers))
    assert free_cpus() == 4


def test_an_actor_whose_admission_fails_unexpectedly_is_given_up(cluster: None, tmp_path: Path) -> None:
    async def admit(_: int) -> None:
        raise KeyError("layer 3")

    async def run(actor: ray.actor.ActorHandle) -> int:
        dispatcher = Dispatcher([actor], 30.0, admit)
        dispatcher.lost(0, "it died")
        return await dispatcher.pick()

    actor = ray.remote(PretendActor).remote(ActorSpec({}, tmp_path / "engine-0.log", 0, 1, True, 30.0))
    with pytest.raises(EngineError, match="all 1 engines are dead; the last said: 'layer 3'"):
        asyncio.run(run(actor))
    ray.kill(actor)


def test_a_failed_start_gives_the_cause_and_leaves_nothing(pretend: None, tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(EngineError, match="ValueError: no room"), EnginePool(CPU, {}, tmp_path):
        pytest.fail("started")
    assert free_cpus() == 4


def test_a_pool_larger_than_the_cluster_is_refused(pretend: None, tmp_path: Path) -> None:
    config = replace(CPU, num_actors=9, start_timeout_s=1.0)
    with pytest.raises(EngineError, match=r"engine\.num_actors=9"), EnginePool(config, {}, tmp_path):
        pytest.fail("started")
    assert free_cpus() == 4
