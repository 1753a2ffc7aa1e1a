"""Datagen: the target answers every prompt, or given answers are kept; the exact token ids become the corpus.

Sources are read as a stream, deduplicated, split and cut into shards; each shard is made and saved
whole; the split files are written from the shards at the end. So a rerun makes only missing shards
and gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic
from typing import Any

from stages.artifacts import Workspace
from stages.corpus import Corpus
from stages.datagen import sources
from stages.datagen.account import write_corpus
from stages.datagen.config import DatagenConfig, check_room, check_values
from stages.datagen.conversation import Conversation
from stages.datagen.generate import ShardRun
from stages.datagen.given import keep_given
from stages.datagen.outcome import Limits, ShardOutcome
from stages.datagen.prompts import chosen, select
from stages.datagen.shards import Shard, cut
from stages.datagen.template import ChatTemplate
from stages.datagen.watch import Watch
from stages.engine.args import engine_args
from stages.engine.config import EngineConfig
from stages.engine.pool import EnginePool
from stages.engine.version import vllm_version
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.pool import extractor_pool
from stages.target import Target

WORK = "work"
Make = Callable[[Sequence[Conversation]], ShardOutcome]  # one shard's conversations to their outcome


def run(
    config: DatagenConfig,
    target: Target,
    *,
    engine: EngineConfig,
    hidden_states: HiddenStatesConfig,
    layer_ids: tuple[int, ...],
    out: Workspace,
) -> Corpus:
    """Make the corpus of the config's sources with `target`.

    For the first missing shard one extractor is started, to prove that the states of `layer_ids` will
    be right when they are asked for later, and ends; then the engines that generate. With
    `regenerate=false` there are neither. Raises ValueError for sources or a target that cannot be used,
    RuntimeError when too many conversations fail, and whatever starting the engines raises.
    """
    check_values(config)
    check_room(config, engine)
    _require_planned_content(config, out)
    vocab_size = target.shape.vocab_size
    selection = select(config, vocab_size)
    template = ChatTemplate.load(target, config.thinking) if selection.needs_template else None
    limits = Limits(config, engine.max_model_len)
    watch = Watch(out.events, len(selection.splits), config.max_failed_share)
    work = out.path / WORK

    def begin(stack: ExitStack) -> Make:
        if template is None or not config.regenerate:
            return lambda conversations: keep_given(conversations, template, limits, watch.settled)
        out.events.progress("starting engines", watch.done, watch.total, "conversation")
        one = replace(engine, num_actors=1)
        with extractor_pool(
            target, layer_ids, one, hidden_states, work=work / "proof", references=[out.path]
        ) as proven:
            proven.proof.record(out)
        pool = stack.enter_context(EnginePool(engine, engine_args(target, engine), work))
        return lambda conversations: ShardRun(conversations, template, limits, watch.answered, watch.settled).run(pool)

    shards = _make_missing(cut(chosen(config, selection, vocab_size), work, config.shard_conversations), begin, watch)
    tally = write_corpus(shards, selection, out.path)
    tally.check(selection)
    facts = _provenance(config, target, template, engine) | {"layer_ids": list(layer_ids)} | tally.facts()
    return out.commit(Corpus, counts=tally.counts(selection.total), metrics=tally.metrics(), facts=facts, drop=[WORK])


def _make_missing(
    shards: Iterable[tuple[Shard, Sequence[Conversation]]], begin: Callable[[ExitStack], Make], watch: Watch
) -> list[Shard]:
    """All shards, whole. `begin` is called for the first that is missing."""
    seen = []
    with ExitStack() as stack:
        make: Make | None = None
        for shard, conversations in shards:
            seen.append(shard)
            summary = shard.summary()
            if summary is not None:
                watch.skip(len(conversations), summary.set_aside)
                continue
            if make is None:
                make = begin(stack)
                watch.begin()
            started = monotonic()
            outcome = make(conversations)
            outcome.generate_s = monotonic() - started
            shard.save(outcome)
            watch.tick()
    return seen


def _require_planned_content(config: DatagenConfig, out: Workspace) -> None:
    """Sources must hold what the artifact's identity was made of: a file may change, a branch may move.

    Raises ValueError when they do not. A workspace without a plan takes what is there.
    """
    planned = out.config.get("datagen", {}).get("content")
    if planned is not None and planned != sources.content(config):
        raise ValueError(
            f"datagen: expected the sources that were there when the run was planned, found others"
            f" ({', '.join(sources.told(config))}); start the run again"
        )


def _provenance(
    config: DatagenConfig, target: Target, template: ChatTemplate | None, engine: EngineConfig
) -> dict[str, Any]:
    """Who wrote the answers, to what, and how they were sampled; null where answers were given."""
    sampling = {key: getattr(config, key) for key in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")}
    engines = {
        "vllm_version": vllm_version(),
        "engine_dtype": engine.dtype,
        # vLLM on the CPU gives the same bits whatever else is in the batch; on a GPU only when told to.
        "batch_invariant": engine.gpus_per_actor == 0 or os.environ.get("VLLM_BATCH_INVARIANT") == "1",
    }
    made = sampling | engines
    return {
        "answers": "regenerated" if config.regenerate else "given",
        **(made if config.regenerate else dict.fromkeys(made)),
        "thinking": config.thinking,
        "prompts": sources.told(config),
        "target": {"model": target.model, "revision": target.revision, "identity": target.identity},
        "chat_template_sha256": template.sha256 if template else None,
        "chat_template_options": template.options if template else {},
        "chat_template_today": template.today if template else None,
    }
