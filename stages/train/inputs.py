"""What training reads, and whether it can be trained on: found out before any process starts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from stages.corpus import Corpus, TokenSequence
from stages.draft.config import DraftConfig, captured_layers, check_draft
from stages.draft.layers import check_corpus
from stages.engine.config import EngineConfig
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.pool import check_sizes
from stages.hidden_states.wire import most_set_aside
from stages.target import Target
from stages.train.config import TrainConfig
from stages.train.data import Usable, usable

logger = logging.getLogger(__name__)


class Inputs(NamedTuple):
    """Sequences to train on and to validate with, and the target's layers whose states they need."""

    data: Usable
    validation: Usable
    layer_ids: tuple[int, ...]


def read_inputs(
    config: TrainConfig,
    target: Target,
    corpus: Corpus,
    *,
    draft: DraftConfig,
    engine: EngineConfig,
    hidden_states: HiddenStatesConfig,
) -> Inputs:
    """The usable sequences of the corpus. Raises ValueError, naming key or file, when they cannot be trained on."""
    check_draft(draft, target.shape)
    data, validation = (
        usable(corpus.sequences(split), config.max_sequence_tokens, draft.mask_token_id)
        for split in ("train", "validation")
    )
    _check_masked(data, validation, draft, hidden_states)
    layer_ids = captured_layers(draft, target.shape)
    check_corpus(layer_ids, corpus)
    sequences = (*data.sequences, *validation.sequences)
    _check_lengths(sequences, draft, engine, target)
    check_sizes(sequences, target, layer_ids, engine, hidden_states, num_ranks=config.num_workers)
    if not data.sequences:
        raise ValueError(
            f"{corpus.path}: no training sequence has two supervised tokens in a row ({data.counts}); check the masks"
        )
    if config.early_stopping_validations is not None and not validation.sequences:
        raise ValueError(
            f"train.early_stopping_validations={config.early_stopping_validations}: {corpus.path} has no validation "
            "sequences to judge by; set it to null, or datagen.validation_share above 0"
        )
    return Inputs(data, validation, layer_ids)


def _check_lengths(
    sequences: Sequence[TokenSequence], draft: DraftConfig, engine: EngineConfig, target: Target
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
    if len(masked) > most_set_aside(asked, share):
        raise ValueError(
            f"draft.mask_token_id={draft.mask_token_id}: {len(masked)} of {asked} sequences contain it, {masked[0]} "
            f"first, hidden_states.max_set_aside_share={share}; choose a token that never occurs, or raise the share"
        )
    for id_ in masked:
        logger.warning("sequence %s is not trained on: it contains draft.mask_token_id=%s", id_, draft.mask_token_id)
