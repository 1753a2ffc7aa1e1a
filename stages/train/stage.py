"""The train stage: extractors feed a Ray Train worker group, which leaves a draft."""

from __future__ import annotations

import json
from dataclasses import replace

from stages.artifacts import Workspace
from stages.corpus import Corpus, TokenSequence
from stages.draft.artifact import Draft
from stages.draft.config import DraftConfig, check_draft
from stages.draft.layers import check_corpus, check_exported
from stages.engine.config import EngineConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.pool import sample_layout, states_of
from stages.hidden_states.reader import misfit
from stages.target import Target
from stages.train.config import TrainConfig
from stages.train.data import Order, usable
from stages.train.fit import RAY, fit
from stages.train.loop import CHECKPOINTS, EXPORT, RESULT, TrainJob

EXTRACTORS = "extractors"


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
    error when training ends early.
    """
    # Ray Train's workers run in another directory.
    out = replace(out, final=out.final.absolute())
    target, corpus = Target(target.path.absolute(), target.record), Corpus(corpus.path.absolute(), corpus.record)
    check_draft(draft, target.shape)
    data = usable(corpus.sequences("train"), config.max_sequence_tokens)
    validation = usable(corpus.sequences("validation"), config.max_sequence_tokens)
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

    out.path.mkdir(parents=True, exist_ok=True)
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
            job = TrainJob(config, draft, target, corpus, out, hidden_states.max_set_aside_share)
            fit(job, open_reader)
    check_exported(layer_ids, out.path / EXPORT)
    told = json.loads(result.read_text(encoding="utf-8"))
    facts = {
        "layer_ids": list(layer_ids),
        "mask_token_id": draft.mask_token_id,
        "block_size": draft.block_size,
        "verifier": target.model,
        **told["facts"],
    }
    counts = {
        **data.counts,
        **{f"validation_{name}": count for name, count in validation.counts.items()},
        **told["counts"],
    }
    return out.commit(
        Draft, counts=counts, metrics=told["metrics"], facts=facts, drop=[CHECKPOINTS, RAY, EXTRACTORS, RESULT]
    )


def _check_sequences(
    sequences: tuple[TokenSequence, ...], draft: DraftConfig, engine: EngineConfig, target: Target
) -> None:
    """Raise ValueError when a sequence does not fit the engine or the draft, or holds the mask token."""
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
    for sequence in sequences:
        if (sequence.input_ids == draft.mask_token_id).any():
            raise ValueError(
                f"draft.mask_token_id={draft.mask_token_id}: sequence {sequence.id} contains it; "
                "choose a token that never occurs"
            )
