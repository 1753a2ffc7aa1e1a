"""Memory that batches are fetched into: made known to the store once, and used again when nobody looks at it.

Fresh memory costs a page fault every 4 KiB and a registration every batch, which together take about as
long as the transfer itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

_ALIGN_BYTES = 4096

Register = Callable[[torch.Tensor], None]  # given uint8, contiguous


@dataclass(eq=False)
class _Slab:
    memory: torch.Tensor  # uint8
    free: list[tuple[int, int]]  # [start, end), ascending, never touching each other

    def take(self, size: int) -> int | None:
        """The start of the lowest `size` bytes that are free."""
        for i, (start, end) in enumerate(self.free):
            if end - start >= size:
                self.free[i : i + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give_back(self, start: int, end: int) -> None:
        before = [span for span in self.free if span[1] < start]
        after = [span for span in self.free if span[0] > end]
        touching = self.free[len(before) : len(self.free) - len(after)]
        merged = (min([start, *(s for s, _ in touching)]), max([end, *(e for _, e in touching)]))
        self.free = [*before, merged, *after]


class BatchBuffers:
    """Leases memory out of slabs of `slab_bytes`, or larger. A lease ends when the last tensor that shares it is gone.

    `lease` and `close` belong to one thread; tensors may end in any.
    """

    def __init__(
        self, slab_bytes: int, register: Register = lambda _: None, unregister: Register = lambda _: None
    ) -> None:
        self._slab_bytes = slab_bytes
        self._register, self._unregister = register, unregister
        self._slabs: list[_Slab] = []
        self._returned: deque[tuple[_Slab, int, int]] = deque()

    def lease(self, size: int) -> torch.Tensor:
        """`size` bytes (uint8) that nobody else has, with whatever is in them. Raises what `register` does."""
        while self._returned:
            slab, start, end = self._returned.popleft()
            slab.give_back(start, end)
        rounded = -(-max(size, 1) // _ALIGN_BYTES) * _ALIGN_BYTES
        found = next(((s, at) for s in self._slabs if (at := s.take(rounded)) is not None), None)
        slab, start = found or self._grow(rounded)
        # The tensor that torch makes of an array keeps this very array alive, and so does every view of it.
        array = slab.memory.numpy()[start : start + size]
        weakref.finalize(array, self._returned.append, (slab, start, start + rounded)).atexit = False
        return torch.from_numpy(array)

    def close(self) -> None:
        """Unregister all. What is still leased stays readable for as long as somebody holds it."""
        while self._slabs:
            self._unregister(self._slabs.pop().memory)

    def _grow(self, size: int) -> tuple[_Slab, int]:
        """A new slab, and its first `size` bytes; slabs that are too small for that and not in use go."""
        for slab in [s for s in self._slabs if s.free == [(0, len(s.memory))]]:
            self._slabs.remove(slab)
            self._unregister(slab.memory)
        memory = torch.empty(max(size, self._slab_bytes), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self._register(memory)
        slab = _Slab(memory, [(size, len(memory))] if len(memory) > size else [])
        self._slabs.append(slab)
        return slab, 0
