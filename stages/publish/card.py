"""The model card: metadata that the Hub accepts, and a text with numbers that are in the release."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from stages.corpus import Corpus
from stages.draft.artifact import Calibration
from stages.publish.config import PublishConfig
from stages.target import Target

TAGS = ("speculators", "dspark", "speculative-decoding", "vllm")


def model_card(
    config: PublishConfig,
    target: Target,
    corpus: Corpus,
    calibration: Calibration,
    report: Mapping[str, Any],
    report_text: str,
    serving: Mapping[str, Any],
) -> str:
    """README.md of a release. Raises ValueError when the metadata does not survive the Hub's own parser."""
    data = ModelCardData(
        model_name=title(config, target),
        license=config.license,
        base_model=hub_id(target),
        library_name="speculators",
        pipeline_tag="text-generation",
        tags=list(TAGS),
    )
    text = f"---\n{data.to_yaml()}\n---\n\n{_body(config, target, corpus, calibration, report, report_text, serving)}"
    parsed = ModelCard(text, ignore_metadata_errors=False).data.to_dict()
    if parsed != data.to_dict():
        raise ValueError(f"README.md: expected metadata {data.to_dict()}, the Hub's parser reads {parsed}")
    return text


def title(config: PublishConfig, target: Target) -> str:
    """`publish.name`, else one made of the target's name."""
    name = "tiny" if target.record.facts["built"] else Path(target.model).name
    return config.name or f"{name}-speculator.dspark"


def hub_id(target: Target) -> str | None:
    """The target's Hub id; None for a local folder, which the Hub would refuse as base model."""
    return None if target.record.facts["built"] or Path(target.model).is_absolute() else target.model


def public_name(target: Target) -> str:
    """What a release calls the target: its Hub id, else a name without the folders of this machine."""
    return hub_id(target) or ("tiny-target" if target.record.facts["built"] else Path(target.model).name)


def _body(
    config: PublishConfig,
    target: Target,
    corpus: Corpus,
    calibration: Calibration,
    report: Mapping[str, Any],
    report_text: str,
    serving: Mapping[str, Any],
) -> str:
    served_target = public_name(target)
    macro = report["acceptance"]["macro"]["acceptance_length"]
    length = "not measured" if macro is None else f"{macro:.2f}"
    return f"""# {title(config, target)}

A [DSpark](https://github.com/deepseek-ai/DeepSpec) speculative-decoding draft for {served_target}, in the
speculators format. Served acceptance length {length} (mean over domains, greedy, bonus token included).
Text is the target's own: speculation changes speed only.

## Serve with vLLM

```bash
vllm serve {served_target} --speculative-config '{json.dumps(serving)}'
```

`speculative_config.json` is the same configuration as a file; in a downloaded folder set its `model` to that folder,
and `{served_target}` to where the target lies.

{report_text.replace("# Served acceptance", "## Served acceptance", 1)}
## Confidence

{_confidence(calibration)}

## Training data

{_answers(corpus)} Corpus `{corpus.identity}`: {", ".join(f"{k} {n:,}" for k, n in corpus.record.counts.items() if n)}.
Training, calibration and evaluation share no prompt.

## Limits

- Acceptance was measured greedily, on held-out prompts of the same sources as the training data; other domains,
  languages, longer contexts and sampling at a temperature can be accepted less.
- The draft fits this target only: {served_target}{_revision(target)}.
- Speed depends on hardware and load, and is not promised here.

`provenance.json` names every configuration value and input; `SHA256SUMS` covers all files (`sha256sum -c SHA256SUMS`).
"""


def _answers(corpus: Corpus) -> str:
    facts = corpus.record.facts
    if facts.get("answers") == "given":
        return "Conversations with the answers that their sources gave; the target did not write them."
    sampling = ", ".join(f"{key} {facts.get(key)}" for key in ("temperature", "top_p", "max_new_tokens"))
    return f"Conversations whose answers the target wrote itself ({sampling})."


def _revision(target: Target) -> str:
    return "" if target.revision is None else f", revision {target.revision}"


def _confidence(calibration: Calibration) -> str:
    facts, metrics = calibration.record.facts, calibration.record.metrics
    if not facts["calibrated"]:
        return "This draft has no confidence head: adaptive verification is not available."
    if (facts["scale"], facts["shift"]) == (1.0, 0.0):
        told = "The confidence head is as trained: no map of its logit helped on prompts that the fit did not see."
    else:
        fold = f"{facts['scale']:.4g} z + {facts['shift']:.4g}"
        told = f"The confidence head is calibrated: the map {fold} of its logit z is folded into the weights."
    measured = "; ".join(
        f"{name.replace('_', ' ')} {metrics[f'ece_survival/{name}']:.3f}"
        for name in ("raw", "folded", "folded_and_scaled")
        if f"ece_survival/{name}" in metrics
    )
    flagged = [
        f"{f'temperature {k}' if k else 'the map'}: {flag}" for k, flag in enumerate(facts.get("flags", ())) if flag
    ]
    doubts = f" Not to be relied on: {', '.join(flagged)}." if flagged else ""
    return f"""{told}
Expected calibration error of survival there, mean over positions: {measured or "not measured"}.{doubts}
`confidence_calibration.json` holds per-position temperatures fitted after the fold,
for SGLang (TensorRT-LLM's spelling beside it is not verified against a release); both belong to head
`{facts["head_digest"][:16]}…` and to no other. All numbers are in `calibration.json`."""
