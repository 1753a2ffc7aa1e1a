"""A tiny random target, its states computed by transformers, and drafts of it, for the tests next to this file."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from speculators.models.dspark import DSparkDraftModel
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stages.artifacts import Record, Workspace
from stages.corpus import Corpus, TokenSequence, write_shard
from stages.draft.attention import NAMES
from stages.draft.batch import PackedBatch
from stages.draft.config import DraftConfig
from stages.draft.model import BlockOutput, backbone, block_positions, heads, num_predictions
from stages.hidden_states.flow import Flow
from stages.hidden_states.wire import HiddenBatch
from stages.target import Target, TargetShape
from stages.train.config import TrainConfig
from stages.train.job import TrainJob

SHAPE = TargetShape(num_layers=4, hidden_size=64, vocab_size=256, max_positions=512)
DRAFT = DraftConfig(
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    block_size=4,
    num_speculative_tokens=4,
    aux_layer_ids=(1, 3),
    mask_token_id=255,
    markov_rank=16,
    max_positions=512,
)
FILL_IN = replace(DRAFT, sample_from_anchor=False, num_speculative_tokens=3)
SLIDING = replace(DRAFT, sliding_window=5, causal=True)
LAYERS = (1, 3, 4)
WHY_LOST = "3 tries, the last: Mooncake get: 0f3a-17-2.0: expected 960 bytes, found 64"  # as StreamingReader says it
CONFIG = TrainConfig(
    epochs=3,
    batch_sequences=4,
    max_sequence_tokens=64,
    anchors_per_sequence=6,
    lr=3e-3,
    checkpoint_every_steps=2,
    validate_every_steps=3,
    num_workers=2,
    cpus_per_worker=0.5,
)

torch.set_num_threads(1)  # more only wait for each other on matrices of this size


def write_target(folder: Path) -> Path:
    """A random Qwen3 whose logits are spread widely enough for its argmax to mean something."""
    config = Qwen3Config(
        vocab_size=SHAPE.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen3ForCausalLM(config)
        torch.nn.init.normal_(model.lm_head.weight, std=0.5)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    model.save_pretrained(folder)
    return folder


@cache
def target_model(folder: Path) -> Qwen3ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def states(folder: Path, sequence: TokenSequence, layer_ids: Sequence[int] = LAYERS) -> torch.Tensor:
    """fp32 [T, L, D] of one sequence, rounded to bfloat16 as they travel.

    The id `num_layers` is the state before the final norm, as vLLM gives it.
    """
    model = target_model(folder)
    final: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, args: final.append(args[0]))
    output = model(torch.from_numpy(sequence.input_ids.astype(np.int64))[None], output_hidden_states=True)
    hook.remove()
    layers = [*output.hidden_states[:-1], final[0]]
    return torch.stack([layers[layer][0] for layer in layer_ids], dim=1).bfloat16().float()


@torch.no_grad()
def greedy_sequences(folder: Path, count: int, length: int, prompt: int = 4) -> list[TokenSequence]:
    """Conversations that the target wrote greedily after random prompts."""
    model, generator = target_model(folder), np.random.default_rng(0)
    tokens = torch.from_numpy(generator.integers(0, 255, (count, prompt)))
    while tokens.shape[1] < length:
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:, :255].argmax(-1)], dim=1)
    mask = np.arange(length) >= prompt
    return [TokenSequence(f"s{i}", "test", row.numpy().astype(np.int32), mask.copy()) for i, row in enumerate(tokens)]


@contextmanager
def as_speculators(model: DSparkDraftModel) -> Iterator[DSparkDraftModel]:
    """`model` with an attention that takes the dense masks of speculators' own forward."""
    layers, ours = model.config.transformer_layer_config, NAMES["sdpa"]
    layers._attn_implementation = "sdpa"
    yield model
    layers._attn_implementation = ours


def random_sequences(count: int, length: int, prompt: int = 3) -> list[TokenSequence]:
    """Random tokens; lengths differ by one from sequence to sequence."""
    generator = np.random.default_rng(0)
    made = []
    for i in range(count):
        ids = generator.integers(0, 255, length + i).astype(np.int32)
        made.append(TokenSequence(f"s{i}", "test", ids, np.arange(length + i) >= prompt))
    return made


def packed(folder: Path, sequences: Sequence[TokenSequence]) -> PackedBatch:
    return PackedBatch.pack(tuple(sequences), torch.cat([states(folder, s) for s in sequences]))


class FakeReader:
    """A HiddenStatesReader that asks transformers, in the process that trains.

    Its process is killed once it has given `kill_at` sequences, when that is set.
    """

    def __init__(
        self,
        folder: Path,
        set_aside: frozenset[str] = frozenset(),
        poisoned: frozenset[str] = frozenset(),
        kill_at: int | None = None,
    ) -> None:
        self.folder, self.set_aside, self.poisoned, self.kill_at = folder, set_aside, poisoned, kill_at
        self.given = 0

    def read(self, batches: Iterable[Sequence[TokenSequence]]) -> Iterator[HiddenBatch]:
        for batch in batches:
            if self.kill_at is not None and self.given >= self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.given += len(batch)
            kept = tuple(s for s in batch if s.id not in self.set_aside)
            parts = [states(self.folder, s) * (float("nan") if s.id in self.poisoned else 1.0) for s in kept]
            packed_states = torch.cat([torch.zeros(0, len(LAYERS), SHAPE.hidden_size), *parts]).bfloat16()
            away = tuple((s.id, WHY_LOST) for s in batch if s.id in self.set_aside)
            yield HiddenBatch(kept, packed_states, away)

    def flow(self) -> Flow:
        return Flow()

    def close(self) -> None:
        pass


def record(kind: str, facts: dict[str, object]) -> Record:
    return Record(kind, "test", 1, {}, {}, {}, {}, facts, "test", "now", 0.0)


def make_job(
    root: Path, config: TrainConfig, sequences: Sequence[TokenSequence], draft: DraftConfig = DRAFT
) -> TrainJob:
    """Everything `train` reads, under `root`; the last sequence is the validation split. What exists stays."""
    target = Target(
        root / "target",
        record("Target", {"built": True, "revision": None, "trust_remote_code": False, "shape": asdict(SHAPE)}),
    )
    corpus = Corpus(root / "corpus", record("Corpus", {}))
    if not target.path.exists():
        write_target(target.path / "model")
        corpus.path.mkdir(parents=True)
        write_shard(corpus.path / "train-00000.parquet", list(sequences[:-1]))
        write_shard(corpus.path / "validation-00000.parquet", list(sequences[-1:]))
    out = Workspace(root / "draft", "id")
    out.path.mkdir(parents=True, exist_ok=True)
    return TrainJob(config, draft, target, corpus, out)


def block_forward(model: DSparkDraftModel, batch: PackedBatch, anchors_A: torch.Tensor) -> BlockOutput:
    """All blocks, teacher-forced: every prediction is given the true token before it."""
    previous_AB = batch.input_ids_T[block_positions(batch, anchors_A, num_predictions(model))]
    return heads(model, backbone(model, batch, anchors_A), previous_AB)
