"""One rank of a training run without Ray: python -m tests.stages.train_worker ROOT RANK WORLD ATTEMPT [KILL_AT]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stages.train.loop import train
from tests.stages.draft_helpers import CONFIG, FakeReader, make_job


def main(root: Path, rank: int, world: int, attempt: str, kill_at: int | None) -> None:
    store = dist.FileStore(str(root / f"store-{attempt}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    job = make_job(root, CONFIG, [])
    train(job, lambda: FakeReader(job.target.folder, kill_at=kill_at), torch.device("cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4],
        int(sys.argv[5]) if len(sys.argv) > 5 else None,
    )
