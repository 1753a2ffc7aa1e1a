"""Memory for batches: used again, never under somebody's eyes."""

from __future__ import annotations

import gc
import random
import threading
from itertools import pairwise

import torch

from stages.hidden_states.buffers import BatchBuffers

SLAB = 1 << 16


class Registry:
    """What a store would know of."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.registrations = 0

    def register(self, memory: torch.Tensor) -> None:
        self.registrations += 1
        self.known[memory.data_ptr()] = memory.nbytes

    def unregister(self, memory: torch.Tensor) -> None:
        assert self.known.pop(memory.data_ptr()) == memory.nbytes

    def covers(self, memory: torch.Tensor) -> bool:
        start = memory.data_ptr()
        return any(at <= start and start + memory.nbytes <= at + size for at, size in self.known.items())


def test_memory_is_used_again_only_when_the_last_view_is_gone() -> None:
    buffers = BatchBuffers(SLAB)
    lease = buffers.lease(1000)
    start = lease.data_ptr()
    view = lease.view(torch.bfloat16).view(5, 100)[1:, 3]
    view.fill_(7)
    del lease
    other = buffers.lease(1000)
    other.zero_()
    assert (view == 7).all()
    assert other.data_ptr() != start
    reshaped = view.unsqueeze(0)
    del view
    assert buffers.lease(1000).data_ptr() != start
    del reshaped
    assert buffers.lease(1000).data_ptr() == start


def test_leases_never_overlap_and_are_registered_whatever_the_order() -> None:
    registry, generator = Registry(), random.Random(0)
    buffers = BatchBuffers(SLAB, registry.register, registry.unregister)
    held: list[torch.Tensor] = []
    for _ in range(2000):
        if held and generator.random() < 0.5:
            del held[generator.randrange(len(held))]
        else:
            held.append(buffers.lease(generator.randrange(1, SLAB // 3)))
            assert registry.covers(held[-1])
        if len(held) > 12:
            held.clear()
        spans = sorted((lease.data_ptr(), lease.data_ptr() + lease.nbytes) for lease in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert registry.registrations < 20
    buffers.close()
    assert not registry.known
    assert all(lease.fill_(1).sum() == len(lease) for lease in held)  # still readable


def test_large_batches_get_slabs_of_their_own_and_small_slabs_go() -> None:
    registry = Registry()
    buffers = BatchBuffers(SLAB, registry.register, registry.unregister)
    small = buffers.lease(10)
    for size in (2 * SLAB, 3 * SLAB, 4 * SLAB):
        assert len(buffers.lease(size)) == size
    assert sorted(registry.known.values()) == [SLAB, 4 * SLAB]
    del small
    assert len(buffers.lease(0)) == 0
    assert len(buffers.lease(4 * SLAB)) == 4 * SLAB
    assert registry.registrations == 4


def test_leases_may_end_in_other_threads() -> None:
    buffers = BatchBuffers(SLAB)
    start = buffers.lease(10).data_ptr()
    for _ in range(20):
        threads = [threading.Thread(target=lambda _: None, args=(buffers.lease(4096),)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        threads.clear()
    gc.collect()
    assert buffers.lease(SLAB).data_ptr() == start  # all came back, and are one piece again
