"""One contract for every way that hidden states travel: order, exact bytes, losses by name, an early end.

A test module subclasses it and has a fixture `opener` that opens readers of pretended extractors' states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from hidden_states_helpers import sequence, states_of

from stages.corpus import TokenSequence
from stages.hidden_states.flow import Flow
from stages.hidden_states.wire import HiddenBatch, HiddenStatesError, HiddenStatesReader

BATCHES = [[sequence(10 * b + i, 3 + i) for i in range(4)] for b in range(6)]
DAMAGED, LOST = sequence(4000), sequence(4100)  # must be so by every transport; the loss has this reason:
WHY_LOST = "prompt too long"

Open = Callable[[float], HiddenStatesReader]  # given the share that may be set aside


def check(batch: HiddenBatch, wanted: list[TokenSequence]) -> None:
    assert [s.id for s in batch.sequences] == [s.id for s in wanted]
    states = [states_of(s.input_ids) for s in wanted]
    assert torch.equal(batch.states_TLD, torch.cat(states) if states else batch.states_TLD[:0])
    assert batch.states_TLD.dtype == torch.bfloat16


class TransportContract:
    def test_batches_come_in_order_and_exact(self, opener: Open) -> None:
        with closing(opener(0.0)) as reader:
            for _ in range(2):  # the same reader again
                for batch, wanted in zip(reader.read(BATCHES), BATCHES, strict=True):
                    check(batch, wanted)
                    assert not batch.set_aside
            assert list(reader.read([])) == []
            check(*list(reader.read([[]])), [])

    def test_what_was_read_stays_as_it_is(self, opener: Open) -> None:
        """Memory that is used again must not be a batch's that somebody still looks at."""
        with closing(opener(0.0)) as reader:
            views = [batch.states_TLD[1:, -1] for batch in reader.read(BATCHES * 3)]
        for view, wanted in zip(views, BATCHES * 3, strict=True):
            assert torch.equal(view, torch.cat([states_of(s.input_ids) for s in wanted])[1:, -1])

    def test_a_loss_is_set_aside_by_name(self, opener: Open) -> None:
        with closing(opener(0.5)) as reader:
            first, second = reader.read([[BATCHES[0][0], LOST, BATCHES[0][1]], [LOST]])
        check(first, BATCHES[0][:2])
        check(second, [])
        for batch in (first, second):
            [(name, why)] = batch.set_aside
            assert name == LOST.id
            assert WHY_LOST in why

    def test_damaged_bytes_are_refused(self, opener: Open) -> None:
        with closing(opener(0.5)) as reader:
            [batch] = reader.read([[DAMAGED, BATCHES[1][2]]])
        check(batch, [BATCHES[1][2]])
        [(name, why)] = batch.set_aside
        assert name == DAMAGED.id
        assert "damaged bytes" in why

    def test_too_many_losses_stop_the_read(self, opener: Open) -> None:
        with closing(opener(0.1)) as reader:
            with pytest.raises(HiddenStatesError, match=r"2 of 4 sequences.*max_set_aside_share=0\.1.*damaged"):
                list(reader.read([[*BATCHES[0][:2], LOST, DAMAGED]]))
            [batch] = reader.read([BATCHES[2]])  # the reader is still good
            check(batch, BATCHES[2])
            since = _flow_of(reader, seconds=0.02)
            assert since.ready_batch_s == since.byte_s["trainer"] == 0  # nothing is counted that nobody will take

    def test_a_read_can_end_early(self, opener: Open) -> None:
        reader = opener(0.0)
        batches = reader.read(BATCHES * 20)
        check(next(batches), BATCHES[0])
        reader.close()  # while others are under way
        batches.close()
        reader.close()
        with closing(opener(0.0)) as other:
            batches = other.read(BATCHES * 20)
            next(batches)
            batches.close()  # the reader lives
            [batch] = other.read([BATCHES[3]])
            check(batch, BATCHES[3])

    def test_errors_in_the_source_of_batches_reach_the_consumer(self, opener: Open) -> None:
        def broken() -> Iterator[list[TokenSequence]]:
            yield BATCHES[0]
            raise OSError("shard unreadable")

        with closing(opener(0.0)) as reader, pytest.raises(OSError, match="shard unreadable"):
            list(reader.read(broken()))

    def test_the_flow_is_counted(self, opener: Open) -> None:
        with closing(opener(0.0)) as reader:
            start = reader.flow()
            tokens = sum(len(batch.states_TLD) for batch in reader.read(BATCHES))
            flow = reader.flow() - start
            assert flow.tokens == tokens == sum(len(s) for batch in BATCHES for s in batch)
            assert 0 < flow.trainer_wait_s <= flow.elapsed_s
            values = flow.metrics()
            assert sum(value for name, value in values.items() if name.startswith("bottleneck/")) == pytest.approx(1)
            assert values["flow/window_share"] <= 1
            idle = reader.flow()
            assert (reader.flow() - idle).byte_s == {"extractors": 0, "transfer": 0, "trainer": 0}  # all was taken

    def test_a_trainer_that_takes_nothing_is_the_bottleneck(self, opener: Open) -> None:
        with closing(opener(0.0)) as reader:
            batches = reader.read(BATCHES)
            next(batches)
            deadline = time.monotonic() + 20
            while (since := _flow_of(reader, seconds=0.02)).reader_wait_s < 0.999 * since.elapsed_s:
                assert time.monotonic() < deadline, since  # until all is fetched
            assert since.bottleneck == "trainer"
            assert since.trainer_wait_s == 0
            assert since.ready_batch_s == pytest.approx(5 * since.elapsed_s)
            batches.close()
            assert set(_flow_of(reader, seconds=0.01).byte_s.values()) == {0}


def _flow_of(reader: HiddenStatesReader, seconds: float) -> Flow:
    before = reader.flow()
    time.sleep(seconds)
    return reader.flow() - before
