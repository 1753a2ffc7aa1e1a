"""Drafts that start from others, and layers that run in bf16 or twice."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

from stages.draft.checkpoint import export_draft
from stages.draft.loss import LossSums, LossWeights, draft_loss
from stages.draft.model import FROZEN, build_draft, shared_head, speculators_config, trainable
from stages.draft.vocab_loss import VocabHead
from stages.target import load_head
from stages.train.config import TrainConfig, check_train
from stages.train.metering import Meter, model_flop, peak_flop_per_s
from stages.train.prepare import prepare
from stages.train.step import Pass
from stages.train.warm_start import check_init, warm_start
from tests.stages.draft_helpers import CONFIG, DRAFT, SHAPE, packed, random_sequences, write_target
from tests.stages.train_helpers import WEIGHTS, cut_one, losses, result, rows, run_one, usual_job, weights

HEADS = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} | {
    f"confidence_head.proj.{name}" for name in ("weight", "bias")
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def dspark(target: Path) -> Path:
    """An exported draft of another seed."""
    folder = target.parent / "trained"
    export_draft(build_draft(DRAFT, SHAPE, target, verifier="x", seed=9), folder)
    return folder


def started(target: Path, folder: Path, vocab_W: np.ndarray | None = None, **changes: object):
    """A new draft, what it was before, and what became of it."""
    model = build_draft(replace(DRAFT, **changes), SHAPE, target, verifier="x", seed=0, vocab_W=vocab_W)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return model, before, warm_start(model, trainable(model), TrainConfig(init_from=str(folder)))


def test_a_draft_starts_from_another_with_all_its_weights(target: Path, dspark: Path) -> None:
    model, before, start = started(target, dspark)
    parameters, stored = trainable(model), load_file(dspark / "model.safetensors")
    assert set(start.taken) == set(stored) == set(parameters)
    assert all(torch.equal(parameters[name], tensor.float()) for name, tensor in stored.items())
    assert (start.fresh, start.left, start.partly, start.differs, start.source) == ((), {}, {}, {}, "trained")
    assert start.counts()["init_parameters_taken"] == sum(parameter.numel() for parameter in parameters.values())
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])


def test_a_dflash_checkpoint_gives_its_layers_and_nothing_of_the_target(target: Path, tmp_path: Path) -> None:
    spark = speculators_config(DRAFT, SHAPE, verifier=None, architectures=["Qwen3ForCausalLM"])
    layers = spark.transformer_layer_config
    layers._attn_implementation = "sdpa"
    flash = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=SHAPE.vocab_size,
        block_size=8,
        aux_hidden_state_layer_ids=[1, 2],
        mask_token_id=255,
        speculators_config=spark.speculators_config,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = DFlashDraftModel(flash)
    tensors = {name: torch.nan_to_num(tensor).clone() for name, tensor in made.state_dict().items()}
    assert set(tensors) & set(FROZEN)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 8, "aux_hidden_state_layer_ids": [1, 2]}))

    model, before, start = started(target, tmp_path)
    assert set(start.fresh) == HEADS
    assert set(start.taken) == set(trainable(model)) - HEADS
    assert set(start.left) == set(tensors) - set(start.taken)
    assert set(start.left.values()) == {"the target's own is used"}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name] if name in start.taken else before[name]), name
    assert start.differs == {"block_size": [8, 4], "aux_hidden_state_layer_ids": [[1, 2], [1, 3]]}


def test_what_does_not_fit_is_left_by_name(target: Path, dspark: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, _, start = started(target, dspark, markov_rank=8, num_layers=1)
    assert start.left["markov_head.markov_w1.weight"] == "shape (256, 16), the draft's is (256, 8)"
    assert start.left["layers.1.mlp.up_proj.weight"] == "the draft has no such weight"
    assert set(start.fresh) == HEADS - {"confidence_head.proj.bias"}
    assert "3 tensors start fresh: markov_head.markov_w1.weight" in caplog.text


def test_rows_of_a_vocabulary_go_by_token(target: Path, dspark: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the same size, but with other tokens: by place every row would mean something else."""
    rows = "markov_head.markov_w2.weight"
    ids, others = np.arange(40), np.arange(30, 70)
    source = build_draft(replace(DRAFT, vocab_size=40), SHAPE, target, verifier="x", seed=9, vocab_W=ids)
    export_draft(source, target.parent / "reduced")
    stored = load_file(target.parent / "reduced" / "model.safetensors")[rows].float()

    model, before, start = started(target, target.parent / "reduced", vocab_W=others, vocab_size=40)
    assert start.partly == {rows: "10 of 40 rows, those of tokens that both vocabularies have"}
    found = trainable(model)[rows]
    assert torch.equal(found[:10], stored[30:])
    assert torch.equal(found[10:], before[rows][10:])
    assert "10 of 40 rows" in caplog.text

    model, _, start = started(target, target.parent / "reduced", vocab_W=ids, vocab_size=40)
    assert start.partly == {}
    assert torch.equal(trainable(model)[rows], stored)
    full = load_file(dspark / "model.safetensors")[rows].float()  # of a draft of the whole vocabulary
    model, _, start = started(target, dspark, vocab_W=others, vocab_size=40)
    assert torch.equal(trainable(model)[rows], full[30:70])
    assert start.counts()["init_parameters_taken"] == sum(p.numel() for p in trainable(model).values())


