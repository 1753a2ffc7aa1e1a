"""Evaluation: the statistics by hand, refusals, and a random draft served by real vLLM."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from stages.artifacts import Workspace
from stages.corpus import Corpus, TokenSequence, write_shard
from stages.draft.artifact import Calibration, Report
from stages.draft.checkpoint import export_draft, load_draft
from stages.draft.speculate import draft_blocks
from stages.engine.config import EngineConfig
from stages.engine.requests import EngineError
from stages.engine.serving import ServedAnswer, ServingSpec, SpeculationCounters, serving, serving_spec
from stages.evaluate import stage
from stages.evaluate.acceptance import bootstrap_lengths, describe, macro, pooled
from stages.evaluate.compare import check_counts, check_text
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.prompts import EvaluationPrompt, choose_prompts
from stages.evaluate.serve import ServedFiles
from stages.target import Target
from tests.stages.draft_helpers import DRAFT, packed
from tests.stages.served_helpers import MARKOV_DRAFT, artifact, markov_draft, target_facts, write_servable_target

ROUNDS_PK = np.array([[1, 0, 3], [2, 2, 0], [0, 0, 0]])  # 8 rounds of B = 2: 3, 2 and 3 with 0, 1 and 2 accepted
CONFIG = EvaluateConfig(prompts_per_domain=2, max_new_tokens=32, bootstrap_samples=200, batch_sequences=4)
ENGINE = EngineConfig(max_model_len=128, max_num_batched_tokens=128, kv_cache_gib=0.1)


def conversation(id_: str, domain: str, prompt: int, answer: int) -> TokenSequence:
    rng = np.random.default_rng(list(id_.encode()))
    mask = np.arange(prompt + answer) >= prompt
    return TokenSequence(id_, domain, rng.integers(3, 250, prompt + answer).astype(np.int32), mask)


def test_acceptance_by_hand() -> None:
    found = describe(ROUNDS_PK, samples=100, rng=np.random.default_rng(0))
    assert (found.prompts, found.prompts_without_rounds, found.rounds, found.accepted) == (3, 1, 8, 8)
    assert found.acceptance_length == 2.0  # 8 rounds emit 8 accepted and 8 bonus tokens
    assert found.survival == (5 / 8, 3 / 8)
    assert found.conditional == (5 / 8, 3 / 5)
    assert found.interval is not None
    assert found.interval[0] <= 2.0 <= found.interval[1]


def test_acceptance_without_rounds_is_unknown() -> None:
    found = describe(np.zeros((2, 3), dtype=int), samples=10, rng=np.random.default_rng(0))
    assert found.acceptance_length is None
    assert found.interval is None
    assert found.survival == (None, None)


def test_macro_weighs_domains_and_pooled_weighs_rounds() -> None:
    rounds = {"long": np.array([[90, 0, 0]]), "short": np.array([[0, 0, 10]]), "silent": np.array([[0, 0, 0]])}
    assert macro(rounds, samples=50, seed=0)[0] == 2.0
    assert pooled(rounds, samples=50, seed=0).acceptance_length == pytest.approx(1.2)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(1), 0
    for trial in range(200):
        quality_P = rng.beta(4, 4, 60)  # prompts differ: rounds of one prompt are not independent
        rounds_PK = np.stack([np.array([20 - n, n]) for n in rng.binomial(20, quality_P)])
        low, high = np.percentile(bootstrap_lengths(rounds_PK, 300, np.random.default_rng(trial)), (2.5, 97.5))
        hits += low <= 1.5 <= high
    assert 0.90 <= hits / 200 <= 0.99


def test_prompts_are_the_first_of_each_domain_and_all_are_counted() -> None:
    sequences = [
        conversation("a1", "a", 10, 5),
        conversation("b1", "b", 10, 5),
        conversation("a2", "a", 200, 5),
        conversation("a3", "a", 100, 5),
        conversation("a4", "a", 10, 5),
        conversation("x", "a", 10, 0),
    ]
    choice = choose_prompts(sequences, CONFIG, max_model_len=110, num_speculative_tokens=4)
    assert [prompt.id for prompt in choice.prompts] == ["a1", "b1", "a3"]
    assert [prompt.max_new_tokens for prompt in choice.prompts] == [32, 32, 5]
    assert choice.prompts[0].token_ids == tuple(sequences[0].input_ids[:10])
    assert choice.counts == {
        "prompts_in": 6,
        "evaluated": 3,
        "dropped_over_limit": 1,
        "dropped_prompt_too_long": 1,
        "dropped_not_supervised": 1,
    }
    with pytest.raises(ValueError, match="found none"):
        choose_prompts(sequences[2:3], CONFIG, max_model_len=110, num_speculative_tokens=4)


def test_changed_text_is_refused_with_its_place() -> None:
    prompts = [EvaluationPrompt("p7", "a", (1,), 9)]
    same, other = ServedAnswer((5, 6, 7)), ServedAnswer((5, 8))
    options = {"near_tie_nat": 0.0, "text_of": "<{}>".format}
    assert check_text(prompts, [same], [same], **options) == 0
    with pytest.raises(RuntimeError, match=r"prompt p7, answer token 1: '<8>' \(id 8\) with the draft, '<6>'"):
        check_text(prompts, [other], [same], **options)
    with pytest.raises(RuntimeError, match=r"answer token 2: the end \(id -1\) with the draft"):
        check_text(prompts, [ServedAnswer((5, 6))], [same], **options)


def test_near_tie_is_only_the_second_best_token_within_the_gap() -> None:
    prompts = [EvaluationPrompt("p", "a", (1,), 9)]
    target = ServedAnswer((5, 6), runner_up=((9, 1.0), (8, 0.1)))
    options = {"near_tie_nat": 0.25, "text_of": str}
    assert check_text(prompts, [ServedAnswer((5, 8))], [target], **options) == 1
    for token_ids in ((5, 7), (9, 6)):
        with pytest.raises(RuntimeError, match="greedy text changes"):
            check_text(prompts, [ServedAnswer(token_ids)], [target], **options)


def test_counts_that_disagree_are_refused() -> None:
    answer = ServedAnswer((1, 2, 3, 4), rounds_by_accepted=(1, 1, 0), drafted=4)  # 1 + (0 + 1) + (1 + 1) tokens
    counters = SpeculationCounters(2, 4, 1, (1, 0))
    check_counts([answer], counters, 2)
    with pytest.raises(RuntimeError, match="counters"):
        check_counts([answer], replace(counters, accepted=2), 2)
    with pytest.raises(RuntimeError, match="cannot give 5 tokens"):
        check_counts([replace(answer, token_ids=(1, 2, 3, 4, 5))], counters, 2)
    with pytest.raises(RuntimeError, match="max_num_batched_tokens"):
        check_counts([replace(answer, drafted=3)], replace(counters, drafted=3), 2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Corpus, Calibration]:
    """A random target, a corpus of random prompts and a draft that is often right."""
    root = tmp_path_factory.mktemp("served")
    folder = write_servable_target(root / "model")
    target = artifact(Target, root / "target", target_facts(folder))
    corpus = artifact(Corpus, root / "corpus", {"temperature": 0.0})
    conversations = [conversation(f"{domain}{i}", domain, 9 + i, 6) for domain in "ab" for i in range(3)]
    write_shard(corpus.path / "evaluation-00000.parquet", conversations)
    calibration = artifact(Calibration, root / "calibration", {})
    export_draft(markov_draft(folder), calibration.checkpoint)
    return target, corpus, calibration


def simulated(target: Target, checkpoint: Path, prompt: EvaluationPrompt, answer: ServedAnswer) -> np.ndarray:
    """Rounds by accepted tokens, int64 [K], that the reference drafting gives on the served text.

    A last round that agrees to the end of the text is left out: what followed was cut.
    """
    ids = np.array([*prompt.token_ids, *answer.token_ids], dtype=np.int32)
    batch = packed(target.folder, [TokenSequence(prompt.id, "", ids, np.ones(len(ids), bool))])
    model, rounds_K = load_draft(checkpoint, target.folder), np.zeros(DRAFT.num_speculative_tokens + 1, dtype=int)
    anchor = len(prompt.token_ids)  # the first answer token comes from the prefill
    while anchor + 1 < len(ids):
        drafted = draft_blocks(model, batch, torch.tensor([anchor])).tokens_AB[0].tolist()
        known = list(zip(drafted, ids[anchor + 1 :].tolist(), strict=False))
        accepted = next((k for k, (ours, theirs) in enumerate(known) if ours != theirs), len(known))
        if accepted == len(known) < len(drafted):
            break
        rounds_K[accepted] += 1
        anchor += accepted + 1
    return rounds_K


def all_end(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.e2e
def test_draft_served_by_vllm(
    cluster: None, served: tuple[Target, Corpus, Calibration], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is unchanged, rounds are those of the reference drafting, the gate holds, a second try serves nothing."""
    target, corpus, calibration = served
    with Workspace(tmp_path / "report", "r").locked() as out:
        gated, pids = replace(CONFIG, min_acceptance_length=4.9), []

        @contextmanager
        def watched(spec: ServingSpec) -> Iterator[Any]:
            with serving(spec) as actor:
                pids.append(actor.__ray_call__.remote(lambda _: os.getpid()))
                yield actor

        monkeypatch.setattr("stages.evaluate.serve.serving", watched)
        with pytest.raises(RuntimeError, match=r"min_acceptance_length=4\.9"):
            stage.run(gated, *served, draft=MARKOV_DRAFT, engine=ENGINE, out=out)
        assert len(pids) == 2
        assert all_end(ray.get(pids), within_s=10)
        options = {"max_model_len": ENGINE.max_model_len, "num_speculative_tokens": DRAFT.num_speculative_tokens}
        prompts = choose_prompts(corpus.sequences("evaluation"), CONFIG, **options).prompts
        answers = ServedFiles(out.path / stage.WORK).read("draft", prompts).answers
        for prompt, answer in zip(prompts, answers, strict=True):
            rest_K = np.array(answer.rounds_by_accepted) - simulated(target, calibration.checkpoint, prompt, answer)
            assert rest_K.min() >= 0
            assert rest_K.sum() <= 1
        outcomes = np.array([answer.rounds_by_accepted for answer in answers]).sum(axis=0)
        assert (outcomes > 0).sum() >= 3, f"rounds too alike to tell a miscount: {outcomes}"
        monkeypatch.setattr("stages.evaluate.serve.serving", None)
        report = stage.run(CONFIG, *served, draft=MARKOV_DRAFT, engine=ENGINE, out=out)
    assert report == Report.load(tmp_path / "report")
    told = json.loads((report.path / "report.json").read_text())
    assert report.record.counts["prompts_in"] == 6
    assert report.record.counts["evaluated"] == 4
    assert report.record.counts["rounds"] >= 8
    assert report.record.counts["accepted"] == int(outcomes @ np.arange(len(outcomes)))
    assert 2.5 < report.record.metrics["acceptance_length_macro"] < 5.0
    assert told["text"] == {"compared": 4, "near_ties": 0}
    assert told["draft"]["weights_sha256"].keys() == {"model.safetensors"}
    assert told["engine"]["vllm"].startswith("0.")
    assert {path.name for path in report.path.iterdir()} == {
        "record.json", "report.json", "report.md", "acceptance.png", "positions.png",
    }  # fmt: skip


