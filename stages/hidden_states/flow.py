"""Where hidden states are on their way, measured in time, and how large they are: a reader counts, who trains logs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

Place = Literal["extractors", "transfer", "trainer"]
PLACES: tuple[Place, ...] = ("extractors", "transfer", "trainer")


def _nowhere() -> dict[Place, float]:
    return dict.fromkeys(PLACES, 0.0)


@dataclass(frozen=True)
class Flow:
    """Totals since a reader was opened; the difference of two is what flowed in between.

    `byte_s`: bytes times the seconds for which they were waited for at the extractors, were transferred and
    checked, and lay ready for the trainer. By Little's law that is the elapsed time times the mean number of
    bytes in each place, and bytes pile up before whatever is slowest.
    """

    elapsed_s: float = 0.0
    tokens: int = 0  # taken by the trainer
    trainer_wait_s: float = 0.0  # for the next batch
    reader_wait_s: float = 0.0  # nothing to fetch: all that the window allows was ready
    ready_batch_s: float = 0.0  # batches times the seconds for which they were ready
    byte_s: dict[Place, float] = field(default_factory=_nowhere)
    batches: int = 0  # taken that were not empty
    rms: dict[int, float] = field(default_factory=dict)  # by layer id: the batches' median RMS, added up
    window_bytes: int = 0  # what the reader may have in flight: asked for, and not yet read
    proved_rms: Mapping[int, float] = field(default_factory=dict)  # by layer id: what engines gave at their check

    def __sub__(self, earlier: Flow) -> Flow:
        return replace(
            self,
            elapsed_s=self.elapsed_s - earlier.elapsed_s,
            tokens=self.tokens - earlier.tokens,
            trainer_wait_s=self.trainer_wait_s - earlier.trainer_wait_s,
            reader_wait_s=self.reader_wait_s - earlier.reader_wait_s,
            ready_batch_s=self.ready_batch_s - earlier.ready_batch_s,
            byte_s={place: self.byte_s[place] - earlier.byte_s[place] for place in PLACES},
            batches=self.batches - earlier.batches,
            rms={layer: total - earlier.rms.get(layer, 0.0) for layer, total in self.rms.items()},
        )

    @property
    def bottleneck(self) -> Place:
        """What the others wait for."""
        return max(PLACES, key=self.byte_s.__getitem__)

    def metrics(self) -> dict[str, float]:
        """Means over the time. `bottleneck/…` are shares of all bytes under way: the largest names the bottleneck."""
        elapsed_s, under_way = max(self.elapsed_s, 1e-9), max(sum(self.byte_s.values()), 1e-9)
        in_flight_bytes = (self.byte_s["extractors"] + self.byte_s["transfer"]) / elapsed_s
        return {
            "flow/tok_per_s": self.tokens / elapsed_s,
            "flow/batches_ready": self.ready_batch_s / elapsed_s,
            "flow/in_flight_bytes": in_flight_bytes,
            "flow/window_share": in_flight_bytes / max(self.window_bytes, 1),
            "flow/trainer_wait_share": self.trainer_wait_s / elapsed_s,
            "flow/reader_wait_share": self.reader_wait_s / elapsed_s,
            **{f"bottleneck/{place}": self.byte_s[place] / under_way for place in PLACES},
            **self._sizes(),
        }

    def _sizes(self) -> dict[str, float]:
        """The layers' median RMS, and its ratio to what the engines gave at their check: text is not random tokens."""
        values = {}
        for layer, total in self.rms.items() if self.batches else ():
            values[f"states/rms_layer_{layer}"] = mean = total / self.batches
            if proved := self.proved_rms.get(layer):
                values[f"states/rms_ratio_layer_{layer}"] = mean / proved
        return values

    @property
    def note(self) -> str:
        """The same for a progress line."""
        values = self.metrics()
        return (
            f"ready {values['flow/batches_ready']:.1f} "
            f"window {values['flow/window_share']:.0%} bottleneck {self.bottleneck}"
        )


class FlowMeter:
    """Follows bytes from place to place. Any thread may call it."""

    def __init__(self, window_bytes: int, layer_ids: Sequence[int], proved_rms: Mapping[int, float]) -> None:
        self.window_bytes = window_bytes
        self._proved_rms = dict(proved_rms)
        self._rms = dict.fromkeys(layer_ids, 0.0)
        self._batches = 0
        self._lock = threading.Lock()
        self._started = self._now = time.monotonic()
        self._bytes = dict.fromkeys(PLACES, 0)
        self._byte_s = _nowhere()
        self._ready_batches = self._waiting = self._tokens = 0
        self._ready_batch_s = self._trainer_wait_s = self._reader_wait_s = 0.0

    @contextmanager
    def fetching(self, size: int, now: Place) -> Iterator[Callable[[Place], None]]:
        """`size` bytes are fetched, and are at `now`; call what this gives when they go on to another place."""

        def go(to: Place) -> None:
            nonlocal now
            with self._change():
                self._bytes[now] -= size
                self._bytes[to] += size
            now = to

        with self._change():
            self._bytes[now] += size
        try:
            yield go
        finally:
            with self._change():
                self._bytes[now] -= size

    def ready(self, size: int, batches: int = 1) -> None:
        """A batch is ready; with `batches=-1` it is no longer."""
        with self._change():
            self._bytes["trainer"] += size * batches
            self._ready_batches += batches

    @contextmanager
    def trainer_waits(self) -> Iterator[None]:
        """For as long as the trainer waits for a batch."""
        with self._change():
            self._waiting += 1
        try:
            yield
        finally:
            with self._change():
                self._waiting -= 1

    def taken(self, tokens: int, rms_L: Sequence[float]) -> None:
        """The trainer got a batch of so many, and of this median RMS in every layer; not of none."""
        with self._change():
            self._tokens += tokens
            if tokens:
                self._batches += 1
                for layer, rms in zip(self._rms, rms_L, strict=True):
                    self._rms[layer] += rms

    def flow(self) -> Flow:
        """Totals up to now."""
        with self._change():
            return Flow(
                self._now - self._started,
                self._tokens,
                self._trainer_wait_s,
                self._reader_wait_s,
                self._ready_batch_s,
                dict(self._byte_s),
                self._batches,
                dict(self._rms),
                self.window_bytes,
                self._proved_rms,
            )

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Account for the time since the last change, then change."""
        with self._lock:
            now = time.monotonic()
            passed_s, self._now = now - self._now, now
            for place in PLACES:
                self._byte_s[place] += passed_s * self._bytes[place]
            self._ready_batch_s += passed_s * self._ready_batches
            self._trainer_wait_s += passed_s * self._waiting
            if self._ready_batches and not self._bytes["extractors"] and not self._bytes["transfer"]:
                self._reader_wait_s += passed_s
            yield
