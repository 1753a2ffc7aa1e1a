"""The training loop of one worker: resume, step, validate, save, export. Knows torch.distributed, not Ray."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from stages.artifacts import Workspace, file_digest, remove, write_json
from stages.corpus import Corpus, TokenSequence
from stages.draft.checkpoint import WEIGHTS, export_draft
from stages.draft.config import DraftConfig
from stages.draft.loss import LossWeights, metrics
from stages.draft.model import build_draft, shared_head, trainable, use_attention
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.wire import HiddenBatch, HiddenStatesReader, check_set_aside
from stages.target import Target, load_head
from stages.train import checkpoint
from stages.train.checkpoint import TrainState
from stages.train.config import TrainConfig
from stages.train.data import Order, usable
from stages.train.optimizer import Gradients, Optimizer, lr_factor
from stages.train.step import Learner, Pass, run_pass

logger = logging.getLogger(__name__)

CHECKPOINTS, EXPORT, RESULT = "checkpoints", "checkpoint", "result.json"
MAX_NONFINITE_STEPS = 10
VALIDATION_KEY = "validation"


class TrainError(RuntimeError):
    """Training that must not go on: raised by every rank at once, and no restart would help."""


@dataclass(frozen=True)
class TrainJob:
    """Everything a worker is told; it travels to every process of the group."""

    config: TrainConfig
    draft: DraftConfig
    target: Target
    corpus: Corpus
    out: Workspace
    max_set_aside_share: float = HiddenStatesConfig.max_set_aside_share
    vocab_W: np.ndarray | None = None  # ids of the draft's vocabulary, when it is reduced


def train(job: TrainJob, open_reader: Callable[[], HiddenStatesReader], device: torch.device) -> None:
    """Train from the newest complete checkpoint to the end; rank 0 leaves `checkpoint/` and `result.json`.

    Needs a process group. Raises TrainError after too many steps without a finite gradient, and
    HiddenStatesError when states cannot be had, or too many were not since the very first step.
    """
    with closing(open_reader()) as reader:
        worker = Worker(job, reader, device)
        worker.resume()
        worker.run()


class Worker:
    """One rank: its share of the data, its copy of the draft and of the optimiser."""

    def __init__(self, job: TrainJob, reader: HiddenStatesReader, device: torch.device) -> None:
        config, target = job.config, job.target
        self.job, self.config, self.reader = job, config, reader
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        model = build_draft(
            job.draft, target.shape, target.folder, verifier=target.model, seed=config.seed, vocab_W=job.vocab_W
        )
        use_attention(model, config.attention)
        model = model.to(device).train()
        self.parameters = trainable(model)
        head = shared_head(model, load_head(target.folder))
        weights = LossWeights(
            config.ce_weight,
            config.l1_weight,
            config.confidence_weight,
            config.decay_gamma,
            config.detach_confidence,
            config.ce_label,
            config.target_support,
            config.denominator,
        )
        self.learner = Learner(model, head, weights, config.anchors_per_sequence, config.micro_batch_tokens, device)
        self.gradients = Gradients(self.parameters)
        self.optimizer = Optimizer(self.parameters, config)
        self.sequences = usable(job.corpus.sequences("train"), config.max_sequence_tokens).sequences
        self.validation = usable(job.corpus.sequences("validation"), config.max_sequence_tokens).sequences
        self.order = Order(len(self.sequences), config.batch_sequences, config.epochs, config.max_steps, config.seed)
        self.state = TrainState()
        self.folder = job.out.path / CHECKPOINTS

    def resume(self) -> None:
        """Take up the checkpoint that rank 0 finds newest; without one, rank 0's first weights."""
        found: list[Path | None] = [checkpoint.newest(self.folder, self.job.out.identity) if self.rank == 0 else None]
        dist.broadcast_object_list(found, src=0)
        if found[0] is not None:
            self.state, weights, moments = checkpoint.load(found[0])
            for name, parameter in self.parameters.items():
                parameter.data.copy_(weights[name])
            self.optimizer.load(moments)
        for parameter in self.parameters.values():
            dist.broadcast(parameter.data, src=0)
        if self.rank == 0:
            source = found[0] or "no checkpoint"
            logger.info("training from step %d of %d (%s)", self.state.step, self.order.total_steps, source)
            self.job.out.events.rewind(self.state.step)

    def run(self) -> None:
        """All steps that are left, then the export."""
        source = self.reader.read([sequence] for sequence in self._from(self.state.step))
        validated: Mapping[str, float] | None = None
        started, tokens, wait_s = time.monotonic(), 0, 0.0
        while self.state.step < self.order.total_steps:
            taken = self._step(source)
            tokens, wait_s = tokens + taken.tokens, wait_s + taken.wait_s
            last = self.state.step == self.order.total_steps
            validated = self._validate() if last or self.state.step % self.config.validate_every_steps == 0 else None
            if last or self.state.step % self.config.checkpoint_every_steps == 0:
                self._save()
        elapsed_s = max(time.monotonic() - started, 1e-9)
        final = self._validate(record=False) if validated is None else validated  # nothing was left to do
        self._check_visits()
        if self.rank == 0:
            self._finish({**final, "tok_per_s": tokens / elapsed_s, "data_wait_share": wait_s / elapsed_s})
        dist.barrier()

    def _share(self, step: int) -> list[TokenSequence]:
        return [self.sequences[i] for i in self.order.batch(step)[self.rank :: self.world]]

    def _from(self, first_step: int) -> Iterator[TokenSequence]:
        """This rank's sequences of `first_step` and all after it, in order."""
        for step in range(first_step, self.order.total_steps):
            yield from self._share(step)

    def _step(self, source: Iterator[HiddenBatch]) -> Pass:
        started, step, config = time.monotonic(), self.state.step, self.config
        self.gradients.clear()
        share = self._share(step)
        taken = run_pass(self.learner, source, share, (config.seed, self.order.epoch(step), step), backward=True)
        norm = self.gradients.reduce(float(taken.sums.weight))
        factor = lr_factor(step, self.order.total_steps, config.warmup_share, config.schedule)
        finite = math.isfinite(norm)
        if finite and float(taken.sums.weight) > 0:
            self.gradients.clip(norm, config.clip_norm)
            self.optimizer.step(factor)
        self.state.step += 1
        self.state.set_aside += taken.set_aside
        self.state.visits_trained += taken.sequences if finite else 0
        if not finite:
            self._record_nonfinite(step, taken)
        if taken.set_aside:  # the reader knows only its rank's, and only those since the last restart
            check_set_aside(self.state.set_aside, self._visits(), self.job.max_set_aside_share)
        step_s = time.monotonic() - started
        if self.rank == 0:
            self._log(
                taken,
                {
                    "lr": config.lr * factor,
                    "grad_norm": norm,
                    "step_s": step_s,
                    "nonfinite_steps": len(self.state.nonfinite),
                },
            )
        return taken

    def _record_nonfinite(self, step: int, taken: Pass) -> None:
        """The step is skipped on every rank (the norm is the same everywhere); too many end the run."""
        ids = [self.sequences[i].id for i in self.order.batch(step)]
        self.state.visits_nonfinite += taken.sequences
        self.state.nonfinite.append((step, ids))
        logger.warning("step %d skipped: its gradient is not finite; sequences %s", step, ", ".join(ids))
        if len(self.state.nonfinite) > MAX_NONFINITE_STEPS:
            raise TrainError(
                f"{len(self.state.nonfinite)} steps had no finite gradient (at most {MAX_NONFINITE_STEPS} may), "
                f"the last {step} with sequences {ids[:4]}; look at their states, or lower train.lr={self.config.lr}"
            )

    def _log(self, taken: Pass, values: dict[str, float]) -> None:
        values |= {"tok_per_s": taken.tokens / values["step_s"], "data_wait_s": taken.wait_s}
        values |= metrics(taken.sums, self.learner.weights)
        self.job.out.events.metrics(values, self.state.step)
        note = (
            f"loss {values.get('loss', 0.0):.3f} tau {values.get('acceptance_length', 0.0):.2f} "
            f"{values['tok_per_s']:.0f} tok/s wait {taken.wait_s / values['step_s']:.0%}"
        )
        self.job.out.events.progress("train", self.state.step, self.order.total_steps, "step", note)

    def _validate(self, *, record: bool = True) -> Mapping[str, float]:
        """Metrics `val_*` over the validation split, always at the same anchors; empty without a split."""
        if not self.validation:
            return {}
        share = self.validation[self.rank :: self.world]
        source = self.reader.read([sequence] for sequence in share)
        taken = run_pass(self.learner, source, share, (self.config.seed, VALIDATION_KEY), backward=False)
        values = {f"val_{name}": value for name, value in metrics(taken.sums, self.learner.weights).items()}
        values["val_sequences_set_aside"] = float(len(taken.set_aside))
        best = max(self.state.best_acceptance_length, values.get("val_acceptance_length", 0.0))
        self.state.best_acceptance_length = best
        if self.rank == 0 and record:
            self.job.out.events.metrics({**values, "val_best_acceptance_length": best}, self.state.step)
        return values

    def _save(self) -> None:
        """Rank 0 writes a checkpoint, after all ranks have shown the same weights."""
        total = torch.stack([parameter.detach().double().sum() for parameter in self.parameters.values()]).sum()
        extremes = torch.stack([total, -total])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if extremes[0] != -extremes[1]:
            found = f"sums {-extremes[1]} to {extremes[0]}"
            raise TrainError(f"step {self.state.step}: expected the same weights on every rank, found {found}")
        if self.rank == 0:
            weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
            checkpoint.save(self.folder, self.job.out.identity, self.state, weights, self.optimizer.tensors())
            checkpoint.prune(self.folder, self.job.out.identity, self.config.keep_checkpoints)

    def _check_visits(self) -> None:
        """Every rank knows the same counts, so all of them stop here or none does."""
        planned, accounted = self.order.visits, self._visits()
        if planned != accounted:
            raise TrainError(f"{planned} visits of sequences were planned, {accounted} are accounted for: {self.state}")

    def _visits(self) -> int:
        return self.state.visits_trained + self.state.visits_nonfinite + len(self.state.set_aside)

    def _finish(self, values: Mapping[str, float]) -> None:
        """Export the draft and say what was done; the stage turns `result.json` into the record."""
        state, folder = self.state, self.job.out.path / EXPORT
        remove(folder)
        export_draft(self.learner.model, folder)
        counts = {
            "visits_planned": self.order.visits,
            "visits_trained": state.visits_trained,
            "visits_skipped_nonfinite": state.visits_nonfinite,
            **_by_reason(state.set_aside),
            "steps": state.step,
            "steps_nonfinite": len(state.nonfinite),
        }
        facts = {
            "num_trainable_parameters": sum(parameter.numel() for parameter in self.parameters.values()),
            "weights_sha256": file_digest(folder / WEIGHTS),
            "set_aside": state.set_aside,
            "nonfinite_steps": state.nonfinite,
        }
        best = {"val_best_acceptance_length": state.best_acceptance_length} if self.validation else {}
        write_json(self.job.out.path / RESULT, {"counts": counts, "metrics": {**values, **best}, "facts": facts})


def _by_reason(set_aside: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Counts of set-aside visits: all, and by the reason of the last try up to its first colon."""
    counts = {"visits_set_aside": len(set_aside)}
    for _, reason in set_aside:
        key = "visits_set_aside_" + re.sub(r"\W+", "_", reason.rpartition("last: ")[2].split(":")[0].lower())
        counts[key] = counts.get(key, 0) + 1
    return counts
