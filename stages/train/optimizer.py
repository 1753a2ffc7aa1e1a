"""Gradients in one buffer, AdamW or Muon over them, and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from stages.train.checkpoint import Saved
from stages.train.config import TrainConfig

# Elements of one all-reduce: 256 MiB of fp32. Fixed, so that sums run in the same order after a resume;
# DDP rebuilds its buckets after the first step of every process, which changes low bits from three ranks on.
REDUCE_ELEMENTS = 1 << 26


def lr_factor(step: int, total_steps: int, warmup_share: float, schedule: str) -> float:
    """Learning rate of a 0-based step relative to its peak: linear warm-up, then down to 0 (or constant)."""
    warmup = round(warmup_share * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    done = (step - warmup) / max(1, total_steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0 - done


class Gradients:
    """The gradients of `parameters` as views of one flat fp32 buffer, summed over ranks."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.flat = torch.zeros(sum(sizes), device=next(iter(parameters.values())).device)
        self._parts = self.flat.split(sizes)
        for parameter, part in zip(parameters.values(), self._parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def clear(self) -> None:
        self.flat.zero_()

    def reduce(self, denominator: float) -> float:
        """Sum over all ranks, divide, and return the global norm, equal on every rank.

        Parameters without a gradient do not move the norm by a bit: a head that counts 0 is no head.
        """
        for part in self.flat.split(REDUCE_ELEMENTS):
            dist.all_reduce(part)
        if denominator > 0:
            self.flat.div_(denominator)
        norms = torch.stack([part.norm() for part in self._parts]).tolist()
        return math.sqrt(math.fsum(norm * norm for norm in norms))

    def clip(self, norm: float, limit: float) -> None:
        """Scale so that a `norm` above `limit` becomes `limit`."""
        if norm > limit:
            self.flat.mul_(limit / norm)


class Optimizer:
    """AdamW, or Muon for the matrices of the draft's layers with AdamW for the rest. State is fp32."""

    def __init__(self, parameters: dict[str, nn.Parameter], config: TrainConfig) -> None:
        use_muon = config.optimizer == "muon"
        muon = {n: p for n, p in parameters.items() if use_muon and n.startswith("layers.") and p.ndim == 2}
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        rest = [p for n, p in parameters.items() if n not in muon]
        fused = rest[0].device.type == "cpu"  # one pass over memory, where torch's default there makes ten
        self._parts: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(rest, lr=config.lr, weight_decay=config.weight_decay, fused=fused), config.lr)
        ]
        if muon:
            lr = config.lr * config.muon_lr_factor
            self._parts.append((torch.optim.Muon(list(muon.values()), lr=lr, weight_decay=config.weight_decay), lr))

    def step(self, factor: float) -> None:
        """One update with every learning rate at `factor` of its peak."""
        for optimizer, peak in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state by `<parameter>|<key>`, Adam's step counts among it."""
        return {
            f"{self._names[parameter]}|{key}": value.detach()
            for optimizer, _ in self._parts
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        }

    def load(self, saved: Saved) -> None:
        """Take the state of a checkpoint, whoever wrote it. Raises ValueError when some is missing."""
        by_name = {name: parameter for parameter, name in self._names.items()}
        owner = {p: o for o, _ in self._parts for group in o.param_groups for p in group["params"]}
        labels = sorted(name for name in saved.names if "|" in name)
        if missing := by_name.keys() - {label.split("|")[0] for label in labels} if labels else set():
            raise ValueError(f"{saved.path}: {min(missing)}: expected its optimizer state, found none")
        for label in labels:
            name, key = label.split("|")
            if name not in by_name:
                raise ValueError(f"{saved.path}: {label}: expected state of a trained parameter, found another's")
            parameter = by_name[name]
            if key == "step":  # Adam's; it stays on the CPU, as torch keeps it
                owner[parameter].state[parameter][key] = saved.scalar(label)
            else:
                owner[parameter].state[parameter][key] = value = torch.empty_like(parameter, requires_grad=False)
                saved.fill(label, value)
