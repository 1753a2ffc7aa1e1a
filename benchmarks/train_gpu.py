"""Training on one GPU as `conf=qwen3_8b` and `kimi_k3` do it: bf16, flex attention, torch.compile.

    python -m benchmarks.train_gpu            # one GPU of 80 GB or more, under 8 minutes
    python -m benchmarks.train_gpu --tiny     # the same program on a CPU in seconds: fp32 by document, no compiler
    benchmarks/train_gpu.sh                   # for a machine without a network: carries the packages as wheels

A draft of 5 layers and hidden size 2,048 with the whole of a vocabulary of 151,936 learns the same few
sequences again and again; states are random. First the loss and gradients of one batch are compared with
those of dense attention in fp32 without a compiler; then it trains. Prints one JSON object: tokens/s, MFU,
peak memory beside what the memory plan says, and the loss, which must have fallen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from speculators.models.dspark import DSparkDraftModel

from benchmarks.own import packed, stepper
from stages.corpus import TokenSequence
from stages.draft.batch import PackedBatch
from stages.draft.config import DraftConfig
from stages.draft.loss import LossWeights, draft_loss, metrics
from stages.draft.memory import plan_memory
from stages.draft.model import construct, fill_frozen, shared_head, speculators_config, trainable
from stages.hidden_states.wire import HiddenBatch
from stages.target import TargetHead, TargetShape
from stages.train.config import TrainConfig
from stages.train.metering import Meter
from stages.train.prepare import allow_tf32, prepare

WEIGHTS = LossWeights(ce=0.1, l1=0.9, confidence=1.0, decay_gamma=4.0)
# How far bf16 products may take a gradient from fp32's: the cosine of the angle between both, over all weights.
MIN_COSINE = 0.995
MAX_LOSS_DIFFERENCE = 0.02  # relative


@dataclass(frozen=True)
class Size:
    shape: TargetShape
    draft: DraftConfig
    config: TrainConfig
    sequences: int
    length: int
    steps: int


BIG = Size(
    TargetShape(num_layers=36, hidden_size=2048, vocab_size=151_936, max_positions=40_960),
    DraftConfig(
        num_layers=5, num_heads=16, num_kv_heads=8, head_dim=128, aux_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151_669,
    ),
    TrainConfig(
        anchors_per_sequence=512, lr=3e-4, precision="bfloat16", attention="flex", compile=True, gpus_per_worker=1
    ),
    sequences=4, length=4096, steps=300,
)  # fmt: skip
TINY = Size(
    TargetShape(num_layers=4, hidden_size=64, vocab_size=512, max_positions=512),
    DraftConfig(
        num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=128, aux_layer_ids=(1, 3),
        mask_token_id=511, markov_rank=16, max_positions=512,
    ),
    TrainConfig(anchors_per_sequence=16, lr=3e-3),
    sequences=3, length=64, steps=20,
)  # fmt: skip


def problem(size: Size) -> tuple[list[HiddenBatch], TargetHead]:
    """Batches of one sequence each, and the target's ends: the same for the same seed."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    width, mask = size.shape.hidden_size, np.arange(size.length) >= size.length // 4
    batches = []
    for i in range(size.sequences):
        ids = rng.integers(0, size.draft.mask_token_id, size.length).astype(np.int32)
        states = torch.randn(size.length, len(size.draft.aux_layer_ids) + 1, width, generator=generator).bfloat16()
        batches.append(HiddenBatch((TokenSequence(f"s{i}", "", ids, mask),), states))
    head = 0.05 * torch.randn(size.shape.vocab_size, width, generator=generator)
    return batches, TargetHead(head, torch.ones(width), head, 1e-5)


def draft(size: Size, head: TargetHead, config: TrainConfig, device: torch.device) -> DSparkDraftModel:
    """A new draft, always with the same weights."""
    torch.manual_seed(0)
    model = construct(speculators_config(size.draft, size.shape, verifier=None, architectures=[]))
    fill_frozen(model, head)
    model = model.to(device).train()
    prepare(model, config, device)
    return model


