"""Evaluate: serve the draft in unmodified vLLM and measure, after the text was found unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.artifacts import Workspace, file_digest, write_json, write_whole
from stages.corpus import Corpus
from stages.draft.artifact import Calibration, Report
from stages.draft.config import DraftConfig, captured_layers
from stages.draft.layers import check_exported
from stages.engine.config import EngineConfig
from stages.engine.serving import Served, ServedAnswer, ServingSpec, serving_spec
from stages.evaluate.acceptance import Acceptance, by_domain, macro, pooled
from stages.evaluate.compare import GPU_NEAR_TIE_NAT, check_counts, check_text
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.plots import plot_lengths, plot_positions
from stages.evaluate.prompts import PromptChoice, choose_prompts, chunked
from stages.evaluate.report import acceptance_json, markdown
from stages.evaluate.serve import Role, ServedFiles, serve_all
from stages.target import Target

WORK = "served"
CHUNK_BATCHES = 4  # batches in one call: long answers of a chunk overlap with its next prompts


def run(
    config: EvaluateConfig,
    target: Target,
    corpus: Corpus,
    calibration: Calibration,
    *,
    draft: DraftConfig,
    engine: EngineConfig,
    out: Workspace,
) -> Report:
    """Serve held-out prompts greedily with and without the draft and report its acceptance.

    Raises ValueError when there is nothing to serve, EngineError when a server dies, and RuntimeError
    when the text differs, counts disagree, or the macro acceptance length is below
    `evaluate.min_acceptance_length` (the report is then in the workspace).
    """
    check_exported(captured_layers(draft, target.shape), calibration.checkpoint)
    specs = _specs(config, target, calibration, draft, engine, out.path)
    choice = choose_prompts(
        corpus.sequences("evaluation"),
        config,
        max_model_len=specs["draft"].max_model_len,
        num_speculative_tokens=draft.num_speculative_tokens,
    )
    chunks = chunked(choice.prompts, config.batch_sequences * CHUNK_BATCHES)
    files = ServedFiles(out.path / WORK)
    served_total = 2 * len(chunks)
    out.events.progress("starting vLLM", 0, served_total, "chunks")
    serve_all(
        specs,
        chunks,
        files,
        lambda done: out.events.progress("serving", done, served_total, "chunks"),
        config.chunk_timeout_s,
    )

    served: dict[Role, list[Served]] = {role: [files.read(role, chunk) for chunk in chunks] for role in specs}
    for part in served["draft"]:
        check_counts(part.answers, part.counters, draft.num_speculative_tokens)
    answers = {role: [answer for part in parts for answer in part.answers] for role, parts in served.items()}
    near_ties = check_text(
        choice.prompts,
        answers["draft"],
        answers["baseline"],
        near_tie_nat=GPU_NEAR_TIE_NAT if config.gpus else 0.0,
        text_of=_decoder(target),
    )
    domains, together, mean = _measure(config, choice, answers["draft"], draft.num_speculative_tokens)
    facts = _facts(config, target, corpus, calibration, draft, choice, files) | {
        "acceptance": acceptance_json(mean, together, domains),
        "text": {"compared": len(choice.prompts), "near_ties": near_ties},
        "tokens": _tokens(answers["draft"]),
        "served_s": {role: round(sum(part.seconds for part in parts), 3) for role, parts in served.items()},
    }
    _write(out.path, facts, domains, together)
    _gate(config, mean[0], out.path)
    return out.commit(
        Report,
        counts=choice.counts | {"rounds": together.rounds, "accepted": together.accepted, "near_ties": near_ties},
        metrics=_metrics(mean[0], together, domains),
        facts={key: facts[key] for key in ("draft", "prompts", "engine", "target", "corpus")},
        drop=[WORK],
    )


def weights_digests(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every safetensors file of a checkpoint, by file name."""
    return {path.name: file_digest(path) for path in sorted(checkpoint.glob("*.safetensors"))}


