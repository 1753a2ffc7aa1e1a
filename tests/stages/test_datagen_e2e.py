"""Datagen with real engines: what vLLM generates is what the corpus holds, also after a crash."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import ray
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages.artifacts import RECORD, Record, Workspace, write_json
from stages.corpus import SPLITS, Corpus
from stages.datagen import stage
from stages.datagen.config import DatagenConfig
from stages.datagen.template import ChatTemplate
from stages.engine.args import engine_args
from stages.engine.config import EngineConfig
from stages.engine.pool import EnginePool
from stages.engine.requests import GenerationRequest, GenerationResult
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.proof import Proof
from stages.target import Target, read_folder
from tests.stages.datagen_helpers import END_OF_TURN, save_tokenizer, write_prompts
from tests.stages.test_hidden_states_e2e import all_gone, engine_core

ENGINE = EngineConfig(dtype="float32", max_model_len=512, max_num_batched_tokens=512, max_num_seqs=8, kv_cache_gib=0.1)
STORE = HiddenStatesConfig(segment_gib=0.0625)
LAYER_IDS = (1, 2)


def random_target(root: Path) -> Target:
    """Two random layers. At temperature 1 about one token in 300 ends the turn."""
    folder = root / "model"
    folder.mkdir(parents=True)
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    facts = {
        "built": False,
        "model": str(folder),
        "revision": None,
        "trust_remote_code": False,
        "shape": vars(read_folder(folder)),
    }
    write_json(root / RECORD, vars(Record("Target", "random", 1, {}, {}, {}, {}, facts, "", "", 0.0)))
    return Target.load(root)


@dataclass
class Recorder:
    """A real pool that remembers its traffic and dies before answering the request after `crash_after`."""

    pool: EnginePool
    requests: dict[tuple[int, ...], GenerationRequest]
    results: dict[tuple[int, ...], GenerationResult]
    crash_after: int | None = None

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        asked = {request.id: request for request in requests}
        for result in self.pool.generate(asked.values()):
            if self.crash_after is not None and len(self.results) >= self.crash_after:
                raise RuntimeError("the driver died")
            request = asked[result.id]
            self.requests[request.prompt_token_ids], self.results[request.prompt_token_ids] = request, result
            yield result


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    alone = {"process_group_cleanup_enabled": False}  # Ray's own way to end an engine, which ends with its raylet
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _system_config=alone)
    yield
    ray.shutdown()


def check_generation(pool: EnginePool) -> None:
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(2, 320, length).tolist()) for length in (3, 9, 9, 40, 130, 300)]
    requests = [GenerationRequest(str(i), ids, 12) for i, ids in enumerate(prompts)]
    together = {r.id: r.token_ids for r in pool.generate(requests)}
    alone = {r.id: r.token_ids for request in requests for r in pool.generate([request])}
    assert together == alone
    assert all(1 <= len(ids) <= 12 for ids in together.values())
    [refused] = pool.generate([GenerationRequest("long", tuple(range(2, 302)) * 2, 1)])
    assert refused.finish_reason == "error"
    assert "512" in refused.error  # the engine's own words, with its limit


def check_end(pool: EnginePool, work: Path) -> None:
    """An engine ends with its actor, however that ends."""
    [actor] = pool.actors
    core = engine_core(work, 0)
    os.kill(ray.get(actor.ready.remote()), signal.SIGKILL)
    assert all_gone([core], within_s=10)


@pytest.mark.e2e
@pytest.mark.usefixtures("cluster")
def test_real_engines_give_exact_tokens_and_resume_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_target(tmp_path / "target")
    template = ChatTemplate.load(target, "template")
    rows: list[dict[str, Any]] = [{"turns": [f"question {i}", "and then?"]} for i in range(12)]
    config = DatagenConfig(
        prompts=(write_prompts(tmp_path / "chat.jsonl", rows),),
        temperature=1.0,
        max_new_tokens=150,
        max_sequence_tokens=500,
        shard_conversations=4,
    )

    def run(name: str) -> Corpus:
        out = Workspace(final=tmp_path / name, identity=name)
        with out.locked():
            return stage.run(config, target, engine=ENGINE, hidden_states=STORE, layer_ids=LAYER_IDS, out=out)

    with EnginePool(ENGINE, engine_args(target, ENGINE), tmp_path / "engines") as pool:
        check_generation(pool)
        recorder = Recorder(pool, {}, {})
        with monkeypatch.context() as patch:
            patch.setattr(stage, "extractor_pool", lambda *_, **__: nullcontext(Mock()))
            patch.setattr(stage, "EnginePool", lambda *_: nullcontext(recorder))
            whole = run("whole")
            traffic = dict(recorder.results)
            recorder.results, recorder.crash_after = {}, 10
            with pytest.raises(RuntimeError, match="the driver died"):
                run("resumed")
        check_end(pool, tmp_path / "engines")
    resumed = run("resumed")  # with engines of its own, once one has proved its states
    assert Proof.read(resumed.path) is not None

    assert {path.name: path.read_bytes() for path in whole.path.glob("*.parquet")} == {
        path.name: path.read_bytes() for path in resumed.path.glob("*.parquet")
    }
    assert whole.record.facts == resumed.record.facts
    assert whole.record.counts == resumed.record.counts
    reasons = {result.finish_reason for result in traffic.values()}
    assert reasons == {"stop", "length"}
    end = template.tokenizer.convert_tokens_to_ids(END_OF_TURN)
    sequences = [sequence for split in SPLITS for sequence in whole.sequences(split)]
    assert sequences
    assert any(sum(m["role"] == "assistant" for m in json.loads(s.messages)) == 2 for s in sequences)
    for sequence in sequences:
        ids, mask = sequence.input_ids.tolist(), sequence.loss_mask.tolist()
        starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
        for start in starts:
            answer = traffic[tuple(ids[:start])]
            assert tuple(ids[start : start + len(answer.token_ids)]) == answer.token_ids
            assert all(mask[start : start + len(answer.token_ids)])
            assert (answer.token_ids[-1] == end) == (answer.finish_reason == "stop")
        assert sum(mask) == sum(len(traffic[tuple(ids[:start])].token_ids) for start in starts)
