"""Where weights, gradients and optimizer state live: on every rank, or a part of each on every rank.

Either way a rank adds up the gradients of its documents in one buffer, and ranks meet once a step: they
differ in the number and the length of their documents, so collectives inside would make all wait for
the slowest document, or for ever. Sums over ranks are therefore the same bits with either layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stages.draft.model import trainable
from stages.train.checkpoint import own_rows
from stages.train.optimizer import Gradients


class Replicas:
    """Everything on every rank. `parameters` are what the optimizer moves, with `gradients` attached."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = trainable(model)
        self.gradients = Gradients(self.parameters)

    def gathered(self) -> AbstractContextManager[None]:
        """While `model` computes: its weights are whole."""
        return nullcontext()


class Shards:
    """Each rank keeps rows of every weight and of its optimizer state (FSDP2, `fully_shard`).

    Weights are gathered for a step and released after it; the buffer of gradients is whole. Per trained
    parameter, a rank of N keeps 4 + 12/N bytes, and 4 more during a step, where a replica keeps 16.
    """

    def __init__(self, model: nn.Module) -> None:
        frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        self._model = fully_shard(model, mesh=mesh, ignored_params=frozen)
        with self.gathered():
            whole = trainable(model)
            self.gradients = Gradients(whole)
        self.parameters = trainable(model)
        for name, parameter in self.parameters.items():
            parameter.grad = _rows_of(whole[name].grad, parameter)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While `model` computes: its weights are whole. Every rank must enter."""
        self._model.unshard()
        try:
            yield
        finally:
            self._model.reshard()


def _rows_of(whole: torch.Tensor | None, like: nn.Parameter) -> DTensor:
    """The rows of `whole` that this rank holds of `like`, in the same memory."""
    assert whole is not None
    assert isinstance(like, DTensor)
    first, rows = own_rows(like)
    return DTensor.from_local(
        whole[first : first + len(rows)],
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
