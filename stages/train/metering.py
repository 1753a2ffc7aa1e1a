"""What a step cost: time, waiting, memory, and the share of the machine that was used."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from datetime import timedelta

import torch

from stages.train.step import Pass

# Dense bf16 peak, from NVIDIA's data sheets (half of a figure given "with sparsity"). The longest name that
# the device's name contains counts.
PEAK_FLOP_PER_S = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "B200": 2.25e15,
    "GB200": 2.5e15,
    "GB300": 2.5e15,
}
_OF_CONTEXT = ("fc.weight", "k_proj.weight", "v_proj.weight")
_NOT_OF_SLOTS = ("fc.weight", "markov_w1.weight")


def peak_flop_per_s(device_name: str) -> float | None:
    """The dense bf16 peak of a GPU by the name CUDA gives it, or None."""
    names = [name for name in PEAK_FLOP_PER_S if name in device_name]
    return PEAK_FLOP_PER_S[max(names, key=len)] if names else None


def model_flop(sizes: Mapping[str, int], slots: int, tokens: int) -> float:
    """Floating-point operations of one forward and backward pass over `slots` of draft blocks and `tokens` of context.

    `sizes`: weights by parameter of the draft. 6 for a weight and whatever meets it: Kaplan et al. 2020, "Scaling laws
    for neural language models", section 2.1. Context meets `fc` and the layers' keys and values; slots meet all but
    `fc` and `markov_w1`, of which rows are looked up. Left out are the frozen LM head and attention scores.
    """
    of_context = sum(size for name, size in sizes.items() if name.endswith(_OF_CONTEXT))
    of_slots = sum(size for name, size in sizes.items() if not name.endswith(_NOT_OF_SLOTS))
    return 6.0 * (of_slots * slots + of_context * tokens)


class Meter:
    """Measures the steps of one process. `sizes`: as in `model_flop`."""

    def __init__(self, device: torch.device, world: int, sizes: Mapping[str, int], block_size: int) -> None:
        self._device, self._world = device, world
        self._sizes, self._block_size = dict(sizes), block_size
        on_gpu = device.type == "cuda"
        self._peak_flop_per_s = peak_flop_per_s(torch.cuda.get_device_name(device)) if on_gpu else None
        self._started = time.monotonic()
        self._steps = self._tokens = 0
        self._wait_s = 0.0

    def step(self, taken: Pass, step_s: float) -> dict[str, float]:
        """Metrics of one step that took `step_s`. MFU as in Chowdhery et al. 2022 (PaLM), appendix B."""
        self._steps, self._tokens, self._wait_s = (
            self._steps + 1,
            self._tokens + taken.tokens,
            self._wait_s + taken.wait_s,
        )
        values = {"step_s": step_s, "tok_per_s": taken.tokens / step_s, "data_wait_s": taken.wait_s}
        if self._device.type == "cuda":
            values["peak_gpu_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        else:
            values["peak_rss_bytes"] = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self._peak_flop_per_s is not None:
            slots = int(taken.sums.labels_B[0]) * self._block_size  # every block has a first label
            flop_per_s = model_flop(self._sizes, slots, taken.tokens) / step_s / self._world
            values["mfu"] = flop_per_s / self._peak_flop_per_s
        return values

    def totals(self) -> dict[str, float]:
        """Means over all steps of this process, validation and checkpoints included."""
        elapsed_s = max(time.monotonic() - self._started, 1e-9)
        return {"tok_per_s": self._tokens / elapsed_s, "data_wait_share": self._wait_s / elapsed_s}

    def note(self, values: Mapping[str, float], steps_left: int) -> str:
        """The progress line of a step, from its metrics."""
        left_s = (time.monotonic() - self._started) / max(1, self._steps) * steps_left
        return (
            f"loss {values.get('loss', 0.0):.3f} tau {values.get('acceptance_length', 0.0):.2f} "
            f"{values['tok_per_s']:.0f} tok/s wait {values['data_wait_s'] / values['step_s']:.0%} "
            f"{timedelta(seconds=round(left_s))} left"
        )
