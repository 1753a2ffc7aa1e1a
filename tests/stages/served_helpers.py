"""Inputs of the stages that follow training: artifacts with given facts, and a target that vLLM serves on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from speculators.models.dspark import DSparkDraftModel
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages.artifacts import Artifact, Record
from stages.draft.model import build_draft
from stages.target import load_head
from tests.stages.draft_helpers import DRAFT, SHAPE

# 200 of 256 tokens, such that no draft of the tests hangs on two logits that bfloat16 takes for equal
VOCAB = np.sort(np.random.default_rng(13).permutation(255)[:200])
MARKOV_DRAFT = replace(DRAFT, markov_rank=SHAPE.hidden_size, vocab_size=len(VOCAB))

A = TypeVar("A", bound=Artifact)


def artifact(kind: type[A], path: Path, facts: dict[str, Any]) -> A:
    """An artifact in folder `path` whose record holds `facts`, without the stage that would make it."""
    path.mkdir(parents=True, exist_ok=True)
    counts = {"prompts_in": 3, "kept": 3}
    return kind(path, Record(kind.__name__, path.name, 1, {}, {}, counts, {}, facts, "test", "now", 0.0))


def target_facts(folder: Path) -> dict[str, Any]:
    """What the record of a local target says."""
    return {"built": False, "model": str(folder), "revision": None, "trust_remote_code": False, "shape": vars(SHAPE)}


def write_servable_target(folder: Path) -> Path:
    """A random Qwen3 of SHAPE with a head dimension that vLLM's CPU attention has."""
    config = Qwen3Config(
        vocab_size=SHAPE.vocab_size, hidden_size=SHAPE.hidden_size, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen3ForCausalLM(config)
        torch.nn.init.normal_(model.lm_head.weight, std=0.5)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def markov_draft(folder: Path) -> DSparkDraftModel:
    """A draft without training that is often right, so that rounds of every length occur.

    The random target's next token is nearly a function of the last token's embedding alone, and a Markov
    head of rank D can hold that function: its bias is the target's own head on the last token's embedding.
    Its vocabulary is reduced, so that serving it tests the tables between both vocabularies, too.
    """
    model = build_draft(MARKOV_DRAFT, SHAPE, folder, verifier=str(folder), seed=0, vocab_W=VOCAB)
    head = load_head(folder)
    embed_VD = head.embed_VD.float()
    normed_VD = embed_VD * (embed_VD.pow(2).mean(-1, keepdim=True) + head.norm_eps).rsqrt() * head.norm_D.float()
    with torch.no_grad():
        model.markov_head.markov_w1.weight.copy_(normed_VD)
        model.markov_head.markov_w2.weight.copy_(3.0 * head.lm_head_VD[VOCAB].float())
    return model
