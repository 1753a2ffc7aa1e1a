"""The chat template as exact token ids: what the target reads, and where its own turn begins and ends.

Whatever the template does, an answer begins where the rendered generation prompt ends, and ends with
the first end-of-turn token. A conversation for which the template does not keep to that is refused
by a name, never guessed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from transformers import AutoTokenizer

from stages.datagen.conversation import Message
from stages.target import Target

TODAY = datetime(2026, 1, 1, tzinfo=UTC)
"""The day that templates are told which ask for one: the same corpus must come out on every day."""


class TemplateRefusal(ValueError):
    """The template cannot show this conversation; `reason` is a key of the counts."""

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(cause)
        self.reason = reason


@dataclass(frozen=True)
class ChatTemplate:
    """A target's tokenizer and chat template."""

    tokenizer: Any  # transformers' tokenizers share no usable static type
    text: str
    end_ids: frozenset[int]  # tokens that end a turn, for the engine too
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, target: Target, thinking: str) -> Self:
        """Read the tokenizer of `target`.

        `thinking="off"` sets `enable_thinking=False`, the switch of Qwen3-style templates, if the
        template reads it; `options` says whether it did. Raises ValueError when there is no chat
        template, none that opens the assistant's turn, or a tokenizer that cannot be fed in pieces.
        """
        tokenizer = AutoTokenizer.from_pretrained(target.folder, trust_remote_code=target.trust_remote_code)
        if not tokenizer.chat_template:
            raise ValueError(
                f"{target.folder}: expected a tokenizer with a chat template, found none;"
                " use an instruction-tuned target"
            )
        text = tokenizer.get_chat_template()
        options = {"enable_thinking": False} if thinking == "off" and "enable_thinking" in text else {}
        template = cls(tokenizer, text, _end_ids(tokenizer, target.folder), options)
        template._require_usable(target.folder)
        return template

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def today(self) -> str | None:
        """The day that the template is told, or None when it does not ask."""
        return TODAY.date().isoformat() if "strftime_now" in self.text else None

    @property
    def reads_reasoning(self) -> bool:
        return "reasoning_content" in self.text

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, ask: bool = True) -> str:
        """The conversation, with `ask` up to where the target answers. Raises TemplateRefusal."""
        if tools and "tools" not in self.text:
            raise TemplateRefusal("dropped_template_ignores_tools", "the template does not show tools")
        day = {"strftime_now": TODAY.strftime} if self.today else {}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=ask,
                    **self.options,
                    **day,
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # what templates run into
            raise TemplateRefusal("failed_template", str(error)) from error

    def turn(self, span: str, message: Message) -> str:
        """The given answer `message` and its end, of which `span` is the rendering from the generation prompt on.

        Raises TemplateRefusal unless the span has an end of turn, and everything the message says before it.
        """
        ends = [at + len(end) for end in self._end_texts if (at := span.find(end)) >= 0]
        if not ends:
            raise TemplateRefusal("dropped_template_no_end_of_turn", f"{span[-40:]!r} has no end of turn")
        shown = span[: min(ends)]
        calls = [call.get("function", call)["name"] for call in message.get("tool_calls", ())]
        for said in (message["content"], message.get("reasoning_content", ""), *calls):
            if "".join(said.split()) not in "".join(shown.split()):
                raise TemplateRefusal("dropped_template_hides_answer", f"{said[:40]!r} is not in {shown[:80]!r}")
        return shown

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def message(self, text: str) -> Message:
        """What the target said as a message. Thoughts go where the template looks for them, if it does."""
        thoughts, closed, rest = text.partition("</think>")
        if not closed or not self.reads_reasoning:
            return {"role": "assistant", "content": text}
        return {
            "role": "assistant",
            "content": rest,
            "reasoning_content": thoughts.removeprefix("<think>"),
        }

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        return tuple(self.decode([end_id]) for end_id in self.end_ids)

    def _require_usable(self, folder: Path) -> None:
        joined = self.decode(self.encode("one\n") + self.encode("two"))
        if joined != "one\ntwo":
            raise ValueError(
                f"{folder}: expected a tokenizer that reads 'one\\n' and 'two' as 'one\\ntwo', found {joined!r};"
                " one that puts a space before every text is not supported"
            )
        question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
        try:
            asked, closed = self.render([question]), self.render([question], ask=False)
            whole = self.render([question, answer], ask=False)
        except TemplateRefusal:  # it wants more than this; what it cannot show will be counted
            return
        if asked == closed and not whole.removeprefix(asked).lstrip().startswith("answer"):
            raise ValueError(
                f"{folder}: expected a chat template that opens the assistant's turn for a generation prompt,"
                f" found one that renders {whole!r}"
            )


def _end_ids(tokenizer: Any, folder: Path) -> frozenset[int]:
    """The tokenizer's end of sequence and those of `generation_config.json`: an engine stops at all of them."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    ids = [*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id]
    return frozenset(id_ for id_ in ids if id_ is not None)
