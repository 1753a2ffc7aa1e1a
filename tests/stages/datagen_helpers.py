"""A byte-level target without weights, and a pool whose answers are a pure function of the request."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stages.artifacts import RECORD, Record, write_json
from stages.engine.requests import GenerationRequest, GenerationResult
from stages.target import Target

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END_OF_TURN = "<|im_end|>"


def save_tokenizer(folder: Path, chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges; any text and any bytes round trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
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
    folder.mkdir(parents=True)
    save_tokenizer(folder, chat_template)
    facts = {"built": False, "model": str(folder), "revision": "r1", "trust_remote_code": False, "shape": {}}
    write_json(root / RECORD, Record("Target", "target-id", 1, {}, {}, {}, {}, facts, "", "", 0.0).__dict__)
    return Target.load(root)


Answer = Callable[[GenerationRequest, Any], GenerationResult]


def plain_answer(request: GenerationRequest, tokenizer: Any) -> GenerationResult:
    """A text that depends on prompt and seed, then the end of turn."""
    number = zlib.crc32(repr((request.prompt_token_ids, request.seed)).encode())
    ids = tokenizer(f"the answer is number {number}", add_special_tokens=False).input_ids
    return GenerationResult(request.id, (*ids, tokenizer.eos_token_id), "stop")


@dataclass
class FakePool:
    """Stands in for `extractor_pool`: counts starts and requests, and dies after `crash_after` answers."""

    tokenizer: Any
    answer: Answer = plain_answer
    crash_after: int | None = None
    starts: int = 0
    open: bool = False
    requests: list[GenerationRequest] = field(default_factory=list)

    @contextmanager
    def __call__(
        self, target: Target, layer_ids: Any, engine: Any, hidden_states: Any, *, work: Path
    ) -> Iterator[FakePool]:
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