def test_a_start_without_sense_is_refused(target: Path, dspark: Path, tmp_path: Path) -> None:
    stored = load_file(dspark / "model.safetensors")
    save_file({"fc.weight": stored["fc.weight"][:1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"none that fits \(fc\.weight: shape \(1, 128\), the draft's is \(64, 128\)\)"
    ):
        started(target, tmp_path)
    stored["fc.weight"][0, 0] = torch.nan
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight holds values that are not finite"):
        started(target, tmp_path)
    for name, problem in (("gone/or/never", "existing folder or a Hub id"), ("a/b", "init_revision: must be set")):
        with pytest.raises(ValueError, match=problem):
            check_init(TrainConfig(init_from=name))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="safetensors files, found none"):
        check_init(TrainConfig(init_from=str(tmp_path / "empty")))


def test_only_vanilla_markov_heads_are_started_from(target: Path, dspark: Path, tmp_path: Path) -> None:
    """Their matrices have the same names and shapes, and mean nothing without the rest of the head."""
    told = json.loads((dspark / "config.json").read_text())
    assert told["markov_head_type"] == "vanilla"
    for kind in ("gated", "rnn"):
        shutil.copytree(dspark, tmp_path / kind)
        (tmp_path / kind / "config.json").write_text(json.dumps(told | {"markov_head_type": kind}))
        problem = rf"train\.init_from=.*{kind}: expected markov_head_type=vanilla in its config\.json, found {kind}"
        with pytest.raises(ValueError, match=problem):
            check_init(TrainConfig(init_from=str(tmp_path / kind)))
        with pytest.raises(ValueError, match=problem):  # one of the Hub is seen when it is here
            started(target, tmp_path / kind)


def test_a_warm_run_says_so_also_after_a_restart(dspark: Path, tmp_path: Path) -> None:
    warm = usual_job(tmp_path / "warm", init_from=str(dspark), epochs=1)
    told = run_one(warm)
    assert told["facts"]["warm_start"]["source"] == "trained"
    assert told["counts"]["init_tensors_fresh"] == 0 < told["counts"]["init_tensors_taken"]
    fresh = usual_job(tmp_path / "fresh", epochs=1)
    assert "warm_start" not in run_one(fresh)["facts"]
    assert losses(fresh.out.path)[1] != losses(warm.out.path)[1]
    cut = usual_job(tmp_path / "cut", init_from=str(dspark), epochs=1)
    cut_one(cut, at=9)
    assert run_one(cut)["facts"] == told["facts"]
    assert weights(cut) == weights(warm)


def test_bf16_is_for_products_only(target: Path) -> None:
    model = build_draft(DRAFT, SHAPE, target, verifier="x", seed=0)
    prepare(model, TrainConfig(precision="bfloat16"), torch.device("cpu"))
    told: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        if not name.endswith(("rotary_emb", "self_attn")):  # which give pairs
            module.register_forward_hook(lambda _m, _i, output, name=name: told.update({name: output.dtype}))
    head, weights = shared_head(model, load_head(target)), LossWeights(0.1, 0.9, 1.0, 4.0)
    products = VocabHead.product
    with patch.object(VocabHead, "product", autospec=True, side_effect=products) as product:
        draft_loss(model, head, packed(target, random_sequences(1, 20)), torch.tensor([4, 9]), weights).total.backward()
    half = {name for name, dtype in told.items() if dtype == torch.bfloat16}
    assert half >= {"fc", "layers.1.mlp.up_proj", "layers.0.self_attn.q_proj", "embed_tokens"}
    assert half.isdisjoint({"layers.0", "layers.1", "norm", "hidden_norm", "confidence_head"})
    assert product.call_count == 3  # the target's, the draft's, the Markov head's
    assert head.lm_head_VD.dtype == torch.bfloat16
    assert {p.dtype for p in trainable(model).values()} == {torch.float32}
    assert {p.grad.dtype for p in trainable(model).values()} == {torch.float32}


def test_bf16_trains_like_fp32_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    half, full = (usual_job(tmp_path / kind, precision=kind, epochs=2) for kind in ("bfloat16", "float32"))
    for made in (half, full):
        run_one(made)
    assert losses(half.out.path) == pytest.approx(losses(full.out.path), rel=2e-2)
    assert losses(half.out.path) != losses(full.out.path)
    last = half.out.path / "checkpoints/step-00000006"
    assert all(t.dtype == torch.float32 for part in last.glob("part-*") for t in load_file(part).values())
    stored = load_file(half.out.path / WEIGHTS)
    assert {t.dtype for name, t in stored.items() if name not in HEADS} == {torch.bfloat16}
    cut = usual_job(tmp_path / "cut", precision="bfloat16", epochs=2)
    cut_one(cut, at=17)
    run_one(cut)
    assert weights(cut) == weights(half)
    assert result(cut)["counts"] == result(half)["counts"]

    twice = usual_job(tmp_path / "twice", precision="bfloat16", activation_checkpointing=True, epochs=2)
    run_one(twice)
    assert weights(twice) == weights(half)
    _, values = rows(full.out.path)[-2]
    assert values.keys() >= {"loss", "grad_norm", "lr", "step_s", "tok_per_s", "data_wait_s", "peak_rss_bytes"}
    assert values.keys() >= {"checkpoint_s", "checkpoint_write_s", "acceptance_length", "accept_rate_1"}
    assert 2**26 < values["peak_rss_bytes"] < 2**36


def test_machine_share_is_counted_against_the_right_peak() -> None:
    names = ("NVIDIA GB200", "NVIDIA B200", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "GeForce")
    assert [peak_flop_per_s(name) for name in names] == [2.5e15, 2.25e15, 756e12, 989.4e12, None]
    sizes = {"fc.weight": 100, "markov_head.markov_w1.weight": 70, "layers.0.self_attn.k_proj.weight": 10, "norm": 3}
    assert model_flop(sizes, slots=8, tokens=5) == 6 * ((10 + 3) * 8 + (100 + 10) * 5)


def test_flop_are_those_of_what_slots_and_context_meet(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    parameters = trainable(build_draft(DRAFT, SHAPE, target, verifier="x", seed=0))
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    # A layer of width 64: queries and output 4 x 32 wide, keys and values 2 x 32, an MLP of 128, norms.
    layer = 2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 32
    fc, markov, confidence, norms = 2 * 64 * 64, 2 * 256 * 16, 64 + 16 + 1, 2 * 64
    assert sum(sizes.values()) == 2 * layer + fc + markov + confidence + norms
    of_slots, of_context = 2 * layer + markov / 2 + confidence + norms, 2 * (2 * 64 * 64) + fc
    sums = replace(LossSums.zero(4, torch.device("cpu")), labels_B=torch.tensor([3.0, 2.0, 2.0, 1.0]))
    values = Meter(torch.device("cuda"), 2, sizes, 4).step(Pass(sums, 1, 20, 0.0, ()), 0.5)
    flop = 6 * (of_slots * 3 * 4 + of_context * 20)  # three blocks, twenty tokens
    assert values["mfu"] == pytest.approx(flop / 0.5 / 2 / 989.4e12)  # two GPUs


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"compile": True}, r"train\.compile=true: compiles for GPUs, found train\.gpus_per_worker=0"),
        ({"attention": "flex"}, r"train\.attention=flex: torch has no backward pass of it on a CPU"),
    ],
)
def test_a_config_that_cannot_work_is_refused(change: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_train(replace(CONFIG, **change))
