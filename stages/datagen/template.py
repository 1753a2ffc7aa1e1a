"""The chat template as exact token ids, and which of them the target wrote.

Text is tokenised once and generated ids are kept as they are, so that `input_ids` is what the
target really read and wrote; decoding and encoding again would not always give the same ids back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from transformers import AutoTokenizer

from stages.target import Target


class RewritesHistoryError(ValueError):
    """The template shows an earlier answer differently from how the target wrote it."""


@dataclass(frozen=True)
class ChatTemplate:
    """A target's tokenizer and chat template."""

    tokenizer: Any  # transformers' tokenizers share no usable static type
    sha256: str  # of the template's text
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, target: Target, thinking: str) -> Self:
        """Read the tokenizer of `target`. Raises ValueError when it has no chat template.

        `thinking="off"` sets `enable_thinking=False`, the switch of Qwen3-style templates, if the
        template reads it; `options` says whether it did.
        """
        tokenizer = AutoTokenizer.from_pretrained(target.folder, trust_remote_code=target.trust_remote_code)
        if not tokenizer.chat_template:
            raise ValueError(
                f"{target.folder}: expected a tokenizer with a chat template, found none;"
                " use an instruction-tuned target"
            )
        text = tokenizer.get_chat_template()
        options = {"enable_thinking": False} if thinking == "off" and "enable_thinking" in text else {}
        return cls(tokenizer, hashlib.sha256(text.encode()).hexdigest(), options)

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation up to where the target answers. Raises whatever the template raises."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **self.options
            )
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


@dataclass
class Transcript:
    """One conversation as it grows: `input_ids` and `loss_mask` have one length, the mask is true
    exactly on ids that `answer` was given."""

    template: ChatTemplate
    messages: list[dict[str, str]]
    text: str = ""  # what `input_ids` reads as
    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)

    def ask(self, user: str) -> None:
        """Append what the template puts between the last answer and the next one.

        Raises RewritesHistoryError when the rendered conversation does not begin with what the
        target has read and written so far, for example when old thoughts are removed from it.
        """
        messages = [*self.messages, {"role": "user", "content": user}]
        rendered = self.template.render(messages)
        if not rendered.startswith(self.text):
            raise RewritesHistoryError(
                f"turn {sum(m['role'] == 'user' for m in messages)} is rendered with another history"
            )
        self._append(self.template.encode(rendered[len(self.text) :]), supervised=False)
        self.messages, self.text = messages, rendered

    def answer(self, token_ids: Sequence[int], *, stopped: bool) -> str:
        """Append generated ids and return their text; `stopped` says that the last one ends the turn."""
        content_ids, end_ids = (token_ids[:-1], token_ids[-1:]) if stopped else (token_ids, ())
        content = self.template.decode(content_ids)
        self._append(token_ids, supervised=True)
        self.messages = [*self.messages, {"role": "assistant", "content": content}]
        self.text += content + self.template.decode(end_ids)
        return content

    @property
    def supervised_tokens(self) -> int:
        return sum(self.loss_mask)

    def _append(self, token_ids: Sequence[int], *, supervised: bool) -> None:
        self.input_ids += token_ids
        self.loss_mask += [supervised] * len(token_ids)
