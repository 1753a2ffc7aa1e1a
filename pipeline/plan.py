"""python -m pipeline.plan — what a config would take in bytes, before anything starts.

Hidden states on their way and on disk, memory of a training worker, the output folder. Bandwidth and time are measured
by runs and benchmarks, not guessed here.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import checks
from pipeline.command import command
from pipeline.config import ConfigError, PipelineConfig, parse
from pipeline.console import table
from pipeline.dag import Node, plan
from pipeline.run import asked_stages, resolve
from stages.corpus import Corpus, Split
from stages.datagen.prompts import select
from stages.draft.config import captured_layers
from stages.draft.memory import FP32_BYTES, plan_memory
from stages.hidden_states.disk import disk_bytes
from stages.hidden_states.layout import Layout
from stages.target import TargetShape

HELP = """\
usage: python -m pipeline.plan [conf=NAME | run=ID] [stages=A,B] [section.key=value ...]

Says what the config (default: conf=tiny) would take: bytes of hidden states on their way and kept on disk
(hidden_states.transport=disk), memory of a training worker, the output folder. Before datagen is complete the corpus is
taken to be as long as the config allows. Any machine will do: it need not be able to run this. Starts nothing.
"""


def main(args: Sequence[str]) -> int:
    """Exit status 0, or 2 when the config is refused."""
    try:
        request = parse(args)
        config, _ = resolve(request)
        shape, nodes = checks.check_config(config, asked_stages(request)), plan(config)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = [*states(config, shape, nodes["datagen"]), worker(config, shape), folder(config, shape)]
    print(table(["what", "bytes", "of what"], rows, right=[1]))
    return 0


def states(config: PipelineConfig, shape: TargetShape, datagen: Node) -> list[list[str]]:
    """Rows about hidden states: of a token, of a sequence, in flight, of the corpus, on disk."""
    path, engine, layers = config.hidden_states, config.engine, len(captured_layers(config.draft, shape))
    layout = Layout(layers, shape.hidden_size, path.encoding, engine.tensor_parallel)
    longest = config.train.max_sequence_tokens
    lent = path.segment_bytes * engine.num_actors
    sequences, tokens, exact = corpus_size(config, shape, datagen)
    known = f"{sequences:,} sequences, {tokens:,} tokens" + ("" if exact else " at most")
    on_disk = disk_bytes(tokens, sequences, layers, shape.hidden_size)
    away = "kept for all epochs and runs" if path.transport == "disk" else "if hidden_states.transport were disk"
    return [
        ["states of a token", told(layout.payload_bytes(1)), f"{layers} layers x {shape.hidden_size}, {path.encoding}"],
        ["longest sequence", told(layout.object_bytes(longest)), f"{longest:,} tokens"],
        ["in flight", told(path.window_bytes(lent, 1)), f"window_share={path.window_share} of {told(lent)} lent"],
        ["read in an epoch", told(layout.payload_bytes(tokens)), known],
        ["states on disk", told(on_disk), f"{away}; {told(free_bytes(config))} free"],
    ]


def corpus_size(config: PipelineConfig, shape: TargetShape, datagen: Node) -> tuple[int, int, bool]:
    """Sequences and tokens whose states are read, and whether that is known or the most that can be."""
    if datagen.complete:
        corpus = Corpus.load(datagen.workspace.final)
        longest = config.train.max_sequence_tokens
        splits: list[Split] = ["train", "validation"]
        if config.draft.confidence_head:
            splits.append("calibration")
        lengths = [min(len(sequence), longest) for split in splits for sequence in corpus.sequences(split)]
        return len(lengths), sum(lengths), True
    chosen = int(select(config.datagen, shape.vocab_size).is_chosen_R.sum())
    return chosen, chosen * config.datagen.max_sequence_tokens, False


def worker(config: PipelineConfig, shape: TargetShape) -> list[str]:
    """The row about the memory of one training worker."""
    train = config.train
    together = max(1, train.micro_batch_tokens // train.max_sequence_tokens)
    found = plan_memory(
        config.draft,
        shape,
        tokens=together * train.max_sequence_tokens,
        anchors=together * train.anchors_per_sequence,
        dtype_bytes=2 if train.precision == "bfloat16" else FP32_BYTES,
        shards=train.num_workers if train.sharding == "fsdp" else 1,
        optimizer=train.optimizer,
        documents=0 if train.attention == "flex" else together,
        recompute=train.activation_checkpointing,
    )
    parts = {
        "weights": found.weights + found.frozen,
        "gradients": found.gradients,
        "optimizer": found.optimizer,
        "activations": found.activations,
    }
    return ["training worker", told(found.total), ", ".join(f"{name} {told(size)}" for name, size in parts.items())]


def folder(config: PipelineConfig, shape: TargetShape) -> list[str]:
    """The row about the output folder."""
    count = checks.draft_parameters(config, shape)
    need = checks.disk_bytes(config, shape)
    return [
        "output folder",
        told(need),
        f"checkpoints and drafts of {count:,} weights; {told(free_bytes(config))} free",
    ]


def free_bytes(config: PipelineConfig) -> int:
    """On the disk of the output folder, which need not exist yet."""
    out = Path(config.out).resolve()
    return shutil.disk_usage(next(path for path in (out, *out.parents) if path.exists())).free


def told(size: int) -> str:
    """Bytes as people read them."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(max(0, (size.bit_length() - 1) // 10), len(units) - 1)
    return f"{size / 1024**power:,.{1 if power else 0}f} {units[power]}"


if __name__ == "__main__":
    command(main, HELP)