def loss_and_gradient(
    size: Size, batch: HiddenBatch, head: TargetHead, config: TrainConfig, device: torch.device
) -> tuple[float, torch.Tensor]:
    """Of a few blocks of one sequence; gradients of all weights as one vector."""
    model = draft(size, head, config, device)
    anchors = torch.arange(size.length // 4, size.length - 8, max(1, size.length // 64), device=device)
    sums = draft_loss(model, shared_head(model, head), PackedBatch.from_hidden(batch).to(device), anchors, WEIGHTS)
    loss = sums.total / sums.weight
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in trainable(model).values() if p.grad is not None])
    return float(loss.detach()), flat.cpu()


def parity(size: Size, batch: HiddenBatch, head: TargetHead, device: torch.device) -> dict[str, float]:
    """How far the fast way is from the plain one. Raises SystemExit when it is too far."""
    torch.set_float32_matmul_precision("highest")
    plain = replace(size.config, precision="float32", attention="eager", compile=False)
    loss, gradient = loss_and_gradient(size, batch, head, plain, device)
    allow_tf32(size.config)
    fast_loss, fast = loss_and_gradient(size, batch, head, size.config, device)
    cosine = float(torch.nn.functional.cosine_similarity(gradient.double(), fast.double(), dim=0))
    found = {"loss_plain": loss, "loss_fast": fast_loss, "gradient_cosine": cosine}
    if cosine < MIN_COSINE or abs(fast_loss - loss) > MAX_LOSS_DIFFERENCE * loss:
        raise SystemExit(
            f"parity: expected a cosine of {MIN_COSINE} and {MAX_LOSS_DIFFERENCE:.0%} of loss, found {found}"
        )
    return found


def train(size: Size, limit_s: float, device: torch.device) -> dict[str, Any]:
    """Parity, then steps until `size.steps` or the end of the time."""
    started = time.monotonic()
    batches, head = problem(size)
    told = parity(size, batches[0], head, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = draft(size, head, size.config, device)
    step = stepper(model, head, WEIGHTS, size.config, device)
    batches = packed(batches, size.config.micro_batch_tokens)
    sizes = {name: parameter.numel() for name, parameter in trainable(model).items()}
    meter, rows = Meter(device, 1, sizes, size.draft.block_size), []
    for number in range(size.steps):
        before = time.monotonic()
        taken = step(batches, number)  # ends with numbers on the CPU, so the device is done
        rows.append({**meter.step(taken, time.monotonic() - before), **metrics(taken.sums, WEIGHTS)})
        if time.monotonic() - started > limit_s:
            break
    warm = rows[len(rows) // 4 :]  # the first ones compile
    together = min(size.sequences, max(1, size.config.micro_batch_tokens // size.length))
    plan = plan_memory(
        size.draft,
        size.shape,
        tokens=together * size.length,
        anchors=together * size.config.anchors_per_sequence,
        dtype_bytes=2 if size.config.precision == "bfloat16" else 4,
        documents=0 if size.config.attention == "flex" else together,
    )
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "trainable_parameters": sum(sizes.values()),
        "parity": told,
        "steps": len(rows),
        "tok_per_s": round(median(row["tok_per_s"] for row in warm), 1),
        "step_s": round(median(row["step_s"] for row in warm), 4),
        "mfu": round(median(row["mfu"] for row in warm), 4) if "mfu" in warm[0] else None,
        "peak_bytes": rows[-1].get("peak_gpu_bytes", rows[-1].get("peak_rss_bytes")),
        "planned_bytes": plan.total,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small draft on the CPU, to see that the program runs")
    parser.add_argument("--limit_s", type=float, default=360.0, help="no step begins after so many seconds")
    args = parser.parse_args()
    device = torch.device("cpu" if args.tiny else "cuda:0")
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("gloo" if args.tiny else "nccl", init_method=store, rank=0, world_size=1)
        try:
            told = train(TINY if args.tiny else BIG, args.limit_s, device)
        finally:
            dist.destroy_process_group()
    print(json.dumps(told, indent=2))
    if not told["last_loss"] < told["first_loss"]:
        raise SystemExit("the loss did not fall")


if __name__ == "__main__":
    main()
