"""A training step, ours and speculators 0.9's, on the same draft and batch: `make bench-train`.

Prints one JSON object: tokens/s of both (medians of steps that take turns in one process) and their ratio,
peak memory of both (each in a process of its own), and both losses. Under speculators' conventions ours
must be speculators' loss, step after step; the paper's conventions, which ask for the target's whole
vocabulary, are timed beside it.

The size is a draft of SmolLM2-135M: 2 layers, 8,192 of 49,152 tokens, blocks of 8, four sequences of 235
tokens (128 of them supervised) and 48 anchors a step, fp32, 2 threads. On a busy machine take `--threads 1`
and `cpu_s_ratio`: threads that wait for a core spin, and the clock counts the neighbours. Values are random: no
step's time depends on them. speculators' Trainer needs an accelerator, so its loop (forward, backward, clip, AdamW,
schedule, metrics) is restated here; it is given its batch collated, and the faster of its two attentions
that a CPU can run. `max_anchors` counts over the whole packed batch there, per sequence here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from speculators.losses import resolve_loss_config
from speculators.losses.eager import tv_loss
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from transformers import get_cosine_schedule_with_warmup

from benchmarks.own import packed, stepper
from stages.corpus import TokenSequence
from stages.draft.anchors import sample_anchors
from stages.draft.batch import PackedBatch
from stages.draft.config import DraftConfig
from stages.draft.loss import LossWeights, metrics
from stages.draft.model import construct, fill_frozen, speculators_config
from stages.draft.vocab import set_vocab
from stages.hidden_states.wire import HiddenBatch
from stages.target import TargetHead, TargetShape
from stages.train.config import TrainConfig

SEQUENCES, LENGTH, PROMPT, ANCHORS = 4, 235, 107, 12  # anchors of a sequence
SHAPE = TargetShape(num_layers=30, hidden_size=576, vocab_size=49152, max_positions=8192)
DRAFT = DraftConfig(
    num_layers=2, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536, vocab_size=8192,
    aux_layer_ids=(2, 15, 27), mask_token_id=3, markov_rank=64, max_positions=8192, rope_theta=100_000.0,
)  # fmt: skip
CONFIG = TrainConfig(batch_sequences=SEQUENCES, anchors_per_sequence=ANCHORS, warmup_share=0.0)
PAPER = LossWeights(CONFIG.ce_weight, CONFIG.l1_weight, CONFIG.confidence_weight, CONFIG.decay_gamma)
# speculators' tv is half of L1
THEIRS = replace(PAPER, l1=CONFIG.l1_weight / 2, ce_label="target", target_support="draft", denominator="labels")
Kind = Literal["ours", "ours_paper", "speculators_eager", "speculators_sdpa"]
KINDS: tuple[Kind, ...] = ("ours", "ours_paper", "speculators_eager", "speculators_sdpa")
TOTAL_STEPS = 10_000  # of the schedules, so that the learning rate stays at its peak

Step = Callable[[], float]  # takes one step and returns its loss


@dataclass(frozen=True)
class Problem:
    """Sequences with their states, the target's ends, and the draft's vocabulary: the same for the same seed."""

    batches: tuple[HiddenBatch, ...]  # one sequence each
    head: TargetHead
    ids_W: torch.Tensor

    @classmethod
    def make(cls) -> Problem:
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        mask = np.arange(LENGTH) >= PROMPT
        batches = []
        for i in range(SEQUENCES):
            ids = rng.integers(4, SHAPE.vocab_size, LENGTH).astype(np.int32)
            states = torch.randn(LENGTH, len(DRAFT.aux_layer_ids) + 1, SHAPE.hidden_size, generator=generator)
            batches.append(HiddenBatch((TokenSequence(f"s{i}", "", ids, mask),), states))
        embed = 0.05 * torch.randn(SHAPE.vocab_size, SHAPE.hidden_size, generator=generator)
        head = TargetHead(embed, torch.ones(SHAPE.hidden_size), embed, 1e-5)  # tied, as SmolLM2's
        chosen = np.sort(rng.permutation(SHAPE.vocab_size)[: DRAFT.vocab_size])
        return cls(tuple(batches), head, torch.from_numpy(chosen))

    def model(self, make: Callable[[DSparkSpeculatorConfig], DSparkDraftModel]) -> DSparkDraftModel:
        """A new draft, always with the same weights."""
        torch.manual_seed(0)
        model = make(speculators_config(DRAFT, SHAPE, verifier=None, architectures=[]))
        set_vocab(model, self.ids_W)
        fill_frozen(model, self.head)
        model.verifier_lm_head.weight.data.copy_(model.lm_head.weight)
        return model.train()


def whole_block_anchors(loss_mask_T: np.ndarray, limit: int, *, key: tuple[int | str, ...]) -> np.ndarray:
    """Our own draw, among blocks that are supervised throughout: there both label their slots alike."""
    inside = loss_mask_T.copy()
    inside[len(inside) - DRAFT.block_size :] = False
    return sample_anchors(inside, limit, key=key)


def ours(problem: Problem, weights: LossWeights) -> Step:
    """A step as `stages.train.loop` takes it."""
    own = stepper(problem.model(construct), problem.head, weights, CONFIG, torch.device("cpu"))
    batches = packed(problem.batches, CONFIG.micro_batch_tokens)
    done = 0

    def step() -> float:
        nonlocal done
        with patch("stages.train.step.sample_anchors", whole_block_anchors):
            taken = own(batches, done)
        done += 1
        return metrics(taken.sums, weights)["loss"]

    return step


def speculators(problem: Problem, attention: str) -> Step:
    """A step as speculators' `Trainer.train_epoch` takes it, but for what needs an accelerator."""

    def construct_theirs(config: DSparkSpeculatorConfig) -> DSparkDraftModel:
        config.transformer_layer_config._attn_implementation = attention
        return DSparkDraftModel(config)

    model = problem.model(construct_theirs)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=CONFIG.lr, weight_decay=CONFIG.weight_decay)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 0, TOTAL_STEPS)
    sequences = tuple(batch.sequences[0] for batch in problem.batches)
    packed = PackedBatch.pack(sequences, torch.cat([batch.states_TLD for batch in problem.batches]))
    batch = {
        "hidden_states": packed.aux_TLD.flatten(1)[None].contiguous(),
        "input_ids": packed.input_ids_T[None],
        "loss_mask": packed.loss_mask_T[None].long(),
        "verifier_last_hidden_states": packed.final_TD[None].contiguous(),
        "document_ids": packed.documents_T[None],
        "position_ids": packed.positions_T[None],
    }
    call: dict[str, Any] = {
        "loss_config": resolve_loss_config(json.dumps({"ce": CONFIG.ce_weight, "tv": CONFIG.l1_weight}), "eager"),
        "tv_loss_fn": tv_loss,
        "gamma": CONFIG.decay_gamma,
        "max_anchors": SEQUENCES * ANCHORS,
        "confidence_head_alpha": CONFIG.confidence_weight,
    }
    done = 0

    def select_anchors(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = [
            i * LENGTH + whole_block_anchors(sequence.loss_mask, ANCHORS, key=(0, done, sequence.id))
            for i, sequence in enumerate(sequences)
        ]
        anchors_A = torch.from_numpy(np.concatenate(drawn))
        return anchors_A, torch.ones(len(anchors_A), dtype=torch.bool)

    def step() -> float:
        nonlocal done
        with patch("speculators.models.dflash.core.select_anchors", select_anchors):
            _, loss, told = model(**batch, **call)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip_norm)
        optimizer.step()
        scheduler.step()
        done += 1
        return float({name: value.item() for name, value in told.items()}["loss_sum"])

    return step


