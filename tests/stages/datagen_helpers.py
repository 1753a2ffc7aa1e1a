"""A byte-level target without weights, a pool that answers as a pure function of the request, the stage on both."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stages.artifacts import RECORD, Record, Workspace, write_json
from stages.corpus import SPLITS, Corpus, TokenSequence
from stages.datagen import stage
from stages.datagen.config import DatagenConfig
from stages.datagen.template import ChatTemplate
from stages.engine.config import EngineConfig
from stages.engine.requests import GenerationRequest, GenerationResult
from stages.hidden_states.config import HiddenStatesConfig
from stages.hidden_states.contract import Agreement
from stages.hidden_states.proof import Proof
from stages.target import Target

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_OF_TURN = "<|im_end|>"
VOCAB_SIZE = 300
SHAPE = {"num_layers": 2, "hidden_size": 8, "vocab_size": VOCAB_SIZE, "max_positions": 4096}


def save_tokenizer(folder: Path, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges; any text and any bytes round trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["user assistant system answer number the word of what is"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token="<|endoftext|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_target(root: Path, chat_template: str | None = CHATML) -> Target:
    """A target artifact with a tokenizer and no weights."""
    folder = root / "model"
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder, chat_template)
    facts = {"built": False, "model": str(folder), "revision": "r1", "trust_remote_code": False, "shape": SHAPE}
    write_json(root / RECORD, Record("Target", "target-id", 1, {}, {}, {}, {}, facts, "", "", 0.0).__dict__)
    return Target.load(root)


Answer = Callable[[GenerationRequest, Any], GenerationResult]
PROOF = Proof(Agreement(0.01, 1.0, 3.0, 700), {1: 2.0, 3: 4.0})


def plain_answer(request: GenerationRequest, tokenizer: Any) -> GenerationResult:
    """A text that depends on prompt and seed, then the end of turn."""
    number = zlib.crc32(repr((request.prompt_token_ids, request.seed)).encode())
    ids = tokenizer(f"the answer is number {number}", add_special_tokens=False).input_ids
    return GenerationResult(request.id, (*ids, tokenizer.eos_token_id), "stop")


@dataclass
class FakePool:
    """Stands in for the stage's engines: counts starts and requests, and dies after `crash_after` answers."""

    tokenizer: Any
    answer: Answer = plain_answer
    crash_after: int | None = None
    starts: int = 0
    open: bool = False
    proof: Proof = PROOF
    requests: list[GenerationRequest] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> FakePool:
        patch.setattr(stage, "extractor_pool", lambda *_, **__: nullcontext(self))
        patch.setattr(stage, "EnginePool", self)
        return self

    @contextmanager
    def __call__(self, config: EngineConfig, args: dict[str, Any], work: Path) -> Iterator[FakePool]:
        self.starts, self.open = self.starts + 1, True
        try:
            yield self
        finally:
            self.open = False

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[GenerationResult]:
        for request in reversed(list(requests)):  # any order is allowed
            if self.crash_after is not None and len(self.requests) >= self.crash_after:
                raise RuntimeError("the engine died")
            self.requests.append(request)
            yield self.answer(request, self.tokenizer)


def write_prompts(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def run_datagen(folder: Path, target: Target, rows: list[Any], name: str = "corpus", **values: Any) -> Corpus:
    """The stage on `rows`; what it leaves lies in `folder / name`."""
    config = DatagenConfig(
        prompts=(write_prompts(folder / "chat.jsonl", rows),),
        **{"max_new_tokens": 64, "min_supervised_tokens": 2, **values},
    )
    out = Workspace(final=folder / name, identity="x")
    engine, hidden_states = EngineConfig(max_model_len=1024, kv_cache_gib=1.0), HiddenStatesConfig()
    with out.locked():
        return stage.run(config, target, engine=engine, hidden_states=hidden_states, layer_ids=(1, 3), out=out)


def everything(corpus: Corpus) -> dict[str, TokenSequence]:
    return {s.id: s for split in SPLITS for s in corpus.sequences(split)}


def supervised_spans(sequence: TokenSequence, template: ChatTemplate) -> list[str]:
    """Texts of the runs of ids under the loss mask."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sequence.loss_mask, [False]]).astype(int)))
    return [template.decode(sequence.input_ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


def unsupervised_start(sequence: TokenSequence, template: ChatTemplate) -> str:
    """What the target reads before its first supervised token."""
    return template.decode(sequence.input_ids[: np.argmax(sequence.loss_mask)].tolist())


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".parquet" or p.name == "set_aside.jsonl"}