def _specs(
    config: EvaluateConfig,
    target: Target,
    calibration: Calibration,
    draft: DraftConfig,
    engine: EngineConfig,
    work: Path,
) -> dict[Role, ServingSpec]:
    shared: dict[str, Any] = {
        "batch_sequences": config.batch_sequences,
        "gpus": config.gpus,
        "cpus": config.cpus,
        "servers": 2,
    }
    return {
        "draft": serving_spec(
            target,
            engine,
            work / WORK / "draft.log",
            draft=calibration.checkpoint,
            num_speculative_tokens=draft.num_speculative_tokens,
            **shared,
        ),
        # The second best token is only needed to tell a near tie from a fault, and costs a compilation.
        "baseline": serving_spec(
            target, engine, work / WORK / "baseline.log", slot=1, runner_up=config.gpus > 0, **shared
        ),
    }


def _measure(
    config: EvaluateConfig, choice: PromptChoice, answers: Sequence[ServedAnswer], num_speculative_tokens: int
) -> tuple[dict[str, Acceptance], Acceptance, tuple[float | None, tuple[float, float] | None]]:
    empty = (0,) * (num_speculative_tokens + 1)
    rounds = {
        domain: np.array(
            [a.rounds_by_accepted or empty for p, a in zip(choice.prompts, answers, strict=True) if p.domain == domain],
            dtype=np.int64,
        )
        for domain in choice.domains
    }
    options = {"samples": config.bootstrap_samples, "seed": config.seed}
    return by_domain(rounds, **options), pooled(rounds, **options), macro(rounds, **options)


def _facts(
    config: EvaluateConfig,
    target: Target,
    corpus: Corpus,
    calibration: Calibration,
    draft: DraftConfig,
    choice: PromptChoice,
    files: ServedFiles,
) -> dict[str, Any]:
    return {
        "draft": {
            "weights_sha256": weights_digests(calibration.checkpoint),
            "num_speculative_tokens": draft.num_speculative_tokens,
            "calibration": calibration.identity,
        },
        "target": {"model": target.model, "revision": target.revision, "identity": target.identity},
        "corpus": {"identity": corpus.identity, "split": "evaluation", "facts": corpus.record.facts},
        "prompts": {"digest": choice.digest, "counts": choice.counts},
        "sampling": {"temperature": 0.0, "max_new_tokens": config.max_new_tokens, "written_by": target.model},
        "engine": files.read_engine(),
    }


def _tokens(answers: Sequence[ServedAnswer]) -> dict[str, int]:
    kept = sum(len(answer.token_ids) for answer in answers)
    emitted = sum(1 + answer.accepted + answer.rounds for answer in answers)  # 1: from the prefill
    return {"kept": kept, "cut_after_stop": emitted - kept}


def _metrics(mean: float | None, together: Acceptance, domains: dict[str, Acceptance]) -> dict[str, float]:
    values = {"acceptance_length_macro": mean, "acceptance_length_pooled": together.acceptance_length}
    values |= {f"acceptance_length/{domain}": acceptance.acceptance_length for domain, acceptance in domains.items()}
    return {key: value for key, value in values.items() if value is not None}


def _write(folder: Path, facts: dict[str, Any], domains: dict[str, Acceptance], together: Acceptance) -> None:
    write_json(folder / "report.json", facts)
    write_whole(folder / "report.md", markdown(facts))
    plot_lengths(domains, together, folder / "acceptance.png")
    plot_positions(domains, together, folder / "positions.png")


def _gate(config: EvaluateConfig, mean: float | None, folder: Path) -> None:
    least = config.min_acceptance_length
    if least is not None and (mean is None or mean < least):
        raise RuntimeError(
            f"evaluate.min_acceptance_length={least}: the macro acceptance length is {mean} "
            f"({folder / 'report.md'}); train longer, or lower the gate"
        )


def _decoder(target: Target) -> Callable[[int], str]:
    """Decode one token; the tokenizer is only loaded when a difference has to be shown."""

    def text_of(token: int) -> str:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(target.folder, trust_remote_code=target.trust_remote_code)
        return str(tokenizer.decode([token]))

    return text_of
