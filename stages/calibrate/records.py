"""What the draft said of its own tokens, and what became of them.

The corpus holds the target's greedy text, so "the drafted token equals the text" is exactly "greedy
verification accepts it" as long as every earlier token of the block was accepted. No engine has to
verify anything. That argument fails for sampled text, which `require_greedy` refuses.

Legend: N blocks, A anchors of one sequence, B positions of a block.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from speculators.models.dspark import DSparkDraftModel

from stages.calibrate.config import CalibrateConfig
from stages.corpus import Corpus, TokenSequence
from stages.draft.anchors import label_mask, sample_anchors
from stages.draft.batch import PackedBatch
from stages.draft.model import block_positions
from stages.draft.speculate import draft_blocks
from stages.hidden_states.wire import HiddenStatesReader

PROVENANCE = b"provenance"


@dataclass(frozen=True)
class Records:
    """One row per drafted block, with where it comes from."""

    prompt_N: np.ndarray  # str: id of the conversation
    anchor_N: np.ndarray  # int64: position of the anchor in it
    logits_NB: np.ndarray  # float32: uncalibrated confidence logits
    accepted_N: np.ndarray  # int64: length of the accepted prefix, 0 to B
    verified_N: np.ndarray  # int64: drafted tokens that the text could judge
    provenance: Mapping[str, Any]  # JSON values; `calibrated` says whether the head was, when it drafted

    def __len__(self) -> int:
        return len(self.accepted_N)

    def take(self, chosen_N: np.ndarray) -> Records:
        """The rows where bool [N] is true."""
        names = ("prompt_N", "anchor_N", "logits_NB", "accepted_N", "verified_N")
        return replace(self, **{name: getattr(self, name)[chosen_N] for name in names})


def require_greedy(corpus: Corpus) -> None:
    """Raise ValueError unless the corpus is the target's greedy text."""
    temperature = corpus.record.facts["temperature"]
    if temperature != 0:
        raise ValueError(
            f"calibrate: expected a corpus with datagen.temperature=0, found {temperature}; "
            "sampled text does not tell what the target accepts: run datagen greedily for the calibration prompts"
        )


def collect(
    reader: HiddenStatesReader,
    model: DSparkDraftModel,
    sequences: Sequence[TokenSequence],
    config: CalibrateConfig,
    provenance: Mapping[str, Any],
    progress: Callable[[int], None],
) -> tuple[Records, dict[str, int]]:
    """Draft from anchors of every sequence; records in the corpus' order, and the counts of all that came in.

    prompts_in = prompts_used + prompts_without_block + prompts_set_aside, and
    anchors = blocks + anchors_cut_short (the answer ends inside the block, so some tokens have no judge).
    """
    counts = Counter(prompts_in=len(sequences), prompts_used=0, prompts_without_block=0, prompts_set_aside=0)
    counts |= Counter(anchors=0, blocks=0, anchors_cut_short=0)
    parts: list[Records] = []
    for done, hidden in enumerate(reader.read([s] for s in sequences), start=1):
        counts["prompts_set_aside"] += len(hidden.set_aside)
        for document in PackedBatch.from_hidden(hidden).documents():
            part, anchors = _draft_document(model, document, config, provenance)
            counts["anchors"] += anchors
            counts["blocks"] += len(part)
            counts["anchors_cut_short"] += anchors - len(part)
            counts["prompts_used" if len(part) else "prompts_without_block"] += 1
            parts.append(part)
        progress(done)
    settled = counts["prompts_used"] + counts["prompts_without_block"] + counts["prompts_set_aside"]
    if settled != counts["prompts_in"]:
        raise RuntimeError(
            f"calibrate: {counts['prompts_in']} prompts asked for, {settled} accounted for ({dict(counts)})"
        )
    return _joined(parts, provenance), dict(counts)


def save(records: Records, path: Path) -> None:
    """Write Parquet with the provenance in the schema's metadata. Written beside, then renamed."""
    table = pa.table(
        {
            "prompt": pa.array(records.prompt_N.tolist(), pa.string()),
            "anchor": pa.array(records.anchor_N, pa.int64()),
            "logits": pa.array(list(records.logits_NB), pa.list_(pa.float32())),
            "accepted": pa.array(records.accepted_N, pa.int64()),
            "verified": pa.array(records.verified_N, pa.int64()),
        }
    ).replace_schema_metadata({PROVENANCE: json.dumps(records.provenance, sort_keys=True).encode()})
    beside = path.with_name(f".{path.name}.partial")
    pq.write_table(table, beside, compression="zstd")
    beside.replace(path)


