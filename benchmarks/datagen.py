"""What answers and hidden states cost beside plain vLLM: `make bench-datagen`.

Prints one JSON object. Engines of the same target take turns on the same prompts in the same run:

- `generate`: answers of many tokens, greedy. vLLM's own `LLM.generate`, and the pool through which datagen asks.
- `prefill`: prompts alone. An engine of that pool, and an extractor, which stores the states in Mooncake; its clock
  runs until the last object is in the store. Nobody reads them meanwhile: on a machine of few cores a reader would take
  the engine's.

The target has the shape of SmolLM2-135M and random weights, so that nothing must be downloaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import ray
import torch

from stages.artifacts import Workspace
from stages.engine.args import engine_args
from stages.engine.config import EngineConfig
from stages.engine.pool import EnginePool
from stages.engine.requests import GenerationRequest
from stages.engine.serving import Served, serving, serving_spec
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.pool import ExtractorPool, extractor_pool
from stages.hidden_states.store import HiddenStatesStore, stripe_name
from stages.target import Target, read_folder

ROOT = Path(__file__).parents[1]
LAYER_IDS = (2, 9, 16, 23, 29, 30)
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 16, 32, 48
PREFILLS, PREFILL_TOKENS = 12, 256
ENGINE = EngineConfig(max_model_len=512, max_num_batched_tokens=512, max_num_seqs=16, kv_cache_gib=0.5)
GOALS = {"generate": 1.05, "prefill": 1.05}  # of the plain engine's seconds, at most


def build_target(folder: Path) -> Target:
    """A Llama of SmolLM2-135M's shape with random weights in bfloat16."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    model = folder / "model"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t0").save_pretrained(model)
    workspace = Workspace(final=folder / "target", identity="bench")
    workspace.path.mkdir()
    facts = {
        "built": False, "model": str(model), "revision": None, "trust_remote_code": False,
        "shape": vars(read_folder(model)),
    }  # fmt: skip
    return workspace.commit(Target, counts={}, metrics={}, facts=facts)


def tokens(count: int, length: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(2, 49152, length, dtype=np.int32) for _ in range(count)]


def serving_plainly(server: Any, prompts: list[np.ndarray], max_tokens: int) -> float:
    """Seconds that `LLM.generate` takes for all, each with as many tokens as it may."""
    served: Served = ray.get(server.serve.remote([(ids.tolist(), max_tokens) for ids in prompts]))
    return served.seconds


def generating(pool: EnginePool, prompts: list[np.ndarray], max_tokens: int) -> float:
    """Seconds until the pool has answered all."""
    requests = [GenerationRequest(str(i), tuple(ids.tolist()), max_tokens, 0.0) for i, ids in enumerate(prompts)]
    started = time.monotonic()
    results = list(pool.generate(requests))
    elapsed_s = time.monotonic() - started
    assert not [r for r in results if r.finish_reason == "error"], results
    return elapsed_s


def extracting(pool: ExtractorPool, prompts: list[np.ndarray]) -> float:
    """Seconds until the states of all are stored."""
    [actor] = pool.endpoint.actors
    store, keys = HiddenStatesStore(pool.endpoint.store), [uuid.uuid4().hex for _ in prompts]
    names = [stripe_name(key, 0) for key in keys]

    async def ask() -> None:
        captures = [{"key": key, "attempt": 0, "encoding": "bfloat16"} for key in keys]
        await asyncio.gather(*(actor.extract.remote(*each) for each in zip(prompts, captures, strict=True)))

    started = time.monotonic()
    asyncio.run(ask())
    while not all(store.exist(names)):
        time.sleep(0.002)
    elapsed_s = time.monotonic() - started
    store.remove(names)
    store.close()
    return elapsed_s


def bench(repeats: int, folder: Path) -> dict[str, Any]:
    """Every round once a repeat, the contestants in turns; the first repeat only warms up."""
    target = build_target(folder)
    prompts, long = tokens(PROMPTS, PROMPT_TOKENS), tokens(PREFILLS, PREFILL_TOKENS)
    with ExitStack() as stack:
        extractors = stack.enter_context(
            extractor_pool(target, LAYER_IDS, ENGINE, HiddenStatesConfig(), work=folder / "extractors")
        )
        pool = stack.enter_context(EnginePool(ENGINE, engine_args(target, ENGINE), folder / "pool"))
        spec = serving_spec(target, ENGINE, folder / "server.log", batch_sequences=ENGINE.max_num_seqs)
        server = stack.enter_context(serving(spec))
        rounds: dict[str, tuple[Callable[[], float], Callable[[], float], int]] = {
            "generate": (
                lambda: serving_plainly(server, prompts, ANSWER_TOKENS),
                lambda: generating(pool, prompts, ANSWER_TOKENS),
                PROMPTS * ANSWER_TOKENS,
            ),
            "prefill": (
                lambda: generating(pool, long, 1),
                lambda: extracting(extractors, long),
                PREFILLS * PREFILL_TOKENS,
            ),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in rounds}
        for repeat in range(repeats + 1):
            for name, (plain, ours, _) in rounds.items():
                if repeat % 2:
                    pair = (plain(), ours())
                else:
                    later = ours()
                    pair = (plain(), later)
                if repeat:
                    found[name].append(pair)
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load": os.getloadavg()[0],
        "repeats": repeats,
        "ours/plain seconds": {name: round(median(b / a for a, b in pairs), 3) for name, pairs in found.items()},
        "goals": GOALS,
        "tok_per_s": {
            name: {
                "plain": round(rounds[name][2] / median(a for a, _ in pairs), 1),
                "ours": round(rounds[name][2] / median(b for _, b in pairs), 1),
            }
            for name, pairs in found.items()
        },
        "seconds (plain, ours)": {name: [[round(s, 3) for s in pair] for pair in p] for name, p in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of each kind")
    args = parser.parse_args()
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        with TemporaryDirectory() as folder:
            told = bench(args.repeats, Path(folder))
    finally:
        ray.shutdown()
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
