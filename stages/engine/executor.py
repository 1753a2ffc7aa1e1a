"""How a one-rank CPU engine runs its worker, and a repair of vLLM's CPU sampling."""

from __future__ import annotations

import torch
from vllm.utils import cpu_triton_utils
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InCoreExecutor(UniProcExecutor):
    """The worker lives in the engine core's process instead of a third one.

    vLLM replaces "uni" by "mp" on the CPU, because OpenMP reads its settings when a process starts.
    `VllmActor` sets them before it starts the core, so that the start saves one import of vLLM
    (10 s of CPU time) and each step a trip between processes.
    """

    def _init_executor(self) -> None:
        cpu_triton_utils._expand_kernel_impl = expand  # before the worker registers it
        super()._init_executor()


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cumulative_counts: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat `values[i]` as often as its request has tokens, into `output`, with one value replaced.

    vLLM 0.32's version (`vllm/utils/cpu_triton_utils.py`) converts a float `output` to int64, fills the
    copy and drops it, so that the rejection sampler divides by temperatures nobody wrote: any sampling
    above temperature 0 next to speculation, which extraction needs, is noise on a CPU.
    """
    counts = torch.diff(cumulative_counts.long(), prepend=torch.zeros(1, dtype=torch.long))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    output.copy_(replaced.repeat_interleave(counts))
