"""How layers are run: in bf16, computed twice to save memory, compiled. What they hold stays fp32."""

from __future__ import annotations

from functools import partial

import torch
from speculators.models.dspark import DSparkDraftModel
from torch.utils.checkpoint import checkpoint

from stages.train.config import TrainConfig


def prepare(model: DSparkDraftModel, config: TrainConfig, device: torch.device) -> None:
    """Change how `model` computes as `config` says; its parameters, names and export stay the same.

    In bf16 run the matrix products of the layers, of the context's projection, and of the LM and Markov
    heads, as they will when vLLM serves the draft; norms, the residual stream, the confidence head (which
    vLLM runs in fp32), the target's own distribution and the loss stay fp32.
    """
    if config.precision == "bfloat16":
        for module in (model.fc, *model.layers, model.lm_head, model.markov_head.markov_w2):
            module.forward = torch.autocast(device.type, torch.bfloat16)(module.forward)
    for layer in model.layers:
        if config.activation_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        if config.compile:
            layer.compile(dynamic=True)  # documents differ in length
