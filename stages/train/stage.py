"""The train stage: extractors feed a Ray Train worker group, which leaves a draft."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stages.artifacts import Workspace
from stages.corpus import Corpus, TokenSequence
from stages.draft.artifact import Draft
from stages.draft.config import DraftConfig, check_draft
from stages.draft.layers import check_corpus, check_exported
from stages.draft.vocab import choose_vocab, vocab_digest
from stages.engine.config import EngineConfig
from stages.engine.serving import stop_token_ids
from stages.events import METRICS
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.pool import sample_layout, states_of
from stages.hidden_states.reader import misfit
from stages.target import Target, local_folder
from stages.train.config import STOP, TrainConfig, check_train
from stages.train.data import Order, Usable, usable
from stages.train.fit import RAY, fit
from stages.train.job import CHECKPOINTS, EXPORT, RESULT, STOPPED, TrainJob
from stages.train.plots import CURVES, plot_training
from stages.train.warm_start import check_init

logger = logging.getLogger(__name__)

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
    check_draft(draft, target.shape)
    data, validation = (
        usable(corpus.sequences(split), config.max_sequence_tokens, draft.mask_token_id)
        for split in ("train", "validation")
    )
    _check_masked(data, validation, draft, hidden_states)
    layer_ids = (*draft.aux_layer_ids, target.shape.num_layers)
    check_corpus(layer_ids, corpus)
    _check_sequences((*data.sequences, *validation.sequences), draft, engine, target)
    window_bytes = hidden_states.window_bytes(hidden_states.segment_bytes * engine.num_actors, config.num_workers)
    layout = sample_layout(target, layer_ids, engine, hidden_states)
    for sequence in (*data.sequences, *validation.sequences):
        size = layout.object_bytes(len(sequence))
        if problem := misfit(sequence, size, window_bytes, hidden_states.segment_bytes):
            raise ValueError(problem)
    if not data.sequences:
        raise ValueError(
            f"{corpus.path}: no training sequence has two supervised tokens in a row ({data.counts}); check the masks"
        )
    if config.early_stopping_validations is not None and not validation.sequences:
        raise ValueError(
            f"train.early_stopping_validations={config.early_stopping_validations}: {corpus.path} has no validation "
            "sequences to judge by; set it to null, or datagen.validation_share above 0"
        )

    out.path.mkdir(parents=True, exist_ok=True)
    vocab_W = None if draft.vocab_size is None else _vocab(draft.vocab_size, data.sequences, target, out)
    result = out.path / RESULT
    if not result.exists():  # a run that was stopped between training and this line need not train again
        work = out.path / EXTRACTORS
        work.mkdir(exist_ok=True)
        steps = Order(
            len(data.sequences), config.batch_sequences, config.epochs, config.max_steps, config.seed
        ).total_steps
        out.events.progress("train", 0, steps, "step", "starting extractors")
        used = (*data.sequences, *validation.sequences)
        with states_of(
            used, target, layer_ids, engine, hidden_states, work=work, out=out, references=[corpus.path]
        ) as open_reader:
            job = TrainJob(config, draft, target, corpus, out, hidden_states.max_set_aside_share, vocab_W)
            fit(job, open_reader)
    check_exported(layer_ids, out.path / EXPORT)
    told = json.loads(result.read_text(encoding="utf-8"))
    plot_training(out.path / METRICS, out.path / CURVES)
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
    return out.commit(
        Draft,
        counts=counts,
        metrics=told["metrics"],
        facts=facts,
        drop=[CHECKPOINTS, RAY, EXTRACTORS, RESULT, VOCAB, STOP, STOPPED],
    )


def _check_sequences(
    sequences: tuple[TokenSequence, ...], draft: DraftConfig, engine: EngineConfig, target: Target
) -> None:
    """Raise ValueError when a sequence does not fit the engine or the draft."""
    longest = max((len(sequence) for sequence in sequences), default=0)
    limits = (
        ("engine.max_model_len", engine.max_model_len, longest),
        # extraction generates one token
        ("the target's max_position_embeddings", target.shape.max_positions, longest + 1),
        ("draft.max_positions", draft.max_positions, longest + draft.block_size),
    )
    for name, found, needed in limits:
        if found < needed:
            raise ValueError(
                f"{name}={found}: the longest sequence of {longest} tokens needs {needed}; "
                "raise it, or lower train.max_sequence_tokens"
            )


def _check_masked(data: Usable, validation: Usable, draft: DraftConfig, hidden_states: HiddenStatesConfig) -> None:
    """Raise ValueError when more sequences hold the mask token than may be set aside for any other reason."""
    masked, share = (*data.masked, *validation.masked), hidden_states.max_set_aside_share
    asked = data.counts["sequences_in"] + validation.counts["sequences_in"]
    if len(masked) > max(share * asked, 1 if share > 0 else 0):
        raise ValueError(
            f"draft.mask_token_id={draft.mask_token_id}: {len(masked)} of {asked} sequences contain it, {masked[0]} "
            f"first, hidden_states.max_set_aside_share={share}; choose a token that never occurs, or raise the share"
        )
    for id_ in masked:
        logger.warning("sequence %s is not trained on: it contains draft.mask_token_id=%s", id_, draft.mask_token_id)


def _vocab(size: int, sequences: Sequence[TokenSequence], target: Target, out: Workspace) -> np.ndarray:
    """Ids of the draft's vocabulary; chosen once and kept, so that a resumed run drafts the same tokens."""
    path = out.path / VOCAB
    if not path.exists():
        required = stop_token_ids(target.folder)
        beside = path.with_name(f"partial.{VOCAB}")
        np.save(beside, choose_vocab(sequences, size, target_size=target.shape.vocab_size, required=required))
        beside.replace(path)
    return np.asarray(np.load(path))
