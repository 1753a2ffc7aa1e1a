"""What can be refused before a process starts: of a config, and of the machine that it is given to.

Each check says what was asked, what was found, and the way out, in one line that names the key or file. What is
known only later, such as how long the corpus got, is asked by the stage that needs it, before it starts anything.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from pipeline.bounds import check_bounds
from pipeline.config import ConfigError, PipelineConfig, flat
from pipeline.dag import NAMES
from stages.corpus import Split
from stages.datagen.config import check_room
from stages.datagen.prompts import check as check_prompts
from stages.draft.config import check_draft
from stages.draft.memory import count_parameters
from stages.engine.args import check_engine
from stages.hidden_states.config import check_hidden_states
from stages.publish.hub import check as check_publish
from stages.publish.hub import check_access
from stages.target import TargetShape, known_shape
from stages.tracking import check_tracking
from stages.train.config import check_train
from stages.train.warm_start import check_init

GIB = 1 << 30


def check(config: PipelineConfig, stages: Collection[str] = NAMES) -> None:
    """Whether `stages` can be made here. Raises ConfigError for the first check that fails."""
    shape = check_config(config, stages)
    if "publish" in stages:
        try:
            check_access(config.publish)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    check_workers(config, stages)
    check_output(config, shape)


def check_config(config: PipelineConfig, stages: Collection[str] = NAMES) -> TargetShape:
    """What would fail one of `stages` on any machine; gives the target's shape. Raises ConfigError."""
    if not re.fullmatch(r"[\w][\w.-]*", config.name):
        raise ConfigError(f"name={config.name}: expected letters, digits, dots, dashes: it begins the runs' folders")
    check_paths(config)
    try:
        check_bounds(flat(config))
        shape = known_shape(config.target)
        check_draft(config.draft, shape)
        check_engine(config.engine)
        check_hidden_states(config.hidden_states, config.engine)
        check_train(config.train)
        check_init(config.train)
        check_room(config.datagen, config.engine)
        selection = check_prompts(config.datagen, shape.vocab_size)
        check_publish(config.publish)
        check_tracking(config.tracking)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_lengths(config, shape)
    check_sizes(config)
    check_splits(config, Counter(selection.splits.values()), stages)
    return shape


def check_paths(config: PipelineConfig) -> None:
    """Places can be looked up: not so a name too long, a home of nobody, a folder that is closed to us."""
    places = [("out", config.out), ("target.path", config.target.path), ("train.init_from", config.train.init_from)]
    places += [("datagen.prompts", path) for path in config.datagen.prompts]
    places += [(f"datagen.hub.{name}.path", dataset.path) for name, dataset in config.datagen.hub.items()]
    for key, path in places:
        try:
            Path(path or "").expanduser().stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{key}={path!r}: expected a path that can be looked up here, found {error}") from error


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
    """Numbers that only make sense together."""
    if config.datagen.temperature and config.draft.confidence_head:
        raise ConfigError(
            f"datagen.temperature={config.datagen.temperature}: calibrate counts acceptance against greedy answers and "
            "needs 0; or set draft.confidence_head=false draft.confidence_with_markov=false"
        )
    if not config.datagen.regenerate and config.draft.confidence_head:
        raise ConfigError(
            "datagen.regenerate=False: calibrate counts acceptance against greedy answers of the target, found given "
            "ones; set draft.confidence_head=false draft.confidence_with_markov=false"
        )
    train, calibrate = config.train, config.calibrate
    if not train.ce_weight + train.l1_weight:
        raise ConfigError("train.ce_weight=0 with train.l1_weight=0: expected one above 0, or nothing is learnt")
    if calibrate.temperature_min == calibrate.temperature_max:
        raise ConfigError(f"calibrate.temperature_min={calibrate.temperature_min}: expected less than temperature_max")
    if train.batch_sequences < train.num_workers:
        raise ConfigError(
            f"train.batch_sequences={train.batch_sequences}: expected at least one for each of "
            f"train.num_workers={train.num_workers}"
        )


