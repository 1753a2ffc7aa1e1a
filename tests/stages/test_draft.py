"""The draft's forward, anchors, checkpoint and reference drafting, against speculators and by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.models.dspark import DSparkDraftModel

from stages.draft.anchors import label_mask, sample_anchors
from stages.draft.attention import NAMES
from stages.draft.checkpoint import (
    check_checkpoint,
    export_draft,
    head_digest,
    load_draft,
    name_target,
    scale_confidence,
)
from stages.draft.config import DraftConfig, check_draft
from stages.draft.mask import Blocks
from stages.draft.model import (
    backbone,
    block_positions,
    build_draft,
    num_predictions,
    trainable,
)
from stages.draft.speculate import draft_blocks
from stages.draft.vocab import vocab_ids
from tests.stages.draft_helpers import (
    DRAFT,
    FILL_IN,
    SHAPE,
    SLIDING,
    as_speculators,
    block_forward,
    packed,
    random_sequences,
    write_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def make(config: DraftConfig, target: Path) -> DSparkDraftModel:
    vocab = np.arange(5, 185, 2)  # of a reduced vocabulary
    model = build_draft(config, SHAPE, target, verifier="org/target", seed=0, vocab_W=vocab).eval()
    with torch.no_grad():  # norms of exactly one and a zero bias would hide a forgotten parameter
        for seed, parameter in enumerate(trainable(model).values()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


@pytest.mark.parametrize(
    "config", [DRAFT, FILL_IN, replace(SLIDING, sliding_window=400)], ids=["anchor", "fill_in", "sliding"]
)
def test_forward_equals_speculators(config: DraftConfig, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(config, target)
    batch = packed(target, random_sequences(3, 20))
    anchors = torch.tensor([4, 9, 21, 30, 45, 55])
    monkeypatch.setattr(
        "speculators.models.dflash.core.select_anchors",
        lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool)),
    )
    with as_speculators(model):
        hidden, logits, targets, _, _ = model._backbone_forward(
            batch.aux_TLD.flatten(1)[None],
            batch.input_ids_T[None],
            batch.loss_mask_T[None].float(),
            batch.final_TD[None],
            batch.documents_T[None],
            batch.positions_T[None],
            max_anchors=len(anchors),
        )
    skip = 0 if config.sample_from_anchor else 1
    predictions = num_predictions(model)
    hidden = hidden.view(len(anchors), config.block_size, -1)[:, skip:]
    previous = torch.stack([batch.input_ids_T[a : a + predictions] for a in anchors])
    bias = model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
    features = torch.cat([hidden, model.markov_head.prev_embeddings(previous)], dim=-1)

    ours = block_forward(model, batch, anchors)
    torch.testing.assert_close(backbone(model, batch, anchors), hidden)
    torch.testing.assert_close(ours.logits_ABW, logits.view(len(anchors), config.block_size, -1)[:, skip:] + bias)
    torch.testing.assert_close(ours.confidence_AB, model.confidence_head(features))
    # the target's answer for prediction j is its state at p+j
    states = batch.final_TD[block_positions(batch, anchors, predictions)]
    torch.testing.assert_close(
        model.lm_head(model.verifier_norm(states)), targets.view(len(anchors), config.block_size, -1)[:, skip:]
    )


def test_packing_changes_nothing(target: Path) -> None:
    model, sequences = make(DRAFT, target), random_sequences(2, 20)
    batch = packed(target, sequences)
    together = block_forward(model, batch, torch.tensor([5, 25, 32]))
    alone = block_forward(model, batch.documents()[1], torch.tensor([5, 12]))
    assert batch.documents()[1].ids == ("s1",)
    torch.testing.assert_close(together.logits_ABW[1:], alone.logits_ABW)


def test_forward_ignores_everything_from_the_anchor_on(target: Path) -> None:
    model = make(DRAFT, target)
    batch = packed(target, random_sequences(1, 20))
    changed = replace(batch, states_TLD=batch.states_TLD.clone())
    changed.aux_TLD[8:] = 7.0
    anchors = torch.tensor([8])
    assert torch.equal(
        block_forward(model, batch, anchors).logits_ABW, block_forward(model, changed, anchors).logits_ABW
    )
    changed.aux_TLD[7] = 7.0
    assert not torch.equal(
        block_forward(model, batch, anchors).logits_ABW, block_forward(model, changed, anchors).logits_ABW
    )


def test_mask_by_hand() -> None:
    documents, positions = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 0, 1, 2])
    full = Blocks(documents, positions, torch.tensor([4]), 3, sliding_window=None, causal=False)
    assert full.dense().int().tolist() == [[0, 0, 1, 1, 0, 1, 1, 1]] * 3
    # anchor at position 2, window 2: slot k sees positions k+1 and k+2 only
    sliding = replace(full, sliding_window=2, causal=True)
    assert sliding.dense().int().tolist() == [
        [0, 0, 0, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("layout", [DRAFT, FILL_IN, SLIDING], ids=["anchor", "fill_in", "sliding"])
@pytest.mark.parametrize(
    "heads",
    [{}, {"vocab_size": 90}, {"confidence_with_markov": False}, {"confidence_head": False}],
    ids=["all", "reduced", "confidence_alone", "no_confidence"],
)
def test_drafting_step_by_step_equals_teacher_forcing_on_its_own_tokens(
    layout: DraftConfig, heads: dict[str, object], target: Path
) -> None:
    model, batch, anchors = (
        make(replace(layout, **heads), target),
        packed(target, random_sequences(1, 24)),
        torch.tensor([6, 15]),
    )
    columns = vocab_ids(model)
    drafted = draft_blocks(model, batch, anchors)
    for row, anchor in enumerate(anchors.tolist()):
        ids = batch.input_ids_T.clone()
        ids[anchor + 1 : anchor + 1 + num_predictions(model)] = drafted.tokens_AB[row]
        forced = block_forward(model, replace(batch, input_ids_T=ids), anchors[row : row + 1])
        tokens = forced.logits_ABW[0].argmax(-1)
        assert (tokens if columns is None else columns[tokens]).tolist() == drafted.tokens_AB[row].tolist()
        if drafted.confidence_logits_AB is None:
            assert forced.confidence_AB is None
        else:
            torch.testing.assert_close(forced.confidence_AB[0], drafted.confidence_logits_AB[row])
    assert len(set(drafted.tokens_AB.flatten().tolist())) > 1


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": 256}, "mask_token_id"),
        ({"aux_layer_ids": ()}, "aux_layer_ids"),
        ({"aux_layer_ids": (1, 5)}, "aux_layer_ids"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens"),
        ({"num_heads": 3}, "num_heads"),
        ({"block_size": 1, "sample_from_anchor": False}, "block_size=1"),
        ({"causal": True}, "causal"),
        ({"sliding_window": 8}, "sliding_window"),
    ],
)
def test_a_draft_that_cannot_be_served_is_refused(change: dict[str, object], key: str) -> None:
    with pytest.raises(ValueError, match=f"draft.{key}"):
        check_draft(replace(DRAFT, **change), SHAPE)


def test_init_is_a_function_of_the_seed_and_leaves_the_global_generator(target: Path) -> None:
    before = torch.random.get_rng_state()
    first, again = (build_draft(DRAFT, SHAPE, target, verifier="x", seed=3).state_dict() for _ in range(2))
    other = build_draft(DRAFT, SHAPE, target, verifier="x", seed=4).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])


def test_anchors_are_supervised_pairs_and_repeatable() -> None:
    mask = np.zeros(40, dtype=bool)
    mask[10:30] = True
    mask[20] = False
    drawn = sample_anchors(mask, 6, key=(0, 1, 2, "a"))
    assert drawn.tolist() == sample_anchors(mask, 6, key=(0, 1, 2, "a")).tolist()
    assert drawn.tolist() != sample_anchors(mask, 6, key=(0, 1, 3, "a")).tolist()
    assert len(set(drawn)) == 6
    assert all(mask[p] and mask[p + 1] for p in drawn)
    assert sample_anchors(mask, 100, key=(0,)).tolist() == [*range(10, 19), *range(21, 29)]
    assert sample_anchors(np.zeros(5, bool), 4, key=(0,)).size == 0
    often = np.bincount(np.concatenate([sample_anchors(mask, 6, key=(i,)) for i in range(600)]), minlength=40)
    assert often[[*range(10, 19), *range(21, 29)]].min() > 150  # 600 * 6 / 17 = 212 expected of each


def test_labels_stop_at_unsupervised_tokens_and_at_the_document_end(target: Path) -> None:
    batch = packed(target, random_sequences(2, 12))
    batch.loss_mask_T[7] = False
    labels = label_mask(batch, torch.tensor([4, 8, 9, 20]), 4)
    assert labels.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]


def test_export_is_read_back_by_us_and_by_speculators(target: Path, tmp_path: Path) -> None:
    model = make(DRAFT, target)
    model.config.speculators_config.verifier.name_or_path = str(target)  # speculators' loader needs to find it
    export_draft(model, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert layer["rope_parameters"] == {"rope_theta": 1e6, "rope_type": "default"}
    assert (layer["head_dim"], layer["max_position_embeddings"], config["sample_from_anchor"]) == (32, 512, True)
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["Qwen3ForCausalLM"],
    }

    loaded = load_draft(tmp_path / "draft", target)
    theirs = SpeculatorModel.from_pretrained(str(tmp_path / "draft"), dtype=torch.float32)
    batch, anchors = packed(target, random_sequences(1, 20)), torch.tensor([5, 10])
    ours = block_forward(loaded, batch, anchors)
    theirs.config.transformer_layer_config._attn_implementation = NAMES["sdpa"]
    assert torch.equal(ours.logits_ABW, block_forward(theirs.eval(), batch, anchors).logits_ABW)
    assert torch.equal(loaded.confidence_head.proj.weight, model.confidence_head.proj.weight)  # fp32 in the file
    positions = torch.arange(32)[None]
    for mine, other in zip(
        model.rotary_emb(batch.final_TD, positions), theirs.rotary_emb(batch.final_TD, positions), strict=True
    ):
        assert torch.equal(mine, other)


def test_incomplete_or_poisoned_checkpoints_are_refused(target: Path, tmp_path: Path) -> None:
    model = make(DRAFT, target)
    export_draft(model, tmp_path / "draft")
    file = tmp_path / "draft" / "model.safetensors"
    whole = load_file(file)
    save_file({name: tensor for name, tensor in whole.items() if "confidence" not in name}, file)
    with pytest.raises(ValueError, match=r"2 tensors differ.*confidence_head"):
        check_checkpoint(tmp_path / "draft")
    save_file({**whole, "fc.weight": whole["fc.weight"][:, :3].contiguous()}, file)
    with pytest.raises(ValueError, match=r"fc\.weight: expected"):
        load_draft(tmp_path / "draft", target)
    with torch.no_grad():
        model.fc.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"fc\.weight holds values that are not finite"):
        export_draft(model, tmp_path / "draft")


def test_confidence_map_is_folded_once(target: Path, tmp_path: Path) -> None:
    export_draft(make(DRAFT, target), tmp_path / "draft")
    scale_confidence(tmp_path / "draft", tmp_path / "scaled", 0.5, -0.25)
    batch, anchors = packed(target, random_sequences(1, 20)), torch.tensor([5, 10])
    before = block_forward(load_draft(tmp_path / "draft", target), batch, anchors)
    after = block_forward(load_draft(tmp_path / "scaled", target), batch, anchors)
    torch.testing.assert_close(after.confidence_AB, 0.5 * before.confidence_AB - 0.25)
    assert torch.equal(after.logits_ABW, before.logits_ABW)

    mark = json.loads((tmp_path / "scaled" / "config.json").read_text())["dspark_calibration"]
    assert mark == {"scale": 0.5, "shift": -0.25, "head_digest": head_digest(tmp_path / "scaled")}
    assert head_digest(tmp_path / "scaled") != head_digest(tmp_path / "draft")
    with pytest.raises(ValueError, match="calibrated already"):
        scale_confidence(tmp_path / "scaled", tmp_path / "twice", 0.5, 0.0)


def test_naming_the_target_changes_nothing_else(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    export_draft(make(DRAFT, target), folder)
    before, weights = json.loads((folder / "config.json").read_text()), (folder / "model.safetensors").read_bytes()
    name_target(folder, "a-name")
    after = json.loads((folder / "config.json").read_text())
    assert after["speculators_config"]["verifier"].pop("name_or_path") == "a-name"
    assert before["speculators_config"]["verifier"].pop("name_or_path") == "org/target"
    assert after == before
    assert (folder / "model.safetensors").read_bytes() == weights
    load_draft(folder, target)


def test_calibration_and_digest_need_a_confidence_head(target: Path, tmp_path: Path) -> None:
    export_draft(make(replace(DRAFT, confidence_head=False), target), tmp_path / "draft")
    with pytest.raises(ValueError, match="expected a confidence head"):
        scale_confidence(tmp_path / "draft", tmp_path / "out", 1.0, 0.0)
    with pytest.raises(ValueError, match="expected a confidence head"):
        head_digest(tmp_path / "draft")
