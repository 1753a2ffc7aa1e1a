"""Trains the tiny target from nothing and writes it as a Hugging Face folder.

Owns model, training loop and the check of what was exported. Sentences come from `domains.py`.
The same config gives the same bits, wherever `THREADS` threads run the same kernels.

Shapes: B rows, S tokens a row, N answer tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stages.tiny_target.config import TinyTargetConfig, check_tiny
from stages.tiny_target.domains import Sample, prompt_samples, samples
from stages.tiny_target.tokenizer import END, train_tokenizer

Progress = Callable[[int, int, dict[str, float]], None]
"""Called with (step, steps, metrics)."""

THREADS: Final = 1
"""Threads of the training: fixed, so that the bits are. A second one gains little on matrices this small, and
costs minutes when it has to share its core."""
SAMPLES_PER_DOMAIN: Final = 1200
PROGRESS_EVERY_STEPS: Final = 50
SORT_WINDOW_BATCHES: Final = 32
WEIGHT_STD: Final = 0.06
"""Initial standard deviation. The usual 0.02 suits wider models; this one learns far later with it."""
EMBEDDING_STD: Final = 1.0
IGNORE: Final = -100
"""Label of a token without loss."""


@dataclass(frozen=True)
class _Row:
    """One conversation: its tokens, and how many of them (prompt and template) come before the answer."""

    ids: list[int]
    prompt_len: int


@dataclass(frozen=True)
class _Batch:
    """`ids_BS` int64, right-padded, and `labels_BS`: the same, `IGNORE` outside the answers."""

    ids_BS: torch.Tensor
    labels_BS: torch.Tensor


def build(config: TinyTargetConfig, out: Path, on_progress: Progress | None = None) -> dict[str, float]:
    """Writes the folder `out` and returns what it cost and how well the exported model answers.

    `greedy_exact_match_share` is the share of the prompt file's prompts, none of them trained on,
    that greedy decoding answers to the letter; one more key a domain, `..._share_<domain>`.
    """
    check_tiny(config)
    started = time.monotonic()
    held_out = prompt_samples()
    taken = {sample.prompt for sample in held_out}
    drawn = samples(config.seed, SAMPLES_PER_DOMAIN)
    training = [sample for sample in drawn if sample.prompt not in taken]
    texts = [text for sample in training for text in (sample.prompt, sample.answer)]
    # Sums are learned token by token, so each number is made one.
    texts += [f" {number}" for number in range(31)] * 400
    tokenizer = train_tokenizer(texts, config.vocab_size, config.max_position_embeddings)

    with _torch_threads(THREADS):
        model = _new_model(config, tokenizer)
        train_loss_nat = _train(model, config, _encode(tokenizer, training), on_progress)
        _export(model, tokenizer, out)
        shares = _exact_match(out, held_out, _encode(tokenizer, held_out))
    return {"train_loss_nat": train_loss_nat, "build_s": time.monotonic() - started} | shares


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _encode(tokenizer: PreTrainedTokenizerFast, chosen: list[Sample]) -> list[_Row]:
    """Renders with the chat template; an answer ends in its end-of-turn token."""
    turns = [[{"role": "user", "content": sample.prompt}] for sample in chosen]
    prompts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    full = [prompt + s.answer + END for prompt, s in zip(prompts, chosen, strict=True)]
    prompt_ids, full_ids = tokenizer(prompts)["input_ids"], tokenizer(full)["input_ids"]
    return [_Row(ids, len(head)) for ids, head in zip(full_ids, prompt_ids, strict=True)]


def _new_model(config: TinyTargetConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Fresh fp32 weights from the config's seed; the global random state stays as it was."""
    shape = Qwen3Config(
        vocab_size=config.vocab_rows,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=WEIGHT_STD,
        # Readers of a target look for an `lm_head.weight` of its own in the file.
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(shape)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        # Starting as if tied makes copying a word from the prompt easy; training then parts the two.
        model.lm_head.weight.copy_(embedding)
        # Words of one kind get the same gradients. Were their rows small, what is common would soon
        # outgrow what tells them apart, and Anna would be answered for Clara.
        embedding.mul_(EMBEDDING_STD / WEIGHT_STD)
        # Attention that starts nearly flat finds sooner what to look at.
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.fill_(0.7)
            layer.self_attn.k_norm.weight.fill_(0.7)
    return model


def _batches(rows: list[_Row], config: TinyTargetConfig, pad: int) -> Iterator[_Batch]:
    """Endless batches; rows of one length go together, within a window so that domains still mix."""
    rng = random.Random(config.seed)
    size, window = config.batch_rows, config.batch_rows * SORT_WINDOW_BATCHES
    while True:
        epoch = rng.sample(rows, len(rows))
        for start in range(0, len(epoch), window):
            near = sorted(epoch[start : start + window], key=lambda row: len(row.ids))
            groups = [near[i : i + size] for i in range(0, len(near), size)]
            rng.shuffle(groups)
            yield from (_collate(group, pad) for group in groups)


def _collate(rows: list[_Row], pad: int) -> _Batch:
    longest = max(len(row.ids) for row in rows)
    ids_BS = torch.full((len(rows), longest), pad)
    labels_BS = torch.full((len(rows), longest), IGNORE)
    for i, row in enumerate(rows):
        ids_BS[i, : len(row.ids)] = torch.tensor(row.ids)
        labels_BS[i, row.prompt_len : len(row.ids)] = ids_BS[i, row.prompt_len : len(row.ids)]
    return _Batch(ids_BS, labels_BS)


def _loss_nat(model: Qwen3ForCausalLM, batch: _Batch) -> torch.Tensor:
    """Mean over the labelled tokens. No attention mask: padding is on the right, attention causal."""
    hidden_BSD = model.model(input_ids=batch.ids_BS, use_cache=False).last_hidden_state
    next_BS = batch.labels_BS[:, 1:]
    labelled_BS = next_BS != IGNORE
    # The head runs where there is a loss only: it is the widest matrix of the model.
    logits_NV = model.lm_head(hidden_BSD[:, :-1][labelled_BS])
    return F.cross_entropy(logits_NV, next_BS[labelled_BS])


def _train(model: Qwen3ForCausalLM, config: TinyTargetConfig, rows: list[_Row], report: Progress | None) -> float:
    """Returns the mean loss in nat over the last `PROGRESS_EVERY_STEPS` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    recent: list[float] = []
    model.train()
    batches = _batches(rows, config, pad=model.config.pad_token_id)
    for step, batch in zip(range(config.steps), batches, strict=False):
        warm = min(1.0, (step + 1) / config.warmup_steps)
        lr = config.lr * warm * (0.5 + 0.5 * math.cos(math.pi * step / config.steps))
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = _loss_nat(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent = [*recent[1 - PROGRESS_EVERY_STEPS :], loss.item()]
        if report and ((step + 1) % PROGRESS_EVERY_STEPS == 0 or step + 1 == config.steps):
            mean = sum(recent) / len(recent)
            report(step + 1, config.steps, {"train_loss_nat": mean, "learning_rate": lr})
    return sum(recent) / len(recent)


def _export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


@torch.inference_mode()
def _exact_match(out: Path, held_out: list[Sample], rows: list[_Row]) -> dict[str, float]:
    """Reads the folder back and asks, at every answer token, whether it is the likeliest one.

    Greedy decoding gives the answer to the letter if and only if that holds for all of its tokens,
    so one pass over the finished text replaces decoding.
    """
    model = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    right: dict[str, list[bool]] = {}
    for start in range(0, len(rows), 40):
        batch = _collate(rows[start : start + 40], pad=model.config.pad_token_id)
        best_BS = model(input_ids=batch.ids_BS, use_cache=False).logits[:, :-1].argmax(-1)
        next_BS = batch.labels_BS[:, 1:]
        good = ((best_BS == next_BS) | (next_BS == IGNORE)).all(dim=1).tolist()
        for sample, ok in zip(held_out[start : start + 40], good, strict=True):
            right.setdefault(sample.domain, []).append(ok)
    hits = [ok for domain in right.values() for ok in domain]
    shares = {"greedy_exact_match_share": sum(hits) / len(hits)}
    for domain, oks in right.items():
        shares[f"greedy_exact_match_share_{domain}"] = sum(oks) / len(oks)
    return shares
