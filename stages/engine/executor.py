"""How the core process of an engine runs its workers, and ends with its actor; vLLM loads both by name."""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from stages.engine.cpu import die_with_parent

ACTOR_PID = "ENGINE_ACTOR_PID"  # environment variable that `VllmActor` sets for its core


class InCoreExecutor(UniProcExecutor):
    """One worker, in the engine core's process instead of a third one.

    vLLM replaces "uni" by "mp" on the CPU, because OpenMP reads its settings when a process starts.
    `VllmActor` sets them before it starts the core, so that the start saves one import of vLLM
    (10 s of CPU time) and each step a trip between processes.
    """

    def _init_executor(self) -> None:
        die_with_parent(int(os.environ[ACTOR_PID]))
        super()._init_executor()


class WorkersExecutor(MultiprocExecutor):
    """A worker process for each rank, which ends with the core whatever it is doing then."""

    def _init_executor(self) -> None:
        die_with_parent(int(os.environ[ACTOR_PID]))
        super()._init_executor()
        self.collective_rpc(_die_with_core, args=(os.getpid(),))


def _die_with_core(_: Any, pid: int) -> None:
    die_with_parent(pid)
