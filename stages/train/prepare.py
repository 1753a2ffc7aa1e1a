"""How layers are run: which attention, in bf16, twice to save memory, compiled. What they hold stays fp32."""

from __future__ import annotations

from functools import partial

import torch
from speculators.models.dspark import DSparkDraftModel
from torch.utils.checkpoint import checkpoint

from stages.draft.model import use_attention
from stages.train.config import TrainConfig


def prepare(model: DSparkDraftModel, config: TrainConfig, device: torch.device) -> None:
    """Change how `model` computes as `config` says; what it trains, names and exports stays the same.

    In bf16 run the matrix products of the layers, of the context's projection, and of both LM heads and the
    Markov head (`vocab_loss.py` computes in the dtype of the frozen parts), as they do when vLLM serves
    target and draft; norms, the residual stream, the confidence head (which vLLM runs in fp32) and all that
    follows the products stay fp32. Of a reduced vocabulary the LM head is exported, so it keeps its bits.
    """
    use_attention(model, config.attention)
    if config.precision == "bfloat16":
        for module in (model.fc, *model.layers):
            module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
        for frozen in (model.embed_tokens, *(() if model.use_draft_vocab else (model.lm_head,))):
            frozen.to(torch.bfloat16)
    for layer in model.layers:
        if config.activation_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if config.compile:
            layer.compile(dynamic=True)  # documents differ in length


def allow_tf32(config: TrainConfig) -> None:
    """Let a GPU that computes in bf16 take TF32 for the products that stay fp32; of this whole process."""
    if config.gpus_per_worker and config.precision == "bfloat16":
        torch.set_float32_matmul_precision("high")
