"""Everything about a config that can be refused before a process starts.

Each check says what was asked, what was found, and the way out, in one line that names the key or
file.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.config import ConfigError, PipelineConfig
from stages.datagen.prompts import check as check_prompts
from stages.draft.config import check_draft
from stages.draft.memory import count_parameters
from stages.engine.args import check_engine
from stages.publish.hub import check as check_publish
from stages.target import TargetShape, known_shape

GIB = 1 << 30


def check(config: PipelineConfig) -> None:
    """Run all checks. Raises ConfigError for the first one that fails."""
    try:
        shape = known_shape(config.target)
        check_draft(config.draft, shape)
        check_engine(config.engine)
        check_prompts(config.datagen)
        check_publish(config.publish)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_lengths(config, shape)
    check_sizes(config)
    check_workers(config)
    check_output(config, shape)


def check_lengths(config: PipelineConfig, shape: TargetShape) -> None:
    """Sequence lengths along the road."""
    engine, datagen, train = config.engine, config.datagen, config.train
    order = [
        ("train.max_sequence_tokens", train.max_sequence_tokens, "engine.max_model_len", engine.max_model_len),
        ("datagen.max_sequence_tokens", datagen.max_sequence_tokens, "engine.max_model_len", engine.max_model_len),
        ("datagen.max_new_tokens", datagen.max_new_tokens, "datagen.max_sequence_tokens", datagen.max_sequence_tokens),
        (
            "datagen.min_supervised_tokens",
            datagen.min_supervised_tokens,
            "datagen.max_new_tokens",
            datagen.max_new_tokens,
        ),
        ("engine.max_model_len", engine.max_model_len, "the target's positions", shape.max_positions),
        ("engine.max_model_len", engine.max_model_len, "draft.max_positions", config.draft.max_positions),
    ]
    for key, value, bound_key, bound in order:
        if value > bound:
            raise ConfigError(
                f"{key}={value}: expected at most {bound_key}={bound}; lower the first or raise the second"
            )


def check_sizes(config: PipelineConfig) -> None:
    """Numbers that only make sense inside a range."""
    positive = {
        "train.epochs": config.train.epochs,
        "train.batch_sequences": config.train.batch_sequences,
        "train.anchors_per_sequence": config.train.anchors_per_sequence,
        "train.lr": config.train.lr,
        "train.decay_gamma": config.train.decay_gamma,
        "train.clip_norm": config.train.clip_norm,
        "train.num_workers": config.train.num_workers,
        "train.validate_every_steps": config.train.validate_every_steps,
        "train.checkpoint_every_steps": config.train.checkpoint_every_steps,
        "train.keep_checkpoints": config.train.keep_checkpoints,
        "evaluate.prompts_per_domain": config.evaluate.prompts_per_domain,
        "evaluate.max_new_tokens": config.evaluate.max_new_tokens,
        "evaluate.batch_sequences": config.evaluate.batch_sequences,
        "evaluate.bootstrap_samples": config.evaluate.bootstrap_samples,
        "calibrate.temperature_min": config.calibrate.temperature_min,
        "calibrate.temperature_steps": config.calibrate.temperature_steps,
        "calibrate.max_anchors_per_sequence": config.calibrate.max_anchors_per_sequence,
        "calibrate.bins": config.calibrate.bins,
        "hidden_states.segment_gib": config.hidden_states.segment_gib,
        "hidden_states.attempts": config.hidden_states.attempts,
    }
    if config.train.max_steps is not None:
        positive["train.max_steps"] = config.train.max_steps
    for key, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{key}={value}: expected more than 0")
    if config.hidden_states.segment_gib < 1 / 64:
        raise ConfigError(f"hidden_states.segment_gib={config.hidden_states.segment_gib}: Mooncake wants 1/64 at least")
    shares = {
        "train.warmup_share": config.train.warmup_share,
        "hidden_states.window_share": config.hidden_states.window_share,
        "hidden_states.max_set_aside_share": config.hidden_states.max_set_aside_share,
        "calibrate.fit_share": config.calibrate.fit_share,
    }
    for key, value in shares.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{key}={value}: expected a share from 0 to 1")
    if config.datagen.temperature and config.draft.confidence_head:
        raise ConfigError(
            f"datagen.temperature={config.datagen.temperature}: calibrate counts acceptance against greedy answers and "
            "needs 0; or set draft.confidence_head=false draft.confidence_with_markov=false"
        )
    train = config.train
    if train.attention == "flex" and not train.gpus_per_worker:
        raise ConfigError("train.attention=flex: torch has no backward pass of it on a CPU; set train.attention=sdpa")
    if train.batch_sequences < train.num_workers:
        raise ConfigError(
            f"train.batch_sequences={train.batch_sequences}: expected at least one for each of "
            f"train.num_workers={train.num_workers}"
        )


def check_workers(config: PipelineConfig) -> None:
    """A cluster of this process must hold the widest stage, or Ray would wait for ever."""
    if config.ray.address or os.environ.get("RAY_ADDRESS"):
        return
    engine, train = config.engine, config.train
    gpus = engine.num_actors * engine.gpus_per_actor + train.num_workers * train.gpus_per_worker
    if gpus and not Path("/dev/nvidia0").exists():
        raise ConfigError(
            f"train asks for {gpus} GPUs (engine.gpus_per_actor, train.gpus_per_worker), found none here; "
            "start it on a cluster (ray job submit, or ray.address=…)"
        )
    have = float(os.cpu_count() or 1) if config.ray.num_cpus is None else config.ray.num_cpus
    needs = {
        "engine.num_actors x engine.cpus_per_actor + train.num_workers x train.cpus_per_worker": (
            engine.num_actors * engine.cpus_per_actor + train.num_workers * train.cpus_per_worker
        ),
        "evaluate.cpus": config.evaluate.cpus,
    }
    for keys, need in needs.items():
        if need > have:
            raise ConfigError(f"{keys} = {need:g} CPUs: found {have:g} here; lower one or set ray.num_cpus")


def check_output(config: PipelineConfig, shape: TargetShape) -> None:
    """The output folder can be written and has room for what the run will leave there."""
    out = Path(config.out).resolve()
    existing = next(path for path in (out, *out.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found = "read-only" if existing.is_dir() else "a file"
        raise ConfigError(
            f"out={config.out}: expected a folder that can be written, found {existing} {found}; "
            "choose another with out=…"
        )
    need, free = disk_bytes(config, shape), shutil.disk_usage(existing).free
    if free < need:
        raise ConfigError(
            f"out={config.out}: the run needs about {need / GIB:.1f} GiB, found {free / GIB:.1f} GiB free "
            "on its disk; free some or choose another with out=…"
        )


def disk_bytes(config: PipelineConfig, shape: TargetShape) -> int:
    """What a run leaves on disk at most: training checkpoints, three copies of the draft, a margin.

    Checkpoints hold fp32 weights and two Adam moments of what is trained (12 bytes a parameter); one
    more than is kept exists while it is written. Drafts are bf16, but a reduced vocabulary's rows of the
    LM head may be fp32.
    """
    parameters, rows = draft_parameters(config, shape), config.draft.vocab_size or 0
    drafts = 3 * (2 * parameters + 4 * rows * shape.hidden_size)
    return (config.train.keep_checkpoints + 1) * 12 * parameters + drafts + GIB


def draft_parameters(config: PipelineConfig, shape: TargetShape) -> int:
    """Trained parameters of the draft: all but the target's frozen embedding and LM head."""
    return count_parameters(config.draft, shape).trainable
