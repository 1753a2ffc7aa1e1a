"""What a process needs when its engine runs on CPU cores, and how children end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be imported between fork and exec
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def bind_cores(cores: list[int], index: int, num_actors: int, tensor_parallel: int) -> list[list[int]]:
    """The cores of each rank of actor `index` of `num_actors` on one machine.

    All are dealt evenly to all ranks of all actors; when there are fewer cores than ranks, ranks share.
    """
    ranks = num_actors * tensor_parallel
    share = len(cores) // ranks
    mine = range(index * tensor_parallel, (index + 1) * tensor_parallel)
    return [cores[rank * share : (rank + 1) * share] if share else [cores[rank % len(cores)]] for rank in mine]


def cpu_environment(index: int, num_actors: int, tensor_parallel: int) -> dict[str, str]:
    """Environment for the core process of an engine on this machine's CPU.

    Several ranks are bound by vLLM (`|` between them: without it vLLM wants a NUMA node for each);
    a single one, which runs in the core's process, by OpenMP itself.
    """
    ranks = bind_cores(sorted(os.sched_getaffinity(0)), index, num_actors, tensor_parallel)
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, cores)) for cores in ranks)}
    if tensor_parallel > 1:
        return binding
    places = ",".join(f"{{{core}}}" for core in ranks[0])
    return binding | {"OMP_NUM_THREADS": str(len(ranks[0])), "OMP_PLACES": places, "OMP_PROC_BIND": "true"}


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel SIGKILL this process when its parent's spawning thread ends, however it ends.

    `parent_pid`: a process that must still live; if it died before this call, end at once.
    Usable as `preexec_fn`. Source: prctl(2), PR_SET_PDEATHSIG.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and not os.path.exists(f"/proc/{parent_pid}"):
        os._exit(1)