def load(path: Path) -> Records:
    """Read what `save` wrote. Raises ValueError when rows differ in their number of positions."""
    table = pq.read_table(path)
    rows = table.column("logits").to_pylist()
    provenance = json.loads(table.schema.metadata[PROVENANCE])
    num_positions = len(rows[0]) if rows else provenance["num_positions"]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{path}: expected one logit per position in every row, found rows of different length")
    return Records(
        np.array(table.column("prompt").to_pylist(), dtype=object),
        table.column("anchor").to_numpy(),
        np.array(rows, dtype=np.float32).reshape(len(rows), num_positions),
        table.column("accepted").to_numpy(),
        table.column("verified").to_numpy(),
        provenance,
    )


def check_records(records: Records, num_positions: int, min_records: int) -> None:
    """Raise ValueError for records that a fit must not see: too few, truncated, not finite, calibrated."""
    if records.provenance.get("calibrated") is not False:
        raise ValueError(
            "calibration records: expected those of an uncalibrated head, found a calibrated or unknown one"
        )
    if len(records) < max(1, min_records):
        raise ValueError(
            f"calibration records: expected at least calibrate.min_records={min_records} blocks, found {len(records)}; "
            "raise datagen.calibration_share or calibrate.max_anchors_per_sequence"
        )
    if records.logits_NB.shape[1] != num_positions or not np.isfinite(records.logits_NB).all():
        raise ValueError(
            f"calibration records: expected {num_positions} finite logits a block, found {records.logits_NB.shape[1]} "
            f"({int((~np.isfinite(records.logits_NB)).sum())} not finite)"
        )
    # A prefix cut off by the end of the text reads like a rejection: a fit on such rows is biased low.
    cut = int((records.verified_N != num_positions).sum())
    if cut or records.accepted_N.min() < 0 or records.accepted_N.max() > num_positions:
        raise ValueError(
            f"calibration records: expected {num_positions} verified tokens in every block, {cut} are truncated"
        )


def _draft_document(
    model: DSparkDraftModel, document: PackedBatch, config: CalibrateConfig, provenance: Mapping[str, Any]
) -> tuple[Records, int]:
    """Records of one sequence, and how many anchors were drawn for it."""
    (id_,) = document.ids
    drawn = sample_anchors(
        document.loss_mask_T.numpy(), config.max_anchors_per_sequence, key=(config.seed, "calibrate", id_)
    )
    num_positions = int(provenance["num_positions"])
    anchors_A = torch.from_numpy(drawn)
    verified_A = label_mask(document, anchors_A, num_positions).sum(dim=1)
    anchors_A = anchors_A[verified_A == num_positions]
    if len(anchors_A) == 0:
        return _joined([], provenance), len(drawn)
    drafted = draft_blocks(model, document, anchors_A)
    if drafted.confidence_logits_AB is None:
        raise ValueError("calibrate: expected a draft with a confidence head, found none; was it lost on export?")
    text_AB = document.input_ids_T[block_positions(document, anchors_A + 1, num_positions)]
    accepted_A = (drafted.tokens_AB == text_AB).long().cumprod(dim=1).sum(dim=1)
    rows = len(anchors_A)
    return Records(
        np.array([id_] * rows, dtype=object),
        anchors_A.numpy(),
        drafted.confidence_logits_AB.float().numpy(),
        accepted_A.numpy(),
        np.full(rows, num_positions, dtype=np.int64),
        provenance,
    ), len(drawn)


def _joined(parts: Iterable[Records], provenance: Mapping[str, Any]) -> Records:
    parts = [part for part in parts if len(part)]
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Records(
            np.zeros(0, dtype=object),
            none,
            np.zeros((0, provenance["num_positions"]), np.float32),
            none,
            none,
            provenance,
        )
    return Records(
        np.concatenate([p.prompt_N for p in parts]),
        np.concatenate([p.anchor_N for p in parts]),
        np.concatenate([p.logits_NB for p in parts]),
        np.concatenate([p.accepted_N for p in parts]),
        np.concatenate([p.verified_N for p in parts]),
        provenance,
    )