@contextmanager
def hung(spec: ServingSpec) -> Iterator[object]:
    class Hung:  # local, so that Ray sends the class itself
        def describe(self) -> dict[str, str]:
            return {}

        def serve(self, prompts: object) -> None:
            time.sleep(600)

    actor = ray.remote(num_cpus=0)(Hung).remote()
    yield actor
    ray.kill(actor)


@pytest.mark.e2e
def test_server_that_hangs_is_given_up(
    cluster: None, served: tuple[Target, Corpus, Calibration], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.evaluate.serve.serving", hung)
    config = replace(CONFIG, chunk_timeout_s=0.5)
    with (
        Workspace(tmp_path / "report", "r").locked() as out,
        pytest.raises(EngineError, match=r"no answer within evaluate\.chunk_timeout_s=0\.5 \(log: .*draft\.log"),
    ):
        stage.run(config, *served, draft=MARKOV_DRAFT, engine=ENGINE, out=out)


@pytest.mark.e2e
def test_server_that_cannot_start_says_why(
    cluster: None, served: tuple[Target, Corpus, Calibration], tmp_path: Path
) -> None:
    target, _, _ = served
    empty = tmp_path / "empty"
    empty.mkdir()
    spec = serving_spec(target, ENGINE, tmp_path / "bad.log", draft=empty, num_speculative_tokens=4, cpus=0.5)
    with serving(spec) as actor, pytest.raises(ray.exceptions.RayActorError, match=f"serving {empty} did not start"):
        ray.get(actor.describe.remote())
