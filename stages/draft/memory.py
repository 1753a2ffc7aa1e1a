"""How many bytes training a draft takes, from its shape alone: for planning, before any machine is held.

Counted are the tensors that `model.py`, `loss.py` and the optimiser hold for one micro-batch. Left out are
what the process itself needs (interpreter, kernels, allocator's slack) and the states on their way in.

Legend: T context tokens, Q queries (anchors times slots), K = T+Q keys, D hidden size, H query heads,
G key heads, E head dimension, F intermediate size, V target vocabulary, W draft vocabulary, R Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stages.draft.config import DraftConfig
from stages.target import TargetShape

FP32_BYTES = 4
# The pieces of `vocab_loss.py`; that module is not imported, since a plan must not cost torch's import.
PIECE_LOGITS = 1 << 24


@dataclass(frozen=True)
class Parameters:
    """How many weights a draft has."""

    layer: int  # of one layer
    layers: int
    rest: int  # fc, norms, Markov and confidence heads
    frozen: int  # the target's: embedding, LM head of the draft's vocabulary, final norm

    @property
    def trainable(self) -> int:
        return self.layers * self.layer + self.rest


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank."""

    weights: int  # trained, with their fp32 masters
    frozen: int
    gradients: int
    optimizer: int
    saved: int  # activations from the forward pass for the backward pass
    working: int  # the widest moment on top of them: a piece of logits, or a sharded unit gathered

    @property
    def activations(self) -> int:
        return self.saved + self.working

    @property
    def total(self) -> int:
        return self.weights + self.frozen + self.gradients + self.optimizer + self.activations


def count_parameters(config: DraftConfig, shape: TargetShape) -> Parameters:
    """Weights by what becomes of them."""
    width, draft_vocab = shape.hidden_size, config.vocab_size or shape.vocab_size
    attention = 2 * width * config.head_dim * (config.num_heads + config.num_kv_heads) + 2 * config.head_dim
    layer = attention + 3 * width * config.intermediate_size + 2 * width
    markov = (shape.vocab_size + draft_vocab) * config.markov_rank
    confidence = (width + config.markov_rank * config.confidence_with_markov + 1) if config.confidence_head else 0
    rest = len(config.aux_layer_ids) * width * width + 2 * width + markov + confidence
    return Parameters(layer, config.num_layers, rest, (shape.vocab_size + draft_vocab) * width + width)


def plan_memory(
    config: DraftConfig,
    shape: TargetShape,
    *,
    tokens: int,
    anchors: int,
    dtype_bytes: int = FP32_BYTES,
    shards: int = 1,
    optimizer: Literal["adamw", "muon"] = "adamw",
    documents: int = 0,
) -> MemoryPlan:
    """The plan of one rank for micro-batches of `tokens` and `anchors` in all.

    `dtype_bytes`: of what the model computes in; below 4 the trained weights have fp32 masters besides,
    and gradients and optimiser are always fp32. `shards`: ranks among which FSDP deals weights, gradients
    and optimiser; the unit in use, and the one fetched ahead, are then whole. `documents`: number of
    equally long ones for attention by document, which holds dense masks; 0 for flex attention.
    """
    count = count_parameters(config, shape)
    matrices = count.layers * (count.layer - 2 * shape.hidden_size - 2 * config.head_dim)
    moments = 2 * count.trainable - (matrices if optimizer == "muon" else 0)  # Muon has one, for matrices of layers
    copies = FP32_BYTES + (dtype_bytes if dtype_bytes < FP32_BYTES and shards == 1 else 0)
    return MemoryPlan(
        weights=count.trainable * copies // shards,
        frozen=_frozen(config, shape, count) * dtype_bytes // shards,
        gradients=count.trainable * FP32_BYTES // shards,
        optimizer=moments * FP32_BYTES // shards,
        saved=_saved(config, shape, tokens, anchors * config.block_size, dtype_bytes, documents),
        working=max(_loss_working(config, shape, anchors, dtype_bytes), _gathered(shape, count, shards) * dtype_bytes),
    )


def _frozen(config: DraftConfig, shape: TargetShape, count: Parameters) -> int:
    """With a reduced vocabulary the loss also needs the target's whole LM head (unless it is the embedding)."""
    return count.frozen + (shape.vocab_size * shape.hidden_size if config.vocab_size is not None else 0)


def _saved(config: DraftConfig, shape: TargetShape, tokens: int, queries: int, dtype_bytes: int, documents: int) -> int:
    """What autograd keeps. Norms keep their inputs in fp32, whatever the model computes in."""
    width, query_width = shape.hidden_size, config.num_heads * config.head_dim
    key_width, keys = config.num_kv_heads * config.head_dim, tokens + queries
    by_document = documents > 0  # keys, values and outputs are then copied
    fp32 = queries * (2 * width + query_width + 2 * config.num_heads) + keys * (key_width + config.num_kv_heads)
    other = queries * (4 * width + (3 + by_document) * query_width + 4 * config.intermediate_size)
    other += keys * 3 * key_width
    layers = config.num_layers * (fp32 * FP32_BYTES + other * dtype_bytes)
    context = tokens * width * (FP32_BYTES + (len(config.aux_layer_ids) + 2) * dtype_bytes)
    rotary = 2 * keys * config.head_dim * dtype_bytes
    masks = queries * keys // documents * dtype_bytes if by_document else 0
    predictions = queries // config.block_size * config.num_speculative_tokens
    rank, draft_vocab = config.markov_rank, config.vocab_size or shape.vocab_size
    ends = queries * width * (FP32_BYTES + dtype_bytes) + 2 * predictions * (width + rank) * dtype_bytes
    return layers + context + rotary + masks + ends + draft_vocab * rank * dtype_bytes


def _loss_working(config: DraftConfig, shape: TargetShape, anchors: int, dtype_bytes: int) -> int:
    """A piece of both vocabularies' logits, and the blocks' hidden states that the loss reads."""
    predictions = anchors * config.num_speculative_tokens
    positions = max(1, PIECE_LOGITS // shape.vocab_size)
    draft_vocab = config.vocab_size or shape.vocab_size
    rows = min(predictions, positions * config.num_speculative_tokens)
    logits = rows * draft_vocab + min(predictions, positions) * (
        shape.vocab_size + (draft_vocab if config.vocab_size is not None else 0)
    )
    return logits * FP32_BYTES + 2 * predictions * shape.hidden_size * dtype_bytes


def _gathered(shape: TargetShape, count: Parameters, shards: int) -> int:
    """Weights of the two largest units that FSDP holds whole at a time: layers, or a matrix of the target's ends."""
    return 2 * max(count.layer, shape.vocab_size * shape.hidden_size) if shards > 1 else 0
