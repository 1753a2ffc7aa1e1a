"""States kept on disk: extracted once, shard by shard; what is damaged or of another kind is never used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from disk_helpers import ABOUT, PretendReader, damage, flip
from hidden_states_helpers import sequence, states_of
from safetensors.torch import load_file
from transport_contract import BATCHES, DAMAGED, LOST, WHY_LOST, Open, TransportContract

from stages.corpus import TokenSequence
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.disk import About, KeptStates, disk_bytes, key_of
from stages.hidden_states.disk_reader import DiskReader
from stages.hidden_states.flow import PLACES
from stages.hidden_states.wire import HiddenStatesReader
from stages.train.loop import train
from tests.stages.draft_helpers import CONFIG as TRAIN
from tests.stages.draft_helpers import LAYERS, SHAPE, FakeReader, make_job, random_sequences

SEQUENCES = [sequence(10 * i) for i in range(9)]
SHARD_BYTES = 3 * 5 * 2 * 8 * 2  # three sequences of five tokens


def keep(kept: KeptStates, reader: PretendReader, sequences: list[TokenSequence] = SEQUENCES) -> dict[str, str]:
    """What a stage does: find what is missing, and have it extracted."""
    with kept.locked():
        return kept.fill(reader, kept.missing(sequences), lambda _: None, SHARD_BYTES)


def read(kept: KeptStates, sequences: list[TokenSequence] = SEQUENCES, share: float = 1.0) -> dict[str, str]:
    """Read all, check what comes, and return the reasons of what does not."""
    away: dict[str, str] = {}
    with closing(DiskReader(kept, HiddenStatesConfig(max_set_aside_share=share), {})) as reader:
        for batch in reader.read([[s] for s in sequences]):
            away |= dict(batch.set_aside)
            for one in batch.sequences:
                assert torch.equal(batch.states_TLD, states_of(one.input_ids))
    return away


class TestDisk(TransportContract):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Open:
        kept = KeptStates(tmp_path / "states", ABOUT)
        everything = [DAMAGED, LOST, *(s for batch in BATCHES for s in batch)]
        set_aside = keep(kept, PretendReader({LOST.id: WHY_LOST}), everything)
        damage(kept, key_of(DAMAGED.input_ids))

        def open_kept(share: float) -> HiddenStatesReader:
            return DiskReader(kept, HiddenStatesConfig(max_set_aside_share=share), set_aside)

        opened: Open = cloudpickle.loads(cloudpickle.dumps(open_kept))  # as it reaches a training process
        return opened


@pytest.fixture
def kept(tmp_path: Path) -> KeptStates:
    """A folder with the states of all SEQUENCES, in several shards."""
    kept = KeptStates(tmp_path / "states", ABOUT)
    keep(kept, PretendReader())
    assert len(list(kept.path.iterdir())) == 3
    return kept


def test_what_is_there_is_never_extracted_again(kept: KeptStates) -> None:
    assert not read(kept, share=0.0)
    again = PretendReader()
    keep(kept, again, [*SEQUENCES, sequence(500), sequence(500), replace(SEQUENCES[0], id="the same tokens")])
    assert again.read_ids == ["s500"]
    assert not read(kept, [*SEQUENCES, sequence(500)], share=0.0)


def test_shards_are_ordinary_safetensors(kept: KeptStates) -> None:
    tensors = {key: states for path in kept.path.glob("*.safetensors") for key, states in load_file(path).items()}
    assert tensors.keys() == {key_of(s.input_ids) for s in SEQUENCES}
    assert all(torch.equal(tensors[key_of(s.input_ids)], states_of(s.input_ids)) for s in SEQUENCES)
    on_disk = sum(path.stat().st_size for path in kept.path.glob("*.safetensors"))
    assert on_disk <= disk_bytes(sum(map(len, SEQUENCES)), len(SEQUENCES), 2, 8) + 3 * 512


def test_a_killed_extraction_goes_on_after_its_last_shard(tmp_path: Path) -> None:
    kept = KeptStates(tmp_path / "states", ABOUT)
    with pytest.raises(OSError, match="killed"):
        keep(kept, PretendReader(dies_after=5))  # three in a shard, two in memory
    (kept.path / "half.partial").write_bytes(b"half a shard")
    again = PretendReader()
    keep(kept, again)
    assert again.read_ids == [s.id for s in SEQUENCES[3:]]
    assert not read(kept, share=0.0)
    assert not (kept.path / "half.partial").exists()


def test_what_was_set_aside_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    kept = KeptStates(tmp_path / "states", ABOUT)
    bad = SEQUENCES[4]
    assert keep(kept, PretendReader({bad.id: "prompt too long"})) == {key_of(bad.input_ids): "prompt too long"}
    assert read(kept) == {bad.id: f"not kept: no states of it in {kept.path}"}
    again = PretendReader()
    assert not keep(kept, again)
    assert again.read_ids == [bad.id]


@pytest.mark.parametrize("harm", ["bit", "short", "header", "empty"])
def test_a_damaged_shard_is_refused_and_extracted_again(kept: KeptStates, harm: str) -> None:
    bad = SEQUENCES[4]
    entry = kept.entries()[key_of(bad.input_ids)]
    neighbours = {s.id for s in SEQUENCES if kept.entries()[key_of(s.input_ids)].shard == entry.shard}
    content = entry.shard.read_bytes()
    if harm == "bit":
        damage(kept, key_of(bad.input_ids))
    elif harm == "header":
        flip(entry.shard, 9)
    else:
        entry.shard.write_bytes(content[:-1] if harm == "short" else b"")
    away = read(kept)
    assert away.keys() == ({bad.id} if harm == "bit" else neighbours)
    assert harm != "bit" or str(entry.shard) in away[bad.id]
    again = PretendReader()
    keep(kept, again)
    assert set(again.read_ids) == neighbours
    assert not read(kept, share=0.0)
    assert len(list(kept.path.glob("*.refused"))) == 1  # nothing is deleted


@pytest.mark.parametrize(
    ("change", "named"),
    [({"layer_ids": (1, 2)}, "layer_ids"), ({"pre_norm": False}, "pre_norm"), ({"target": "other"}, "target")],
)
def test_states_of_another_kind_are_refused_by_name(
    kept: KeptStates, change: dict[str, object], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    away = read(KeptStates(kept.path, replace(ABOUT, **change)))  # as if copied into the wrong folder
    assert away.keys() == {s.id for s in SEQUENCES}
    assert f"found {{'{named}': " in caplog.text


@contextmanager
def header_of(shard: Path) -> Iterator[dict[str, Any]]:
    """The header of a shard, which is written again with what was changed."""
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    yield header
    told = json.dumps(header).encode()
    shard.write_bytes(len(told).to_bytes(8, "little") + told + content[8 + length :])


def test_a_shard_that_lies_about_its_tensors_is_refused(kept: KeptStates, caplog: pytest.LogCaptureFixture) -> None:
    key = key_of(SEQUENCES[0].input_ids)
    with header_of(kept.entries()[key].shard) as header:
        header[key]["dtype"] = "F16"
    assert SEQUENCES[0].id in read(kept)
    assert "expected states [T, L, D] of ['BF16', 2, 8], found {'dtype': 'F16'" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer_ids", [1, 2]), ("pre_norm", None), ("target", "other"), ("step_tokens", 64), ("tokens_crc32", 7)],
)
def test_every_tensor_has_a_manifest_that_must_be_the_one_expected(
    kept: KeptStates, field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    bad = SEQUENCES[0]
    key = key_of(bad.input_ids)
    with header_of(kept.entries()[key].shard) as header:
        manifests = json.loads(header["__metadata__"]["manifests"])
        manifests[key][field] = value
        header["__metadata__"]["manifests"] = json.dumps(manifests)
    away = read(kept)
    if field == "tokens_crc32":  # nothing but the tokens themselves knows better
        assert away.keys() == {bad.id}
        assert away[bad.id].startswith("states of other tokens: ")
    else:
        assert bad.id in away
        assert f"{key}: manifest differs: {field}: expected " in caplog.text
    again = PretendReader()
    keep(kept, again)
    assert bad.id in again.read_ids
    assert not read(kept, share=0.0)


def test_training_from_disk_gives_the_same_weights(tmp_path: Path) -> None:
    streamed, from_disk = (
        make_job(tmp_path / name, replace(TRAIN, epochs=1), random_sequences(7, 20)) for name in ("streamed", "disk")
    )
    kept = KeptStates(tmp_path / "states", About("test", LAYERS, SHAPE.hidden_size, 128, {}))
    used = [*streamed.corpus.sequences("train"), *streamed.corpus.sequences("validation")]
    with kept.locked():
        kept.fill(FakeReader(streamed.target.folder), kept.missing(used), lambda _: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(streamed, lambda: FakeReader(streamed.target.folder), torch.device("cpu"))
        train(from_disk, lambda: DiskReader(kept, HiddenStatesConfig(), {}), torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    weights = [(job.out.path / "checkpoint" / "model.safetensors").read_bytes() for job in (streamed, from_disk)]
    assert weights[0] == weights[1]
    rows = [json.loads(line)["values"] for line in (from_disk.out.path / "metrics.jsonl").read_text().splitlines()]
    assert all(row["flow/tok_per_s"] > 0 for row in rows if "loss" in row)
    assert {name for name in rows[0] if name.startswith("bottleneck/")} == {f"bottleneck/{place}" for place in PLACES}


def test_too_small_a_disk_is_refused_with_what_it_would_take(tmp_path: Path) -> None:
    kept = KeptStates(tmp_path, ABOUT)
    ids = np.broadcast_to(np.int32(1), 10**13)  # takes no memory
    with pytest.raises(ValueError, match=r"transport=disk: .* 2 sequences with 2\d+ tokens take 5960\d\d\.\d GiB in"):
        kept.check_space([TokenSequence("a", "test", ids, ids), TokenSequence("b", "test", ids, ids)])
    assert kept.check_space(SEQUENCES) == disk_bytes(sum(map(len, SEQUENCES)), len(SEQUENCES), 2, 8)


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    kept = KeptStates(tmp_path / "states", ABOUT)
    with kept.locked():
        with pytest.raises(BlockingIOError, match="another run is writing states here"), kept.locked():
            pass
        assert read(kept).keys() == {s.id for s in SEQUENCES}  # reading needs no lock
