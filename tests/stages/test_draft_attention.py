"""The three attentions give one answer, and gradients, and see no other document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from speculators.models.dspark import DSparkDraftModel
from torch._dynamo.utils import counters

from stages.draft.attention import Attention
from stages.draft.batch import PackedBatch
from stages.draft.config import DraftConfig
from stages.draft.loss import LossWeights, draft_loss
from stages.draft.model import backbone, build_draft, shared_head, trainable, use_attention
from stages.target import load_head
from stages.train.config import TrainConfig
from stages.train.prepare import prepare
from tests.stages.draft_helpers import DRAFT, FILL_IN, SHAPE, SLIDING, packed, random_sequences, write_target

WEIGHTS = LossWeights(ce=0.1, l1=0.9, confidence=1.0, decay_gamma=4.0)
ANCHORS = torch.tensor([3, 9, 10, 18, 45, 50, 60])  # none in the second of three documents: 0-19, 20-40, 41-62


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def batch(target: Path) -> PackedBatch:
    return packed(target, random_sequences(3, 20))


def make(config: DraftConfig, target: Path, attention: Attention) -> DSparkDraftModel:
    model = build_draft(config, SHAPE, target, verifier="x", seed=0)
    use_attention(model, attention)
    return model


CONFIGS = pytest.mark.parametrize("config", [DRAFT, FILL_IN, SLIDING], ids=["anchor", "fill_in", "sliding"])


@CONFIGS
def test_dense_attention_agrees_in_loss_and_gradients(config: DraftConfig, target: Path, batch: PackedBatch) -> None:
    found = []
    for attention in ("sdpa", "eager"):
        model = make(config, target, attention)
        sums = draft_loss(model, shared_head(model, load_head(target)), batch, ANCHORS, WEIGHTS)
        gradients = torch.autograd.grad(sums.total, list(trainable(model).values()))
        found.append((sums.flat(), *gradients))
    for name, ours, other in zip(("sums", *trainable(model)), *found, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5, msg=name)


@CONFIGS
def test_flex_attention_agrees(config: DraftConfig, target: Path, batch: PackedBatch) -> None:
    """Forward only: on a CPU torch has no backward pass of flex attention."""
    with torch.no_grad():
        ours, flex = (backbone(make(config, target, kind), batch, ANCHORS) for kind in ("sdpa", "flex"))
    torch.testing.assert_close(ours, flex)


@torch.no_grad()
def test_layers_with_flex_attention_are_compiled_whole_and_once(target: Path, batch: PackedBatch) -> None:
    """As a GPU trains, but for the code generator: documents of other lengths ask for no other program."""
    model = make(SLIDING, target, "flex")
    prepare(model, TrainConfig(attention="flex", precision="bfloat16"), torch.device("cpu"))
    asked = [(batch, ANCHORS), (packed(target, random_sequences(2, 26)), torch.tensor([5, 9, 30, 40]))]
    expected = [backbone(model, *of) for of in asked]
    torch._dynamo.reset()
    counters.clear()
    for layer in model.layers:
        layer.compile(dynamic=True, backend="aot_eager")
    assert all(torch.equal(backbone(model, *of), want) for of, want in zip(asked, expected, strict=True))
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex"])
def test_other_documents_move_no_bit_where_they_are_not_met(
    attention: Attention, target: Path, batch: PackedBatch
) -> None:
    """Dense kernels weigh masked keys with 0; document by document they are not even read, NaN or not."""
    model = make(DRAFT, target, attention)
    changed = replace(batch, states_TLD=batch.states_TLD.clone())
    changed.aux_TLD[20:41] = torch.nan if attention == "sdpa" else 7.0
    assert torch.equal(backbone(model, batch, ANCHORS), backbone(model, changed, ANCHORS))
