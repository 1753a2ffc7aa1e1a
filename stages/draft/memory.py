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

    weights: int  # trained, fp32
    frozen: int
    gradients: int
    optimizer: int
    saved: int  # activations from the forward pass for the backward pass, half-precision copies of weights included
    working: int  # the widest moment on top of them: a piece of logits, or a layer computed again

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
    recompute: bool = False,
) -> MemoryPlan:
    """The plan of one rank for micro-batches of `tokens` and `anchors` in all.

    `dtype_bytes`: of matrix products and of the frozen parts; trained weights, gradients and optimiser are
    fp32 (`train.precision`). `shards`: ranks among which `train.sharding=fsdp` deals weights and optimiser;
    during a step weights are whole as well, gradients always. `documents`: number of equally long ones for
    attention by document, which holds dense masks; 0 for flex attention. `recompute`: layers run again in
    the backward pass (`train.activation_checkpointing`).
    """
    count = count_parameters(config, shape)
    matrices = count.layers * (count.layer - 2 * shape.hidden_size - 2 * config.head_dim)
    moments = 2 * count.trainable - (matrices if optimizer == "muon" else 0)  # Muon has one, for matrices of layers
    layer, rest = _saved(config, shape, tokens, anchors * config.block_size, dtype_bytes, documents)
    if dtype_bytes < FP32_BYTES:
        layer += matrices // count.layers * dtype_bytes
        rest += len(config.aux_layer_ids) * shape.hidden_size**2 * dtype_bytes
    inputs = anchors * config.block_size * shape.hidden_size * FP32_BYTES  # of a layer that is run again
    return MemoryPlan(
        weights=count.trainable * FP32_BYTES // shards + (count.trainable * FP32_BYTES if shards > 1 else 0),
        frozen=_frozen_bytes(config, shape, dtype_bytes),
        gradients=count.trainable * FP32_BYTES,
        optimizer=moments * FP32_BYTES // shards,
        saved=rest + count.layers * (inputs if recompute else layer),
        working=max(_loss_working(config, shape, anchors, dtype_bytes), layer if recompute else 0),
    )


def _frozen_bytes(config: DraftConfig, shape: TargetShape, dtype_bytes: int) -> int:
    """Embedding, LM head and norm. With a reduced vocabulary the loss needs the target's whole LM head (unless it is
    the embedding), and the draft's rows of it keep all their bits, since they are exported."""
    head = shape.vocab_size * dtype_bytes + (config.vocab_size or 0) * FP32_BYTES
    return (shape.vocab_size * dtype_bytes + head + FP32_BYTES) * shape.hidden_size


def _saved(
    config: DraftConfig, shape: TargetShape, tokens: int, queries: int, dtype_bytes: int, documents: int
) -> tuple[int, int]:
    """What autograd keeps of a layer, and of the rest.

    Norms and the residual stream are fp32. In half precision every product keeps its own copy of what it reads:
    of the context (keys and values), of the blocks' states (queries, keys, values, both of the MLP), of the masks.
    """
    width, query_width = shape.hidden_size, config.num_heads * config.head_dim
    key_width, keys = config.num_kv_heads * config.head_dim, tokens + queries
    by_document = documents > 0  # keys, values and outputs are then copied
    half = dtype_bytes < FP32_BYTES
    scores = queries * keys // documents if by_document else 0
    fp32 = queries * (4 * width + query_width + 2 * config.num_heads) + keys * (key_width + config.num_kv_heads)
    other = queries * ((5 if half else 2) * width + (3 + by_document) * query_width + 4 * config.intermediate_size)
    other += keys * 3 * key_width + (2 * tokens * width + scores if half else 0)
    layer = fp32 * FP32_BYTES + other * dtype_bytes
    context = tokens * width * (FP32_BYTES + (len(config.aux_layer_ids) + 2) * dtype_bytes)
    rotary = 2 * keys * config.head_dim * FP32_BYTES
    masks = 0 if half else scores * FP32_BYTES
    predictions = queries // config.block_size * config.num_speculative_tokens
    rank, draft_vocab = config.markov_rank, config.vocab_size or shape.vocab_size
    ends = (2 * queries * width + 2 * predictions * (width + rank)) * FP32_BYTES
    return layer, context + rotary + masks + ends + draft_vocab * rank * FP32_BYTES


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
