"""How a one-rank CPU engine runs its worker; vLLM loads it by its name."""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InCoreExecutor(UniProcExecutor):
    """The worker lives in the engine core's process instead of a third one.

    vLLM replaces "uni" by "mp" on the CPU, because OpenMP reads its settings when a process starts.
    `VllmActor` sets them before it starts the core, so that the start saves one import of vLLM
    (10 s of CPU time) and each step a trip between processes.
    """
