"""Rotary tables are the same before export, after import, in speculators and in vLLM; others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from speculators import SpeculatorModel

from stages.draft.attention import Attention
from stages.draft.checkpoint import export_draft, load_draft
from stages.draft.config import check_draft
from stages.draft.model import backbone, build_draft, use_attention
from stages.draft.rope import rope_parameters
from tests.stages.draft_helpers import DRAFT, SHAPE, SLIDING, packed, random_sequences, write_target

YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rope_type": "linear", "factor": 2},
    "llama3": LLAMA3,
    "yarn": YARN,
    "partial": {"partial_rotary_factor": 0.5},
    "partial_yarn": {**YARN, "partial_rotary_factor": 0.25, "rope_theta": 5_000.0},
    "nested": {"full_attention": LLAMA3, "sliding_attention": {"rope_type": "default"}},
    "yarn_options": {**YARN, "attention_factor": 1.2, "beta_fast": 24, "beta_slow": 2, "truncate": False},
}
KINDS = pytest.mark.parametrize("given", SCALED.values(), ids=SCALED)


def tables(model: Any) -> torch.Tensor:
    """Cos, then sin, of all positions [512, 2 E]."""
    return torch.cat(model.rotary_emb(torch.zeros(1), torch.arange(DRAFT.max_positions)[None]), dim=-1)[0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@KINDS
def test_tables_survive_export_and_import(given: dict[str, Any], target: Path, tmp_path: Path) -> None:
    config = replace(DRAFT, rope_theta=20_000.0, rope_parameters=given)
    model = build_draft(config, SHAPE, target, verifier=str(target), seed=0)
    export_draft(model, tmp_path / "draft")
    assert torch.equal(tables(model), tables(load_draft(tmp_path / "draft", target)))
    if "partial_rotary_factor" not in given:  # of which speculators knows nothing
        assert torch.equal(tables(model), tables(SpeculatorModel.from_pretrained(str(tmp_path / "draft"))))
    plain = tables(build_draft(replace(config, rope_parameters={}), SHAPE, target, verifier="x", seed=0))
    assert torch.equal(tables(model), plain) == (not given)
    assert tables(model).shape[1] == 2 * DRAFT.head_dim * given.get("partial_rotary_factor", 1)


def test_layers_by_type_are_those_of_the_draft() -> None:
    by_type = {"full_attention": LLAMA3, "sliding_attention": {"rope_type": "linear", "factor": 2}}
    sliding = replace(SLIDING, rope_parameters=by_type)
    assert rope_parameters(sliding) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    assert rope_parameters(replace(DRAFT, rope_parameters=by_type))["rope_type"] == "llama3"


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex"])
def test_a_part_of_a_head_is_rotated_as_by_hand(attention: Attention, target: Path) -> None:
    """Frequencies of 0 in the other part of a whole head are what is not rotated, once the pairs are put together."""
    batch, anchors = packed(target, random_sequences(2, 20)), torch.tensor([5, 9, 30])
    part = build_draft(
        replace(DRAFT, rope_parameters={"partial_rotary_factor": 0.5}), SHAPE, target, verifier="x", seed=0
    )
    whole = build_draft(DRAFT, SHAPE, target, verifier="x", seed=0)
    half = DRAFT.head_dim // 2
    still = part.rotary_emb.inv_freq.new_zeros(half // 2)
    whole.rotary_emb.inv_freq = torch.cat([part.rotary_emb.inv_freq, still])
    # dimension pairs of a part are (i, i + E/4), those of a whole head (i, i + E/2)
    order = torch.arange(DRAFT.head_dim).view(2, 2, half // 2).transpose(0, 1).flatten()
    for mine, theirs in zip(whole.layers, part.layers, strict=True):
        for name in ("q_proj", "k_proj"):
            weight = getattr(theirs.self_attn, name).weight.data.unflatten(0, (-1, DRAFT.head_dim))
            getattr(mine.self_attn, name).weight.data = weight[:, order].flatten(0, 1)
    for model in (part, whole):
        use_attention(model, attention)
    with torch.no_grad():
        torch.testing.assert_close(backbone(part, batch, anchors), backbone(whole, batch, anchors))
        plain = build_draft(DRAFT, SHAPE, target, verifier="x", seed=0)
        assert not torch.allclose(backbone(part, batch, anchors), backbone(plain, batch, anchors), atol=1e-4)


@pytest.mark.e2e
def test_tables_are_those_of_vllm(target: Path, tmp_path: Path) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    for name, given in SCALED.items():
        folder = tmp_path / name
        model = build_draft(replace(DRAFT, rope_parameters=given), SHAPE, target, verifier="x", seed=0)
        export_draft(model, folder)
        layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
        with set_current_vllm_config(VllmConfig()):
            rope = get_rope(
                layer["head_dim"],
                layer["max_position_embeddings"],
                rope_parameters=layer["rope_parameters"],
                dtype=torch.float32,
            )
        cos, sin = rope.cos_sin_cache[: DRAFT.max_positions].chunk(2, dim=-1)
        assert len(cos) == DRAFT.max_positions, name
        # angles reach 511, whose last bit is 3e-5
        assert rope.rotary_dim == 2 * cos.shape[1] == model.rotary_emb.inv_freq.numel() * 2, name
        torch.testing.assert_close(tables(model), torch.cat([cos, cos, sin, sin], dim=-1), rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4: expected an even number .* found 12.8"),
        ({"sliding_attention": {"rope_type": "default"}}, "has sliding_attention: expected an entry for the draft's"),
        ({"sliding_attention": {}, "rope_type": "default"}, "by layer type or one for all, found both"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4': expected a number"),
        ({"rope_type": "longrope"}, "rope_type=longrope: expected one of default, linear, llama3, yarn"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type=dynamic: expected one of"),
        ({"rope_type": "yarn", "factor": 2.0}, "rope_type=yarn needs original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "rope_type=linear does not read beta_fast"),
        ({"factor": 2.0}, "rope_type=default does not read factor"),
        ({"rope_type": "linear", "factor": "2x"}, "factor='2x': expected a number"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5: expected a number from 1 to"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan: expected a number"),
        ({**YARN, "factor": float("inf")}, "factor=inf: expected a number"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings=0: expected a number"),
        ({"rope_theta": 1}, "rope_theta=1: expected a number from 1.001"),
        ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\]: expected one of"),
        ({"full_attention": 3}, "rope_type=3: expected one of"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor=4.0: expected less than high_freq_factor=4.0"),
        ({**YARN, "factor": 3.5}, r"draft.max_positions=512: vLLM's yarn table has 448 positions"),
    ],
)
def test_positions_that_cannot_be_served_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_draft(replace(DRAFT, rope_parameters=given), SHAPE)


def test_an_odd_head_is_refused_by_its_own_key() -> None:
    with pytest.raises(ValueError, match=r"draft\.head_dim=33: expected an even number"):
        check_draft(replace(DRAFT, head_dim=33), SHAPE)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=1\.0: expected an even number"):
        check_draft(replace(DRAFT, head_dim=33, rope_parameters={"partial_rotary_factor": 1.0}), SHAPE)
