"""Flow: where bytes pile up is the bottleneck, and waits are counted on both sides."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest

from stages.hidden_states import flow
from stages.hidden_states.flow import Flow, FlowMeter


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(flow, "time", SimpleNamespace(monotonic=lambda: self.now))

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def one_batch(meter: FlowMeter, clock: Clock, extract_s: float, transfer_s: float, ready_s: float) -> None:
    """100 bytes and 10 tokens from asking to taking; the trainer waits until they are ready."""
    with meter.trainer_waits():
        with meter.fetching(100, "extractors") as go:
            clock.passes(extract_s)
            go("transfer")
            clock.passes(transfer_s)
        meter.ready(100)
    clock.passes(ready_s)
    meter.ready(100, batches=-1)
    meter.taken(10, (1.0, 2.0))


@pytest.mark.parametrize(
    ("seconds", "name"), [((3, 1, 2), "extractors"), ((1, 3, 2), "transfer"), ((1, 2, 3), "trainer")]
)
def test_the_bottleneck_is_where_bytes_spend_their_time(
    clock: Clock, seconds: tuple[float, float, float], name: str
) -> None:
    meter = FlowMeter(200, (1, 3), {3: 4.0})
    one_batch(meter, clock, *seconds)
    found = meter.flow()
    extract_s, transfer_s, ready_s = seconds
    assert found.bottleneck == name
    assert found.metrics() == pytest.approx(
        {
            "flow/tok_per_s": 10 / 6,
            "flow/batches_ready": ready_s / 6,
            "flow/in_flight_bytes": 100 * (extract_s + transfer_s) / 6,
            "flow/window_share": (extract_s + transfer_s) / 12,
            "flow/trainer_wait_share": (extract_s + transfer_s) / 6,
            "flow/reader_wait_share": ready_s / 6,  # with one batch under way, nothing else was left to fetch
            "bottleneck/extractors": extract_s / 6,
            "bottleneck/transfer": transfer_s / 6,
            "bottleneck/trainer": ready_s / 6,
            "states/rms_layer_1": 1.0,
            "states/rms_layer_3": 2.0,
            "states/rms_ratio_layer_3": 0.5,
        }
    )
    assert f"bottleneck {name}" in found.note


def test_the_reader_does_not_wait_while_anything_is_fetched(clock: Clock) -> None:
    meter = FlowMeter(200, (1, 3), {3: 4.0})
    meter.ready(100)
    with meter.fetching(100, "transfer"):
        clock.passes(2)
    clock.passes(1)
    assert meter.flow().reader_wait_s == 1


def test_a_try_that_fails_leaves_nothing_in_flight(clock: Clock) -> None:
    meter = FlowMeter(200, (1, 3), {3: 4.0})
    with suppress(OSError), meter.fetching(100, "extractors") as go:
        go("transfer")
        raise OSError("lost")
    clock.passes(5)
    assert meter.flow() == Flow(elapsed_s=5, rms={1: 0.0, 3: 0.0}, window_bytes=200, proved_rms={3: 4.0})


def test_flows_are_of_the_time_in_between(clock: Clock) -> None:
    meter = FlowMeter(200, (1, 3), {3: 4.0})
    one_batch(meter, clock, 5, 1, 1)
    before = meter.flow()
    one_batch(meter, clock, 1, 1, 5)
    since = meter.flow() - before
    assert (since.elapsed_s, since.tokens, since.bottleneck) == (7, 10, "trainer")
    assert since.byte_s == {"extractors": 100, "transfer": 100, "trainer": 500}
    nothing = meter.flow() - meter.flow()
    assert set(nothing.metrics().values()) == {0.0}  # no time passed, and nothing is divided by it
