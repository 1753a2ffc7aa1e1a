"""Rotary tables are the same before export, after import, in speculators and in vLLM; others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from speculators import SpeculatorModel

from stages.draft.checkpoint import export_draft, load_draft
from stages.draft.config import check_draft
from stages.draft.model import build_draft
from tests.stages.draft_helpers import DRAFT, SHAPE, write_target

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
    assert torch.equal(tables(model), tables(SpeculatorModel.from_pretrained(str(tmp_path / "draft"))))
    plain = tables(build_draft(replace(config, rope_parameters={}), SHAPE, target, verifier="x", seed=0))
    assert torch.equal(tables(model), plain) == (not given)


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
        torch.testing.assert_close(tables(model), torch.cat([cos, cos, sin, sin], dim=-1), rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: speculators' layers rotate whole heads"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention: vLLM takes one entry for all layers"),
        ({"rope_theta": 1e4}, "rope_theta: give it as draft.rope_theta"),
        ({"rope_type": "longrope"}, "rope_type=longrope: expected one of default, linear, llama3, yarn"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type=dynamic: expected one of"),
        ({"rope_type": "yarn", "factor": 2.0}, "rope_type=yarn needs original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "rope_type=linear does not read beta_fast"),
        ({"factor": 2.0}, "rope_type=default does not read factor"),
        ({"rope_type": "linear", "factor": "2x"}, "factor='2x': expected a number"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5: expected at least 1"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor=4.0: expected less than high_freq_factor=4.0"),
        ({**YARN, "factor": 3.5}, r"draft.max_positions=512: vLLM's yarn table has 448 positions"),
    ],
)
def test_positions_that_cannot_be_served_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_draft(replace(DRAFT, rope_parameters=given), SHAPE)
