"""The report as data (`report.json`) and as text (`report.md`).

`report.json`:
    acceptance.macro     acceptance_length, interval            mean over domains
    acceptance.pooled    fields of `Acceptance`                 all rounds together
    acceptance.domains   domain -> fields of `Acceptance`
    text                 compared, near_ties                    greedy answers with and without the draft
    tokens               answers' tokens kept; tokens of the last rounds cut after the stop token
    draft                weights_sha256 (file -> hex), num_speculative_tokens, calibration identity
    target, corpus       identity and where the text comes from
    prompts              digest and counts (prompts_in = evaluated + dropped_…)
    sampling, engine     temperature, limits; versions and hardware
    served_s             seconds of serving, by role; in Triton's interpreter not a speed measurement
A number that no round can tell is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from stages.evaluate.acceptance import Acceptance


def acceptance_json(
    macro: tuple[float | None, tuple[float, float] | None], pooled: Acceptance, domains: Mapping[str, Acceptance]
) -> dict[str, Any]:
    """The `acceptance` part of the report."""
    return {
        "macro": {"acceptance_length": macro[0], "interval": macro[1]},
        "pooled": asdict(pooled),
        "domains": {domain: asdict(acceptance) for domain, acceptance in domains.items()},
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The report as one table and what is needed to believe it."""
    acceptance, draft, prompts, engine = (report[key] for key in ("acceptance", "draft", "prompts", "engine"))
    macro = acceptance["macro"]
    hardware = ", ".join(engine["gpus"]) or f"{engine['cpu']}, {engine['kernels']}"
    weights = "\n".join(f"| {name} | sha256 `{value}` |" for name, value in draft["weights_sha256"].items())
    return f"""# Served acceptance

{acceptance_table(acceptance)}

Macro acceptance length {_number(macro["acceptance_length"])} {_interval(macro["interval"])}: the mean over domains.
Acceptance length: tokens emitted a verification round, the bonus token included. Survival k: share of rounds
in which at least k drafted tokens were accepted. Intervals: 95 %, bootstrap over prompts.

Greedy text with and without the draft agreed token by token in {report["text"]["compared"]} answers \
({report["text"]["near_ties"]} of them up to a near tie).

| | |
|---|---|
{weights}
| drafted tokens a round | {draft["num_speculative_tokens"]} |
| target | {report["target"]["model"]} (`{report["target"]["identity"]}`) |
| corpus | `{report["corpus"]["identity"]}`, prompts of its evaluation split |
| answers | written by the target in this evaluation, temperature {report["sampling"]["temperature"]:g} |
| prompts | {prompts["counts"]["evaluated"]} of {prompts["counts"]["prompts_in"]}, digest `{prompts["digest"]}` |
| engine | vLLM {engine["vllm"]}, {engine["dtype"]}, {hardware} |
"""


def acceptance_table(acceptance: Mapping[str, Any]) -> str:
    """One row per domain and one for all rounds together."""
    size = len(acceptance["pooled"]["survival"])
    head = ["domain", "prompts", "rounds", "acceptance length", "95 %", *(f"survival {k + 1}" for k in range(size))]
    named = [*acceptance["domains"].items(), ("**all rounds**", acceptance["pooled"])]
    rows = [
        [
            name,
            str(row["prompts"]),
            str(row["rounds"]),
            _number(row["acceptance_length"]),
            _interval(row["interval"]),
            *(_number(value) for value in row["survival"]),
        ]
        for name, row in named
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return "no rounds" if value is None else f"{value:.2f}"


def _interval(value: tuple[float, float] | list[float] | None) -> str:
    return "" if value is None else f"({value[0]:.2f} to {value[1]:.2f})"
