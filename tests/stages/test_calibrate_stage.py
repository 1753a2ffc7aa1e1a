"""The stage: records against a by-hand drafting, what it refuses, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
import torch
from scipy.special import expit

from stages.artifacts import Workspace
from stages.calibrate import stage
from stages.calibrate.config import CalibrateConfig
from stages.calibrate.records import collect, load, require_greedy, save
from stages.corpus import Corpus, TokenSequence, write_shard
from stages.draft.artifact import Calibration, Draft
from stages.draft.checkpoint import CALIBRATION_KEY, export_draft, head_digest, load_draft
from stages.draft.model import build_draft
from stages.draft.speculate import draft_blocks
from stages.engine.config import EngineConfig
from stages.engine.requests import EngineError
from stages.events import METRICS, read_rows
from stages.hidden_states.config import HiddenStatesConfig
from stages.target import Target
from tests.stages.draft_helpers import DRAFT, LAYERS, SHAPE, FakeReader, greedy_sequences, packed
from tests.stages.served_helpers import artifact, target_facts, write_servable_target

PROVENANCE = {"calibrated": False, "num_positions": 4}
CONFIG = CalibrateConfig(min_records=40, max_anchors_per_sequence=16)


def said(sequence: TokenSequence, *messages: tuple[str, str]) -> TokenSequence:
    return replace(sequence, messages=json.dumps([{"role": role, "content": text} for role, text in messages]))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Corpus, Draft, list[TokenSequence]]:
    """A random target, its own greedy text, and a random draft."""
    root = tmp_path_factory.mktemp("calibrate")
    folder = write_servable_target(root / "model")
    target = artifact(Target, root / "target", target_facts(folder))
    sequences = [*greedy_sequences(folder, 12, 24), replace(greedy_sequences(folder, 1, 8)[0], id="short")]
    # s0 and s1, s2 and s3, … are variants of one prompt
    sequences = [said(sequence, ("user", f"Prompt {i // 2}?")) for i, sequence in enumerate(sequences)]
    corpus = artifact(Corpus, root / "corpus", {"temperature": 0.0})
    write_shard(corpus.path / "calibration-00000.parquet", sequences)
    draft = artifact(Draft, root / "draft", {"layer_ids": [1, 3, 4]})
    model = build_draft(DRAFT, SHAPE, folder, verifier=str(folder), seed=0)
    torch.nn.init.normal_(model.confidence_head.proj.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    export_draft(model, draft.checkpoint)
    return target, corpus, draft, sequences


def test_records_say_what_drafting_by_hand_says(world: tuple[Target, Corpus, Draft, list[TokenSequence]]) -> None:
    target, _, draft, sequences = world
    model = load_draft(draft.checkpoint, target.folder)
    reader = FakeReader(target.folder, set_aside=frozenset({"s1"}))
    made, counts = collect(reader, model, sequences, CONFIG, PROVENANCE, lambda _done: None)
    assert counts == {
        "prompts_in": 13,
        "prompts_used": 11,
        "prompts_without_block": 1,  # "short": four supervised tokens hold no anchor and block
        "prompts_set_aside": 1,
        "anchors": 11 * 16 + 3,
        "blocks": len(made),
        "anchors_cut_short": 11 * 16 + 3 - len(made),
    }
    assert counts["anchors_cut_short"] > 0
    row = 5
    (sequence,) = [s for s in sequences if s.id == made.prompt_N[row]]
    anchor = int(made.anchor_N[row])
    assert sequence.loss_mask[anchor : anchor + 5].all()
    drafted = draft_blocks(model, packed(target.folder, [sequence]), torch.tensor([anchor]))
    text = sequence.input_ids[anchor + 1 : anchor + 5]
    agree = (drafted.tokens_AB[0].numpy() == text).tolist()
    assert made.accepted_N[row] == (agree.index(False) if False in agree else 4)
    np.testing.assert_allclose(made.logits_NB[row], drafted.confidence_logits_AB[0].numpy(), atol=1e-5)


def test_a_draft_that_repeats_the_text_is_accepted_whole(
    world: tuple[Target, Corpus, Draft, list[TokenSequence]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _, draft, sequences = world
    model = load_draft(draft.checkpoint, target.folder)

    def oracle(model: object, batch: object, anchors_A: torch.Tensor) -> object:
        drafted = draft_blocks(model, batch, anchors_A)
        text_AB = torch.stack([batch.input_ids_T[p + 1 : p + 5] for p in anchors_A.tolist()])
        text_AB[0, 2] += 1
        return replace(drafted, tokens_AB=text_AB)

    monkeypatch.setattr("stages.calibrate.records.draft_blocks", oracle)
    reader = FakeReader(target.folder)
    made, _ = collect(reader, model, sequences[:1], CONFIG, PROVENANCE, lambda _done: None)
    assert made.accepted_N.tolist() == [2] + [4] * (len(made) - 1)


def test_stage_without_engines(world: tuple[Target, Corpus, Draft, list[TokenSequence]], tmp_path: Path) -> None:
    """From records to the artifact; the folded head says exactly scale * z + shift of the old one."""
    target, corpus, draft, sequences = world
    config = replace(CONFIG, min_records=20)
    with Workspace(tmp_path / "calibration", "c").locked() as out:
        stage.record(config, target, corpus, sequences, draft, FakeReader(target.folder), out)
        made = load(out.path / stage.RECORDS)
        # A random draft is hardly ever right: give its blocks outcomes that a fit can work with.
        rng = np.random.default_rng(0)
        outcomes = (rng.random(made.logits_NB.shape) < expit(0.5 * made.logits_NB + 1)).cumprod(axis=1).sum(axis=1)
        save(replace(made, accepted_N=outcomes), out.path / stage.RECORDS)
        calibration = stage.fit(config, corpus, draft, out)
    parts = {id_: stage.in_fit_part(f"prompt {i // 2}?", config) for i, id_ in enumerate(s.id for s in sequences)}
    is_fit = [parts[id_] for id_ in made.prompt_N]
    assert 0 < calibration.record.counts["blocks_fit"] == sum(is_fit) < len(is_fit)
    assert calibration == Calibration.load(tmp_path / "calibration")
    numbers = json.loads((calibration.path / "calibration.json").read_text())
    scale, shift = numbers["affine"]["scale"], numbers["affine"]["shift"]
    assert scale != 1.0

    batch, anchors = packed(target.folder, sequences[:1]), torch.arange(6, 15)
    before = draft_blocks(load_draft(draft.checkpoint, target.folder), batch, anchors)
    after = draft_blocks(load_draft(calibration.checkpoint, target.folder), batch, anchors)
    assert torch.equal(before.tokens_AB, after.tokens_AB)
    expected = expit(scale * before.confidence_logits_AB.numpy() + shift)
    np.testing.assert_allclose(after.confidence_logits_AB.sigmoid().numpy(), expected, atol=1e-5)

    served = json.loads(calibration.temperatures.read_text())
    assert served["temperatures"] == served["sts_temperatures"]
    assert len(served["temperatures"]) == 4
    assert all(value > 0 for value in served["temperatures"])
    assert served["head_digest"] == head_digest(calibration.checkpoint) != head_digest(draft.checkpoint)
    assert None not in served.values()
    assert numbers["prompts"]["fit"] + numbers["prompts"]["test"] == calibration.record.counts["prompts_used"]
    assert pq.read_table(calibration.path / stage.RECORDS).num_rows == calibration.record.counts["blocks"]
    assert (calibration.path / "reliability.png").stat().st_size > 1000

    again = replace(draft, path=calibration.path)
    with (
        Workspace(tmp_path / "twice", "c").locked() as out,
        pytest.raises(ValueError, match=r"uncalibrated draft.*start from"),
    ):
        run(world, again, out)


@pytest.mark.parametrize("kept", [0, 3])
def test_too_few_records_are_refused_and_not_kept(
    kept: int, world: tuple[Target, Corpus, Draft, list[TokenSequence]], tmp_path: Path
) -> None:
    """A next try records again: what was set aside may be there then."""
    target, corpus, draft, sequences = world
    away = frozenset(sequence.id for sequence in sequences[kept:])
    with Workspace(tmp_path / "few", "c").locked() as out:
        stage.record(CONFIG, target, corpus, sequences, draft, FakeReader(target.folder, set_aside=away), out)
        with pytest.raises(ValueError, match=r"at least calibrate\.min_records=40 blocks, found"):
            stage.fit(CONFIG, corpus, draft, out)
        assert not (out.path / stage.RECORDS).exists()


@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_threads_draft_as_asked_for(
    threads: int,
    world: tuple[Target, Corpus, Draft, list[TokenSequence]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a Ray task, for which Ray sets OMP_NUM_THREADS=1, torch alone would take one."""
    target, corpus, draft, sequences = world
    used: set[int] = set()

    def watched(*arguments: Any) -> Any:
        used.add(torch.get_num_threads())
        return draft_blocks(*arguments)

    monkeypatch.setattr("stages.calibrate.records.draft_blocks", watched)
    before = torch.get_num_threads()
    try:
        with Workspace(tmp_path / "threads", "c").locked() as out:
            config = replace(CONFIG, threads=threads)
            stage.record(config, target, corpus, sequences[:2], draft, FakeReader(target.folder), out)
    finally:
        torch.set_num_threads(before)
    assert used == {threads}