def make(kind: Kind, problem: Problem) -> Step:
    if kind.startswith("speculators"):
        return speculators(problem, kind.removeprefix("speculators_"))
    return ours(problem, PAPER if kind == "ours_paper" else THEIRS)


@contextmanager
def alone(threads: int) -> Iterator[None]:
    """This process as the only rank."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def timed(step: Step) -> tuple[float, float, float]:
    """Loss, seconds by the clock, and seconds of all cores together."""
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()
    return loss, time.perf_counter() - wall, time.process_time() - cpu


def speeds(repeats: int, threads: int) -> dict[Kind, dict[str, Any]]:
    """Steps of all kinds in turn, the first of each untimed."""
    problem = Problem.make()
    with alone(threads):
        steps = {kind: make(kind, problem) for kind in KINDS}
        taken = {kind: [timed(step)] for kind, step in steps.items()}
        for _ in range(repeats):
            for kind, step in steps.items():
                taken[kind].append(timed(step))
    tokens = SEQUENCES * LENGTH
    return {
        kind: {
            "tok_per_s": round(tokens / median(wall for _, wall, _ in times[1:]), 1),
            "tok_per_s_best": round(tokens / min(wall for _, wall, _ in times[1:]), 1),
            "cpu_s_per_step": round(median(cpu for *_, cpu in times[1:]), 4),
            "cpu_s_per_step_best": round(min(cpu for *_, cpu in times[1:]), 4),
            "losses": [loss for loss, *_ in times],
        }
        for kind, times in taken.items()
    }


def memory(kind: Kind, threads: int) -> dict[str, int]:
    """Peak resident bytes of this process over three steps, and how much of it the steps added."""
    problem = Problem.make()
    with alone(threads):
        step = make(kind, problem)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        before_bytes = pages * os.sysconf("SC_PAGE_SIZE")
        for _ in range(3):
            step()
    # not getrusage's: a child's starts from what its parent had
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak_bytes = int(status["VmHWM"].split()[0]) * 1024
    return {"peak_bytes": peak_bytes, "added_by_steps_bytes": peak_bytes - before_bytes}


def report(repeats: int, threads: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    told = speeds(repeats, threads)
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.train", "--memory", kind, "--threads", str(threads)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        told[kind] |= json.loads(run.stdout.splitlines()[-1])
    theirs: Kind = max(KINDS[2:], key=lambda kind: told[kind]["tok_per_s"])
    pairs = list(zip(told["ours"]["losses"], told[theirs]["losses"], strict=True))
    for kind in KINDS:
        losses = told[kind].pop("losses")
        told[kind] |= {"first_loss": losses[0], "last_loss": losses[-1]}
    found: dict[str, Any] = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_before": load},
        "versions": {"torch": torch.__version__, "speculators": version("speculators")},
        "steps": repeats,
        "threads": threads,
        "tokens_per_step": SEQUENCES * LENGTH,
        "compared_with": theirs,
        "tok_per_s_ratio": round(told["ours"]["tok_per_s"] / told[theirs]["tok_per_s"], 3),
        "tok_per_s_ratio_paper_loss": round(told["ours_paper"]["tok_per_s"] / told[theirs]["tok_per_s"], 3),
        "cpu_s_ratio": round(told[theirs]["cpu_s_per_step"] / told["ours"]["cpu_s_per_step"], 3),
        "peak_bytes_ratio": round(told["ours"]["peak_bytes"] / told[theirs]["peak_bytes"], 3),
        "loss_max_relative_difference": max(abs(a - b) / abs(b) for a, b in pairs),
    }
    return found | dict(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each kind")
    parser.add_argument("--memory", choices=KINDS, help="only the peak memory of one kind, in this process")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.memory:
        print(json.dumps(memory(args.memory, args.threads)))
    else:
        print(json.dumps(report(args.repeats, args.threads), indent=2))


if __name__ == "__main__":
    main()
