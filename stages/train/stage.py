"""The train stage: extractors feed a Ray Train worker group, which leaves a draft."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stages.artifacts import Workspace
from stages.corpus import Corpus, TokenSequence
from stages.draft.artifact import Draft
from stages.draft.config import DraftConfig
from stages.draft.layers import check_exported
from stages.draft.vocab import choose_vocab, vocab_digest
from stages.end_tokens import end_token_ids
from stages.engine.config import EngineConfig
from stages.events import METRICS
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.pool import states_of
from stages.target import Target, local_folder
from stages.train.config import STOP, TrainConfig, check_train
from stages.train.data import Order
from stages.train.fit import RAY, fit
from stages.train.inputs import Inputs, read_inputs
from stages.train.job import CHECKPOINTS, EXPORT, RESULT, STOPPED, TrainJob
from stages.train.plots import CURVES, plot_training
from stages.train.warm_start import check_init

EXTRACTORS = "extractors"
VOCAB = "draft_vocab.npy"


def run(
    config: TrainConfig,
    target: Target,
    corpus: Corpus,
    *,
    draft: DraftConfig,
    engine: EngineConfig,
    hidden_states: HiddenStatesConfig,
    out: Workspace,
) -> Draft:
    """Train a draft of `target` on `corpus` and export it.

    Resumes from the newest complete checkpoint in `out.path`. Raises ValueError, naming the key, for
    a config that cannot work, before any process starts; TrainError, HiddenStatesError or Ray's own
    error when training ends early, TrainStopped when it was asked to.
    """
    check_train(config)
    check_init(config)
    # Ray Train's workers run in another directory.
    out = replace(out, final=out.final.absolute())
    target, corpus = Target(target.path.absolute(), target.record), Corpus(corpus.path.absolute(), corpus.record)
    if config.init_from is not None and (folder := local_folder(config.init_from)):
        config = replace(config, init_from=str(folder))
    inputs = read_inputs(config, target, corpus, draft=draft, engine=engine, hidden_states=hidden_states)
    data, validation, layer_ids = inputs
    used = (*data.sequences, *validation.sequences)

    out.path.mkdir(parents=True, exist_ok=True)
    vocab_W = None if draft.vocab_size is None else _vocab(draft.vocab_size, data.sequences, target, out)
    result = out.path / RESULT
    if not result.exists():  # a run that was stopped between training and this line need not train again
        work = out.path / EXTRACTORS
        work.mkdir(exist_ok=True)
        steps = Order(
            len(data.sequences), config.batch_sequences, config.epochs, config.max_steps, config.seed
        ).total_steps
        out.events.progress("starting extractors", 0, steps, "step")
        with states_of(
            used, target, layer_ids, engine, hidden_states, work=work, out=out, references=[corpus.path]
        ) as open_reader:
            job = TrainJob(config, draft, target, corpus, out, hidden_states.max_set_aside_share, vocab_W)
            out.events.progress("starting workers", 0, steps, "step")
            fit(job, open_reader)
    check_exported(layer_ids, out.path / EXPORT)
    plot_training(out.path / METRICS, out.path / CURVES)
    return out.commit(
        Draft,
        **_summary(result, draft, target, inputs, vocab_W),
        drop=[CHECKPOINTS, RAY, EXTRACTORS, RESULT, VOCAB, STOP, STOPPED],
    )


def _summary(
    result: Path, draft: DraftConfig, target: Target, inputs: Inputs, vocab_W: np.ndarray | None
) -> dict[str, dict[str, Any]]:
    """Counts, metrics and facts of the record: those that training left in `result`, and those of its inputs."""
    told, (data, validation, layer_ids) = json.loads(result.read_text(encoding="utf-8")), inputs
    facts = {
        "layer_ids": list(layer_ids),
        "mask_token_id": draft.mask_token_id,
        "block_size": draft.block_size,
        "verifier": target.model,
        "sequences_with_mask_token": [*data.masked, *validation.masked],
        "draft_vocab": None if vocab_W is None else {"size": len(vocab_W), "sha256": vocab_digest(vocab_W)},
        **told["facts"],
    }
    counts = {
        **data.counts,
        **{f"validation_{name}": count for name, count in validation.counts.items()},
        **told["counts"],
    }
    return {"counts": counts, "metrics": told["metrics"], "facts": facts}


def _vocab(size: int, sequences: Sequence[TokenSequence], target: Target, out: Workspace) -> np.ndarray:
    """Ids of the draft's vocabulary; chosen once and kept, so that a resumed run drafts the same tokens."""
    path = out.path / VOCAB
    if not path.exists():
        required = end_token_ids(target)
        beside = path.with_name(f"partial.{VOCAB}")
        np.save(beside, choose_vocab(sequences, size, target_size=target.shape.vocab_size, required=required))
        beside.replace(path)
    return np.asarray(np.load(path))