def run(
    world: tuple[Target, Corpus, Draft, list[TokenSequence]],
    draft: Draft,
    out: Workspace,
    max_sequence_tokens: int = 2048,
    hidden_states: HiddenStatesConfig | None = None,
) -> Calibration:
    target, corpus, _, _ = world
    options = {"hidden_states": hidden_states or HiddenStatesConfig(), "max_sequence_tokens": max_sequence_tokens}
    return stage.run(CONFIG, target, corpus, draft, draft=DRAFT, engine=EngineConfig(), **options, out=out)


def test_sequences_are_cut_as_for_training_and_those_too_large_refused_before_engines_start(
    world: tuple[Target, Corpus, Draft, list[TokenSequence]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, draft, sequences = world
    asked: list[TokenSequence] = []

    @contextmanager
    def states_of(sequences: list[TokenSequence], *_: object, **__: object) -> Iterator[None]:
        asked.extend(sequences)
        raise EngineError("started")
        yield

    monkeypatch.setattr(stage, "states_of", states_of)
    longest = max(map(len, sequences))
    room = HiddenStatesConfig(segment_gib=0.9 * longest * len(LAYERS) * SHAPE.hidden_size * 2 / 2**30, window_share=1.0)
    with Workspace(tmp_path / "large", "c").locked() as out:
        with pytest.raises(ValueError, match=r"sequence s0 of .* raise hidden_states\.segment_gib"):
            run(world, draft, out, longest, room)
        assert asked == []
        with pytest.raises(EngineError, match="started"):
            run(world, draft, out, longest // 2, room)
    assert [sequence.id for sequence in asked] == [sequence.id for sequence in sequences]
    assert max(map(len, asked)) == longest // 2


def test_sampled_corpus_is_refused(world: tuple[Target, Corpus, Draft, list[TokenSequence]]) -> None:
    _, corpus, _, _ = world
    require_greedy(corpus)
    sampled = replace(corpus, record=replace(corpus.record, facts={"temperature": 0.7}))
    with pytest.raises(ValueError, match=r"datagen\.temperature=0, found 0\.7"):
        require_greedy(sampled)


def test_draft_without_a_head_passes_unchanged_and_says_so(
    world: tuple[Target, Corpus, Draft, list[TokenSequence]], tmp_path: Path
) -> None:
    target, corpus, draft, _ = world
    with Workspace(tmp_path / "none", "c").locked() as out:
        config = replace(DRAFT, confidence_head=False)
        calibration = stage.run(
            CONFIG,
            target,
            corpus,
            draft,
            draft=config,
            engine=EngineConfig(),
            hidden_states=HiddenStatesConfig(),
            max_sequence_tokens=2048,
            out=out,
        )
    assert calibration.record.facts["calibrated"] is False
    assert not calibration.temperatures.exists()
    assert CALIBRATION_KEY not in json.loads((calibration.checkpoint / "config.json").read_text())


@pytest.mark.e2e
def test_stage_with_real_states(world: tuple[Target, Corpus, Draft, list[TokenSequence]], tmp_path: Path) -> None:
    """States from vLLM through the store give the confidences that states from transformers give."""
    target, corpus, draft, sequences = world
    engine = EngineConfig(max_model_len=128, max_num_batched_tokens=128, kv_cache_gib=0.1, cpus_per_actor=1)
    store = HiddenStatesConfig(segment_gib=0.0625)
    config = replace(CONFIG, min_records=20)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with Workspace(tmp_path / "calibration", "c").locked() as out:
            calibration = stage.run(
                config,
                target,
                corpus,
                draft,
                draft=DRAFT,
                engine=engine,
                hidden_states=store,
                max_sequence_tokens=2048,
                out=out,
            )
    finally:
        ray.shutdown()
    rows = [row.values for row in read_rows(calibration.path / METRICS)]
    flowed = [row["flow/tok_per_s"] for row in rows if "flow/tok_per_s" in row]
    assert len(flowed) == len(sequences)
    assert all(flowed)
    served = load(calibration.path / stage.RECORDS)
    reference, _ = collect(
        FakeReader(target.folder),
        load_draft(draft.checkpoint, target.folder),
        sequences,
        config,
        PROVENANCE,
        lambda _: None,
    )
    assert served.prompt_N.tolist() == reference.prompt_N.tolist()
    assert served.anchor_N.tolist() == reference.anchor_N.tolist()
    same_prefix = served.accepted_N == reference.accepted_N
    assert same_prefix.mean() > 0.9
    np.testing.assert_allclose(served.logits_NB[:, 0], reference.logits_NB[:, 0], atol=0.1)  # bf16 against fp32 states
    assert not (calibration.path / stage.WORK).exists()
