"""Random targets that vLLM and transformers run, small enough for a test."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from stages.artifacts import Workspace
from stages.target import Target, read_folder

# of both tiny targets
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def build_tiny_qwen3(folder: Path) -> None:
    """A random Qwen3 of three layers with a word-level tokenizer, in bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder)


def build_tiny_hybrid(folder: Path) -> None:
    """As `build_tiny_qwen3`, but two of the three layers see 24 tokens: vLLM keeps several caches of unlike blocks.

    transformers runs it as a Ministral, vLLM as a Llama, which also heeds `layer_types`. Weights are small, since
    neither norms its queries: attention that picks single tokens picks others after rounding.
    """
    from transformers import MinistralConfig, MinistralForCausalLM

    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = MinistralConfig(**SHAPE | {"initializer_range": 0.15}, sliding_window=24, layer_types=layers)
    MinistralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    told |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(told))
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(256)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t0").save_pretrained(folder)


def tiny_target(folder: Path) -> Target:
    """A Target artifact beside a freshly built `build_tiny_hybrid`."""
    build_tiny_hybrid(folder / "model")
    workspace = Workspace(final=folder / "target", identity="tiny-hybrid")
    workspace.path.mkdir()
    facts = {
        "built": False,
        "model": str(folder / "model"),
        "revision": None,
        "trust_remote_code": False,
        "shape": dataclasses.asdict(read_folder(folder / "model")),
    }
    return workspace.commit(Target, counts={}, metrics={}, facts=facts)
