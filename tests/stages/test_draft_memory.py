"""The memory plan against what real, smaller drafts take, and its values for Kimi K3."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.config import conf_path, load
from stages.draft.anchors import sample_anchors
from stages.draft.batch import PackedBatch
from stages.draft.config import DraftConfig, check_draft
from stages.draft.loss import LossWeights, draft_loss
from stages.draft.memory import PIECE_LOGITS, MemoryPlan, count_parameters, plan_memory
from stages.draft.model import build_draft, construct, shared_head, speculators_config, trainable
from stages.draft.vocab_loss import PIECE_LOGITS as LOSS_PIECE_LOGITS
from stages.target import load_head
from stages.train.config import TrainConfig
from stages.train.optimizer import Gradients, Optimizer
from stages.train.prepare import prepare
from tests.stages.draft_helpers import DRAFT, FILL_IN, SHAPE, packed, random_sequences, write_target

GIB = 1 << 30
K3 = load(conf_path("kimi_k3"))
WIDE = replace(DRAFT, num_layers=3, intermediate_size=512, head_dim=16, markov_rank=64)
CONFIGS = pytest.mark.parametrize(
    "config", [DRAFT, FILL_IN, WIDE, replace(WIDE, vocab_size=100)], ids=["anchor", "fill_in", "wide", "reduced"]
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def draft_and_batch(config: DraftConfig, target: Path) -> tuple[torch.nn.Module, PackedBatch, torch.Tensor]:
    """A draft, four documents of about 60 tokens, and 20 anchors whose blocks are whole."""
    model = build_draft(config, SHAPE, target, verifier="x", seed=0, vocab_W=torch.arange(100).numpy())
    sequences = random_sequences(4, 60)
    batch = packed(target, sequences)
    drawn = [torch.from_numpy(sample_anchors(s.loss_mask[:-4], 5, key=(s.id,))) for s in sequences]
    starts = batch.documents_T.bincount().cumsum(0).roll(1)
    starts[0] = 0
    return model, batch, torch.cat([anchors + start for anchors, start in zip(drawn, starts, strict=True)])


def test_plan_and_loss_cut_logits_into_the_same_pieces() -> None:
    assert PIECE_LOGITS == LOSS_PIECE_LOGITS


@CONFIGS
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_gradients_and_optimiser_to_the_byte(config: DraftConfig, optimizer: str, target: Path) -> None:
    model, _, _ = draft_and_batch(config, target)
    plan = plan_memory(config, SHAPE, tokens=1, anchors=1, optimizer=optimizer)
    half = plan_memory(config, SHAPE, tokens=1, anchors=1, dtype_bytes=2)
    parameters = trainable(model)
    gradients, stepped = Gradients(parameters), Optimizer(parameters, TrainConfig(optimizer=optimizer))
    gradients.flat.fill_(1e-3)
    stepped.step(1.0)
    assert plan.weights == sum(p.nbytes for p in parameters.values())
    head = shared_head(model, load_head(target))
    frozen = [model.embed_tokens.weight, model.lm_head.weight, model.verifier_norm.weight, head.lm_head_VD]
    assert plan.frozen == sum({t.data_ptr(): t.nbytes for t in frozen}.values())
    prepare(model, TrainConfig(precision="bfloat16"), torch.device("cpu"))
    head = shared_head(model, load_head(target))
    frozen = [model.embed_tokens.weight, model.lm_head.weight, model.verifier_norm.weight, head.lm_head_VD]
    assert half.frozen == sum({t.data_ptr(): t.nbytes for t in frozen}.values())
    assert plan.gradients == gradients.flat.nbytes
    assert plan.optimizer == sum(t.nbytes for name, t in stepped.tensors().items() if not name.endswith("|step"))


@CONFIGS
@pytest.mark.parametrize("how", [{}, {"precision": "bfloat16"}], ids=["plain", "bf16"])
def test_saved_activations_within_five_percent(how: dict[str, object], config: DraftConfig, target: Path) -> None:
    model, batch, anchors = draft_and_batch(config, target)
    prepare(model, TrainConfig(**how), torch.device("cpu"))
    given = [*model.parameters(), *model.buffers(), batch.final_TD]
    known = {tensor.untyped_storage().data_ptr() for tensor in given if tensor is not None}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    # the states come as float32 with the final layer beside them: as of bfloat16 ones, fc keeps the aux layers
    batch = replace(batch, states_TLD=batch.states_TLD.clone())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sums = draft_loss(model, shared_head(model, load_head(target)), batch, anchors, LossWeights(0.1, 0.9, 1.0, 4.0))
    assert sums.whole_blocks == len(anchors)
    plan = planned(config, batch, anchors, how)
    assert plan.saved == pytest.approx(sum(saved.values()), rel=0.05)


def planned(config: DraftConfig, batch: PackedBatch, anchors: torch.Tensor, how: dict[str, object]) -> MemoryPlan:
    return plan_memory(
        config,
        SHAPE,
        tokens=len(batch),
        anchors=len(anchors),
        documents=4,
        dtype_bytes=2 if "precision" in how else 4,
        recompute="activation_checkpointing" in how,
    )


@CONFIGS
@pytest.mark.parametrize(
    "how",
    [{}, {"precision": "bfloat16"}, {"activation_checkpointing": True}],
    ids=["plain", "bf16", "recompute"],
)
def test_peak_of_a_step_within_fifteen_percent(how: dict[str, object], config: DraftConfig, target: Path) -> None:
    model, batch, anchors = draft_and_batch(config, target)
    prepare(model, TrainConfig(**how), torch.device("cpu"))
    gradients, head = Gradients(trainable(model)), shared_head(model, load_head(target))
    gradients.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        draft_loss(model, head, batch, anchors, LossWeights(0.1, 0.9, 1.0, 4.0)).total.backward()
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    plan = planned(config, batch, anchors, how)
    assert plan.activations == pytest.approx(peak, rel=0.15)


def test_kimi_k3_has_the_published_number_of_parameters() -> None:
    shape = K3.target.shape
    check_draft(K3.draft, shape)
    with torch.device("meta"):
        model = construct(speculators_config(K3.draft, shape, verifier=None, architectures=[]))
    counts = {name: parameter.numel() for name, parameter in model.named_parameters() if name != "verifier_norm.weight"}
    assert sum(counts.values()) == 4_744_900_481
    assert sum(p.numel() for p in trainable(model).values()) == 2_396_090_241
    assert counts.keys() - trainable(model).keys() == {"embed_tokens.weight", "lm_head.weight"}
    planned = count_parameters(K3.draft, shape)
    assert planned.trainable == 2_396_090_241
    assert planned.trainable + planned.frozen - shape.hidden_size == 4_744_900_481


def test_kimi_k3_fits_one_gpu_of_the_training_node() -> None:
    """By hand where it can be: 8,192 tokens and 1,024 anchors a sequence, Muon, on a GB300 of 288 GB."""
    trained, matrix = 2_396_090_241, 163_840 * 7168
    layer = 2 * 7168 * 64 * (96 + 16) + 3 * 7168 * 14_336
    plan = plan_memory(
        K3.draft, K3.target.shape, tokens=8192, anchors=1024, dtype_bytes=2, optimizer="muon", recompute=True
    )
    assert plan.weights == plan.gradients == 4 * trained
    assert plan.frozen == 2 * 2 * matrix + 4 * 7168
    assert plan.optimizer == 4 * (2 * trained - 5 * layer)
    assert plan.total < 64 * GIB
    whole = plan_memory(K3.draft, K3.target.shape, tokens=8192, anchors=1024, dtype_bytes=2, optimizer="muon")
    assert plan.activations < whole.activations < 30 * GIB
    dealt = plan_memory(K3.draft, K3.target.shape, tokens=8192, anchors=1024, dtype_bytes=2, shards=4)
    assert dealt.optimizer == 8 * trained // 4
    assert dealt.weights == trained + 4 * trained
