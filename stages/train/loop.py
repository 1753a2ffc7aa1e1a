"""The training loop of one worker: resume, step, validate, save, export. Knows torch.distributed, not Ray."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import torch
import torch.distributed as dist
from speculators.models.dspark import DSparkDraftModel

from stages.artifacts import remove
from stages.corpus import TokenSequence
from stages.draft.checkpoint import export_draft
from stages.draft.loss import LossWeights, metrics
from stages.draft.model import build_draft, shared_head, trainable
from stages.draft.vocab import vocab_digest
from stages.hidden_states.wire import HiddenBatch, HiddenStatesReader, check_set_aside
from stages.target import load_head
from stages.train import checkpoint
from stages.train.checkpoint import JUDGED, Saved, TrainState
from stages.train.config import STOP, TRAINING
from stages.train.data import Order, usable
from stages.train.job import CHECKPOINTS, EXPORT, STOPPED, TrainError, TrainJob
from stages.train.metering import Meter
from stages.train.optimizer import Optimizer, lr_factor
from stages.train.outcome import check_visits, visits, write_result
from stages.train.prepare import prepare
from stages.train.saving import Saver
from stages.train.sharding import Replicas, Shards
from stages.train.step import Learner, Pass, micro_batches, run_pass
from stages.train.warm_start import warm_start

logger = logging.getLogger(__name__)

VALIDATION_KEY = "validation"


def train(job: TrainJob, open_reader: Callable[[], HiddenStatesReader], device: torch.device) -> None:
    """Train from the newest complete checkpoint to the end; rank 0 leaves `checkpoint/` and `result.json`.

    When asked to stop, a checkpoint of the step that is done is left instead, and the file `stopped`. Needs a
    process group. Raises TrainError after too many steps that were not finite or when a checkpoint cannot be
    written, HiddenStatesError when states cannot be had or too many were not since the very first step.
    """
    with closing(open_reader()) as reader:
        worker = Worker(job, reader, device)
        worker.resume()
        worker.run()


class Worker:
    """One rank: its share of the data, its copy of the draft and of the optimiser, or its part of them."""

    def __init__(self, job: TrainJob, reader: HiddenStatesReader, device: torch.device) -> None:
        config, target = job.config, job.target
        self.job, self.config, self.reader = job, config, reader
        self.flow = reader.flow()  # at the last step that was logged
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        model = build_draft(
            job.draft, target.shape, target.folder, verifier=target.model, seed=config.seed, vocab_W=job.vocab_W
        )
        self.warm_start = warm_start(model, trainable(model), config)
        model = model.to(device).train()
        for parameter in trainable(model).values():
            dist.broadcast(parameter.data, src=0)
        prepare(model, config, device)
        self.learner = _learner(job, model, device)
        self.weights = Shards(model) if config.sharding == "fsdp" else Replicas(model)
        self.parameters = self.weights.parameters
        self.optimizer = Optimizer(self.parameters, config)
        self.sequences, self.validation = (
            usable(job.corpus.sequences(split), config.max_sequence_tokens, job.draft.mask_token_id).sequences
            for split in ("train", "validation")
        )
        self.order = Order(len(self.sequences), config.batch_sequences, config.epochs, config.max_steps, config.seed)
        self.state = TrainState(vocab_sha256=None if job.vocab_W is None else vocab_digest(job.vocab_W))
        self.folder = job.out.path / CHECKPOINTS
        self.saver = Saver(self.folder, job.out.identity, config.keep_checkpoints, device)
        sizes = {name: parameter.numel() for name, parameter in self.parameters.items()}
        self.num_parameters = sum(sizes.values())
        self.meter = Meter(device, self.world, sizes, int(model.block_size))

    def resume(self) -> None:
        """Take up the checkpoint that rank 0 finds newest, by however many ranks it was written."""
        found = [checkpoint.newest(self.folder, self.job.out.identity) if self.rank == 0 else None]
        dist.broadcast_object_list(found, src=0)
        if found[0] is not None:
            vocab, self.state, saved = self.state.vocab_sha256, checkpoint.load_state(found[0]), Saved(found[0])
            if self.state.vocab_sha256 != vocab:
                told = f"expected a draft vocabulary of digest {vocab}, found {self.state.vocab_sha256}"
                raise TrainError(f"{found[0]}: {told}; move {self.folder} away to train anew")
            self._fill(saved)
            self.optimizer.load(saved)
        if self.rank == 0:
            source = found[0] or "no checkpoint"
            logger.info("training from step %d of %d (%s)", self.state.step, self.order.total_steps, source)
            self.job.out.events.rewind(self.state.step)

    def run(self) -> None:
        """All steps that are left, then the export; or a checkpoint, when asked to stop."""
        source = self.reader.read(self._from(self.state.step))
        while not self._done:
            self._step(source)
            step = self.state.step
            due = step == self.order.total_steps or step % self.config.validate_every_steps == 0
            better = due and self._validate()
            saved = better or self._done or step % self.config.checkpoint_every_steps == 0
            if saved:
                self._save()
            if self.saver.agree(stop=self._asked_to_stop()) and not self._done:
                self._leave(saved)
                return
        self.saver.finish()
        check_visits(self.state, self.order)  # every rank knows the same counts: all stop here, or none
        self._export()
        if self.rank == 0:
            totals = self.meter.totals()
            write_result(self.job, self.state, self.order, self.num_parameters, self.warm_start, totals)
        dist.barrier()

    @property
    def _done(self) -> bool:
        """Whether all steps are done, or enough validations passed without a better one."""
        limit = self.config.early_stopping_validations
        patient = limit is None or self.state.validations_since_best < limit
        return self.state.step >= self.order.total_steps or not patient

    def _asked_to_stop(self) -> bool:
        return self.rank == 0 and (self.job.out.path / STOP).exists()

    def _leave(self, saved: bool) -> None:
        if not saved:
            self._save()
        self.saver.finish()
        if self.rank == 0:
            logger.info("asked to stop: step %d is saved", self.state.step)
            (self.job.out.path / STOP).replace(self.job.out.path / STOPPED)

    def _share(self, step: int) -> list[list[TokenSequence]]:
        """This rank's micro-batches of `step`."""
        share = [self.sequences[i] for i in self.order.batch(step)[self.rank :: self.world]]
        return micro_batches(share, self.config.micro_batch_tokens)

    def _from(self, first_step: int) -> Iterator[list[TokenSequence]]:
        """This rank's micro-batches of `first_step` and all after it, in order."""
        for step in range(first_step, self.order.total_steps):
            yield from self._share(step)

    def _step(self, source: Iterator[HiddenBatch]) -> None:
        started, step, config, gradients = time.monotonic(), self.state.step, self.config, self.weights.gradients
        gradients.clear()
        count, key = len(self._share(step)), (config.seed, self.order.epoch(step), step)
        with self.weights.gathered():
            taken = run_pass(self.learner, source, count, key, backward=True)
        norm = gradients.reduce(float(taken.sums.weight))
        factor = lr_factor(step, self.order.total_steps, config.warmup_share, config.schedule)
        finite = math.isfinite(norm) and math.isfinite(float(taken.sums.total))
        if finite and float(taken.sums.weight) > 0:
            gradients.clip(norm, config.clip_norm)
            self.optimizer.step(factor)
        self.state.step += 1
        self.state.set_aside += taken.set_aside
        self.state.visits_trained += taken.sequences if finite else 0
        if not finite:
            self._record_nonfinite(step, taken)
        if taken.set_aside:  # the reader knows only its rank's, and only those since the last restart
            check_set_aside(self.state.set_aside, visits(self.state), self.job.max_set_aside_share)
        if self.rank == 0:
            self._log(taken, time.monotonic() - started, {"lr": config.lr * factor, "grad_norm": norm})

    def _record_nonfinite(self, step: int, taken: Pass) -> None:
        """The step is skipped on every rank (both numbers are the same everywhere); too many end the run."""
        ids = [self.sequences[i].id for i in self.order.batch(step)]
        self.state.visits_nonfinite += taken.sequences
        self.state.nonfinite.append((step, ids))
        logger.warning("step %d skipped: its loss or gradient is not finite; sequences %s", step, ", ".join(ids))
        if len(self.state.nonfinite) > self.config.max_nonfinite_steps:
            self.saver.finish()  # what is being written is from before, and good
            raise TrainError(
                f"{len(self.state.nonfinite)} steps had no finite loss and gradient "
                f"(train.max_nonfinite_steps={self.config.max_nonfinite_steps}), the last {step} with sequences "
                f"{ids[:4]}; look at their states, or lower train.lr={self.config.lr}"
            )

    def _log(self, taken: Pass, step_s: float, values: dict[str, float]) -> None:
        now = self.reader.flow()
        flow, self.flow = now - self.flow, now  # since the step before, of this rank's reader
        values |= {**self.meter.step(taken, step_s), **metrics(taken.sums, self.learner.weights), **flow.metrics()}
        values["nonfinite_steps"] = float(len(self.state.nonfinite))
        if self.saver.write_s:
            values |= {"checkpoint_s": self.saver.held_s, "checkpoint_write_s": self.saver.write_s}
        step, total = self.state.step, self.order.total_steps
        self.job.out.events.metrics(values, step)
        note = f"{self.meter.note(values, total - step)} {flow.note}"
        self.job.out.events.progress(TRAINING, step, total, "step", note)

    def _validate(self) -> bool:
        """Measure the validation split, always at the same anchors; whether it is the best so far."""
        if not self.validation:
            return False
        share = micro_batches(self.validation[self.rank :: self.world], self.config.micro_batch_tokens)
        source = self.reader.read(share)
        with self.weights.gathered():
            taken = run_pass(self.learner, source, len(share), (self.config.seed, VALIDATION_KEY), backward=False)
        values = {f"val_{name}": value for name, value in metrics(taken.sums, self.learner.weights).items()}
        values["val_sequences_set_aside"] = float(len(taken.set_aside))
        better = self.state.judge(values)
        if self.rank == 0:
            best = self.state.best_values.get(JUDGED, math.nan)
            self.job.out.events.metrics({**values, "val_best_acceptance_length": best}, self.state.step)
        return better

    def _save(self) -> None:
        """Begin a checkpoint, after all ranks have shown the same weights."""
        if self.config.sharding == "replicated":
            total = torch.stack([parameter.detach().double().sum() for parameter in self.parameters.values()]).sum()
            extremes = torch.stack([total, -total])
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
            if extremes[0] != -extremes[1]:
                found = f"sums {-extremes[1]} to {extremes[0]}"
                raise TrainError(f"step {self.state.step}: expected the same weights on every rank, found {found}")
        self.saver.save(self.state, {**self.parameters, **self.optimizer.tensors()})

    def _fill(self, saved: Saved) -> None:
        for name, parameter in self.parameters.items():
            saved.fill(name, parameter)

    def _export(self) -> None:
        """Rank 0 writes the draft: the weights of the best validation, the last ones without any."""
        best, folder = self.state.best_step, self.job.out.path / EXPORT
        if best is not None and best != self.state.step:
            self._fill(Saved(self.folder / checkpoint.folder_name(best)))
        with self.weights.gathered():
            if self.rank == 0:
                remove(folder)
                export_draft(self.learner.model, folder)


def _learner(job: TrainJob, model: DSparkDraftModel, device: torch.device) -> Learner:
    """The draft and its loss; both sides of the loss share the target's frozen parts."""
    config = job.config
    head = shared_head(model, load_head(job.target.folder))
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
    return Learner(model, head, weights, config.anchors_per_sequence, device)