def check_splits(config: PipelineConfig, splits: Counter[Split], stages: Collection[str]) -> None:
    """Each of `stages` finds prompts in the part of them that it reads: another share makes another corpus."""
    datagen = config.datagen
    no_head = "or set draft.confidence_head=false draft.confidence_with_markov=false"
    readers: tuple[tuple[str, Split, float, bool, str], ...] = (
        ("calibrate", "calibration", datagen.calibration_share, config.draft.confidence_head, no_head),
        ("evaluate", "evaluation", datagen.evaluation_share, True, "or leave evaluate and publish out of stages=…"),
        (
            "train",
            "validation",
            datagen.validation_share,
            config.train.early_stopping_validations is not None,
            "or set train.early_stopping_validations=null",
        ),
    )
    for stage, split, share, reads, otherwise in readers:
        if stage in stages and reads and not splits[split]:
            raise ConfigError(
                f"datagen.{split}_share={share}: {stage} needs prompts for {split}, found none among "
                f"{splits.total()}; raise it or give more prompts, {otherwise}"
            )


def check_workers(config: PipelineConfig, stages: Collection[str]) -> None:
    """A cluster of this process must hold the widest of `stages`, or Ray would wait for ever."""
    if config.ray.address or os.environ.get("RAY_ADDRESS"):
        return
    engine, train, evaluate = config.engine, config.train, config.evaluate
    gpus = _needs(config, stages, "gpus", (engine.gpus_per_actor, train.gpus_per_worker, evaluate.gpus))
    for keys, need in gpus.items():
        if need > (found := gpus_here()):
            raise ConfigError(
                f"{keys} = {need:g} GPUs: found {found} here; lower one, or start it on a cluster (ray job submit, or "
                "ray.address=…)"
            )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    asked_gib = engine.num_actors * ((engine.kv_cache_gib or 0.0) + config.hidden_states.segment_gib)
    if not engine.gpus_per_actor and asked_gib > memory_gib:
        raise ConfigError(
            f"engine.num_actors x (engine.kv_cache_gib + hidden_states.segment_gib) = {asked_gib:g} GiB: found "
            f"{memory_gib:.0f} GiB of memory here; lower one"
        )
    have = float(os.cpu_count() or 1) if config.ray.num_cpus is None else config.ray.num_cpus
    cpus = _needs(config, stages, "cpus", (engine.cpus_per_actor, train.cpus_per_worker, evaluate.cpus))
    for keys, need in cpus.items():
        if need > have:
            raise ConfigError(f"{keys} = {need:g} CPUs: found {have:g} here; lower one or set ray.num_cpus")


def gpus_here(devices: Path = Path("/dev")) -> int:
    """GPUs that a Ray cluster of this process would have."""
    found, visible = len(list(devices.glob("nvidia[0-9]*"))), os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len([name for name in visible.split(",") if name]))


def _needs(
    config: PipelineConfig, stages: Collection[str], unit: str, each: tuple[float, float, float]
) -> dict[str, float]:
    """What Ray is asked for at once, by the keys that say so; `each`: of an engine, a training worker, a server.

    Training streams from its engines; states that are kept on disk are all there before it starts.
    """
    engine, worker, server = each
    extracts = "train" in stages or ("calibrate" in stages and config.draft.confidence_head)
    needs: dict[str, float] = {}
    if extracts or ("datagen" in stages and config.datagen.regenerate):
        needs[f"engine.num_actors x engine.{unit}_per_actor"] = config.engine.num_actors * engine
    if "train" in stages:
        workers = {f"train.num_workers x train.{unit}_per_worker": config.train.num_workers * worker}
        if config.hidden_states.transport == "mooncake":
            workers = {" + ".join([*needs, *workers]): sum([*needs.values(), *workers.values()])}
        needs |= workers
    if "evaluate" in stages:
        needs[f"evaluate.{unit}"] = server
    return needs


def check_output(config: PipelineConfig, shape: TargetShape) -> None:
    """The output folder can be written and has room for checkpoints and drafts."""
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
    """What checkpoints of training, three copies of the draft and a margin take.

    Not hidden states that are kept (hidden_states.transport=disk): how many, the corpus tells, and the stage that
    extracts them asks for their room.
    Checkpoints hold fp32 weights and two Adam moments of what is trained (12 bytes a parameter); beside
    the newest there are the best one and one that is being written. Drafts are bf16, but a reduced
    vocabulary's rows of the LM head may be fp32.
    """
    parameters, rows = draft_parameters(config, shape), config.draft.vocab_size or 0
    drafts = 3 * (2 * parameters + 4 * rows * shape.hidden_size)
    return (config.train.keep_checkpoints + 2) * 12 * parameters + drafts + GIB


def draft_parameters(config: PipelineConfig, shape: TargetShape) -> int:
    """Trained parameters of the draft: all but the target's frozen embedding and LM head."""
    return count_parameters(config.draft, shape).trainable
