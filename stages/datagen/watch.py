"""What a running generation says of itself, and when it gives up."""

from __future__ import annotations

import time

from stages.datagen.prompts import SetAside
from stages.events import Events

TICK_S = 1.0
"""Least time between two metric rows; hundreds of conversations go by in a second."""


class Watch:
    """Progress, speed and the bound on failures, over all conversations of a corpus."""

    def __init__(self, events: Events, total: int, max_failed_share: float) -> None:
        self.events, self.total, self.max_failed_share = events, total, max_failed_share
        self.done = self.failed = self.tokens = 0
        self.started = self.last_tick = time.monotonic()
        self.last_step = 0

    def skip(self, conversations: int, set_aside: list[SetAside]) -> None:
        """Count a shard that an earlier try finished."""
        self.done += conversations
        self.failed += sum(one.failed for one in set_aside)

    def begin(self) -> None:
        """The first missing shard begins: speed counts from here, and rows after the kept ones are written anew."""
        self.events.rewind(self.done)
        self.last_step = self.done
        self.started = time.monotonic()
        self.tick()

    def answered(self, tokens: int) -> None:
        self.tokens += tokens
        self._tick_in_time()

    def settled(self, set_aside: SetAside | None) -> None:
        """A conversation ended. Raises RuntimeError when too many have failed."""
        self.done += 1
        self._tick_in_time()
        if set_aside is None or not set_aside.failed:
            return
        self.failed += 1
        if self.failed > self.max_failed_share * self.total:
            raise RuntimeError(
                f"datagen: {self.failed} of {self.total} conversations failed, more than"
                f" max_failed_share={self.max_failed_share:g} allows;"
                f" the last was {set_aside.id}: {set_aside.reason}: {set_aside.cause}"
            )

    def tick(self) -> None:
        """Say how far it is. One metric row a step: `done` is the axis, as a resume needs."""
        self.last_tick = time.monotonic()
        speed = self.tokens / max(self.last_tick - self.started, 1e-9)
        note = f"{_short(speed)} tok/s" if self.tokens else ""
        self.events.progress("datagen", self.done, self.total, "conversation", note=note)
        if self.done > self.last_step and self.tokens:
            self.last_step = self.done
            values = {
                "generated_tok_per_s": speed,
                "generated_tokens": self.tokens,
                "failed_conversations": self.failed,
            }
            self.events.metrics(values, step=self.done)

    def _tick_in_time(self) -> None:
        if time.monotonic() - self.last_tick >= TICK_S:
            self.tick()


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"
