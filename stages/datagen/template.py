"""The chat template as exact token ids: what the target reads, and where its own turn begins and ends.

Whatever the template does, an answer begins where the rendered generation prompt ends, and ends with
the first end-of-turn token. A conversation for which the template does not keep to that is refused
by a name, never guessed. How it puts thoughts and answers is found out by rendering, not by names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from transformers import AutoTokenizer

from stages.datagen.conversation import THOUGHTS_KEYS, Message
from stages.end_tokens import end_token_ids
from stages.target import Target

TODAY = datetime(2026, 1, 1, tzinfo=UTC)
"""The day that templates are told which ask for one: the same corpus must come out on every day."""

THINKING_SWITCHES = ("enable_thinking", "thinking")
PROBE: Message = {"role": "user", "content": "question"}
ANSWER, THOUGHTS = "zanswerz", "zthoughtsz"  # words that no template has of its own


class TemplateRefusal(ValueError):
    """The template cannot show this conversation; `reason` is a key of the counts."""

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(cause)
        self.reason = reason


@dataclass(frozen=True)
class TurnForm:
    """What stands around thoughts and answer between generation prompt and end of turn."""

    before: str
    between: str | None  # None: a form without thoughts
    after: str

    def parse(self, text: str) -> Message | None:
        """The message that is shown as `text`; None when it has another form."""
        if not text.startswith(self.before) or not text.endswith(self.after):
            return None
        inside = text[len(self.before) : len(text) - len(self.after)]
        if self.between is None:
            return {"role": "assistant", "content": inside}
        thoughts, closed, content = inside.partition(self.between)
        return {"role": "assistant", "content": content, "reasoning_content": thoughts} if closed else None


@dataclass(frozen=True)
class ChatTemplate:
    """A target's tokenizer and chat template."""

    tokenizer: Any  # transformers' tokenizers share no usable static type
    text: str
    end_ids: frozenset[int]  # tokens that end a turn, for the engine too
    options: dict[str, Any] = field(default_factory=dict)
    thoughts_key: str | None = None  # where the template looks for thoughts of a message
    forms: tuple[TurnForm, ...] = ()  # of its turns, those with thoughts first

    @classmethod
    def load(cls, target: Target, thinking: str) -> Self:
        """Read the tokenizer of `target`, and find out how its template shows turns.

        `thinking="off"` turns off whichever switch of THINKING_SWITCHES has an effect; `options` says
        which. Raises ValueError when there is no chat template, none that opens the assistant's turn,
        or a tokenizer that cannot be fed in pieces.
        """
        tokenizer = AutoTokenizer.from_pretrained(target.folder, trust_remote_code=target.trust_remote_code)
        if not tokenizer.chat_template:
            raise ValueError(
                f"{target.folder}: expected a tokenizer with a chat template, found none;"
                " use an instruction-tuned target"
            )
        template = cls(tokenizer, tokenizer.get_chat_template(), frozenset(end_token_ids(target)))
        template._require_pieces(target.folder)
        try:
            if thinking == "off":
                template = replace(template, options=template._switched_off())
            template = replace(template, thoughts_key=template._thoughts_key())
            template._require_opening(target.folder)
            return replace(template, forms=template._forms())
        except TemplateRefusal:  # it wants more than a question; what it cannot show will be counted
            return template

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def today(self) -> str | None:
        """The day that the template is told, or None when it does not ask."""
        return TODAY.date().isoformat() if "strftime_now" in self.text else None

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = (), *, ask: bool = True) -> str:
        """The conversation, with `ask` up to where the target answers. Raises TemplateRefusal."""
        if tools and "tools" not in self.text:
            raise TemplateRefusal("dropped_template_ignores_tools", "the template does not show tools")
        options = self.options | ({"strftime_now": TODAY.strftime} if self.today else {})
        names = {"reasoning_content": self.thoughts_key or "reasoning_content"}
        shown = [{names.get(key, key): value for key, value in message.items()} for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    shown, tools=list(tools) or None, tokenize=False, add_generation_prompt=ask, **options
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # what templates run into
            raise TemplateRefusal("failed_template", str(error)) from error

    def turn(self, span: str, message: Message) -> str:
        """The given answer `message` and its end, of which `span` is the rendering from the generation prompt on.

        Raises TemplateRefusal unless the span has an end of turn, and everything the message says before it.
        """
        end = self._end_of_turn(span)
        if end is None:
            raise TemplateRefusal("dropped_template_no_end_of_turn", f"{span[-40:]!r} has no end of turn")
        shown = span[: end.stop]
        calls = [call.get("function", call)["name"] for call in message.get("tool_calls", ())]
        for said in (message["content"], message.get("reasoning_content", ""), *calls):
            if "".join(said.split()) not in "".join(shown.split()):
                raise TemplateRefusal("dropped_template_hides_answer", f"{said[:40]!r} is not in {shown[:80]!r}")
        return shown

    def parse(self, text: str) -> Message | None:
        """What the target wrote, without the end of its turn, as the message that the template shows like this.

        None when it shows no message like this. Of a template whose forms are not known, such as one
        that never shows thoughts but looks for them in what was said, the text itself is the message.
        """
        if not self.forms:
            return {"role": "assistant", "content": text}
        return next((message for form in self.forms if (message := form.parse(text))), None)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    @cached_property
    def _end_texts(self) -> tuple[str, ...]:
        return tuple(self.decode([end_id]) for end_id in self.end_ids)

    def _end_of_turn(self, span: str) -> slice | None:
        """Where the first end of turn stands."""
        found = [slice(at, at + len(end)) for end in self._end_texts if (at := span.find(end)) >= 0]
        return min(found, key=lambda end: end.start) if found else None

    def _switched_off(self) -> dict[str, Any]:
        for switch in THINKING_SWITCHES:
            off = {switch: False}
            if replace(self, options=off).render([PROBE]) != self.render([PROBE]):
                return off
        return {}

    def _thoughts_key(self) -> str | None:
        for key in THOUGHTS_KEYS:
            thoughtful = {"role": "assistant", "content": ANSWER, key: THOUGHTS}
            if THOUGHTS in self.render([PROBE, thoughtful], ask=False):
                return key
        return None

    def _forms(self) -> tuple[TurnForm, ...]:
        asked, forms = self.render([PROBE]), []
        for thoughts in ({"reasoning_content": THOUGHTS}, {}):
            whole = self.render([PROBE, {"role": "assistant", "content": ANSWER, **thoughts}], ask=False)
            span = whole.removeprefix(asked)
            end = self._end_of_turn(span)
            before, _, after = span[: end.start if end else None].partition(ANSWER)
            before, closed, between = before.partition(THOUGHTS)
            if whole.startswith(asked) and ANSWER in span and bool(closed) == bool(thoughts):
                forms.append(TurnForm(before, between if closed else None, after if end else ""))
        return tuple(forms)

    def _require_opening(self, folder: Path) -> None:
        asked, closed = self.render([PROBE]), self.render([PROBE], ask=False)
        whole = self.render([PROBE, {"role": "assistant", "content": ANSWER}], ask=False)
        if asked == closed and not whole.removeprefix(asked).lstrip().startswith(ANSWER):
            raise ValueError(
                f"{folder}: expected a chat template that opens the assistant's turn for a generation prompt,"
                f" found one that renders {whole!r}"
            )

    def _require_pieces(self, folder: Path) -> None:
        joined = self.decode(self.encode("one\n") + self.encode("two"))
        if joined != "one\ntwo":
            raise ValueError(
                f"{folder}: expected a tokenizer that reads 'one\\n' and 'two' as 'one\\ntwo', found {joined!r};"
                " one that puts a space before every text is not supported"
            )
