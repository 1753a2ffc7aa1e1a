"""A conversation as it grows, as one sequence of token ids or several.

As long as the template shows the past as it was, a conversation is one sequence in which every
answer is supervised. Where it shows it differently (thoughts of earlier turns removed, say), the
sequence ends with the answers it has, and the next answer begins a new one after the past as the
template shows it then: which is what the target reads when it is served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stages.datagen.conversation import Message
from stages.datagen.template import ChatTemplate, TemplateRefusal


@dataclass(frozen=True)
class Part:
    """One sequence of length T that ends with an answer, and the messages up to it."""

    messages: tuple[Message, ...]
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]


@dataclass
class Transcript:
    """The mask is true exactly on answers, end of turn included; every answer is supervised in one part.

    Text is tokenised once and generated ids are kept as they are, so that `input_ids` is what the
    target really read and wrote; decoding and encoding again would not always give the same ids back.
    """

    template: ChatTemplate
    tools: Sequence[Message] = ()
    messages: tuple[Message, ...] = ()
    input_ids: list[int] = field(default_factory=list)
    goes_on: bool = True  # whether there can be another turn
    _loss_mask: list[bool] = field(default_factory=list)
    _text: str = ""  # what `input_ids` reads as
    _closed: list[Part] = field(default_factory=list)
    _answered: Part | None = None  # the open sequence up to its last answer

    def ask(self, context: Sequence[Message]) -> None:
        """Append what is said since the last answer, up to where the target answers.

        Raises TemplateRefusal.
        """
        messages = (*self.messages, *context)
        rendered = self.template.render(messages, self.tools)
        if not rendered.startswith(self._text):
            if self._answered is not None:
                self._closed.append(self._answered)
            self.input_ids, self._loss_mask, self._text, self._answered = [], [], "", None
        self._append(self.template.encode(rendered[len(self._text) :]), supervised=False)
        self.messages, self._text = messages, rendered

    def answer(self, token_ids: Sequence[int], *, stopped: bool, remembered: Message | None = None) -> Message:
        """Append generated ids and return them as a message; `stopped` says that the last one ends the turn.

        `remembered` takes the answer's place in the past of later turns. There are none when the answer
        is cut, or no message is shown by the template like the answer and none is remembered.
        """
        content_ids, end_ids = (token_ids[:-1], token_ids[-1:]) if stopped else (token_ids, ())
        text = self.template.decode(content_ids)
        parsed = self.template.parse(text) if stopped else None
        message = parsed or {"role": "assistant", "content": text}
        self._append(token_ids, supervised=True)
        self._text += text + self.template.decode(end_ids)
        self._answer_is(message)
        self.goes_on = stopped and (remembered or parsed) is not None
        self.messages = (*self.messages[:-1], remembered or message)
        return message

    def answer_given(self, message: Message) -> None:
        """Append a given answer as the template shows it. Raises TemplateRefusal when it does not."""
        whole = self.template.render((*self.messages, message), self.tools, ask=False)
        if not whole.startswith(self._text):
            raise TemplateRefusal(
                "dropped_template_hides_answer", f"{whole[-80:]!r} does not go on where {self._text[-80:]!r} ends"
            )
        shown = self.template.turn(whole[len(self._text) :], message)
        self._append(self.template.encode(shown), supervised=True)
        self._text += shown
        self._answer_is(message)

    def parts(self) -> list[Part]:
        """All sequences; what was said after the last answer is in none."""
        return [*self._closed, self._answered] if self._answered is not None else list(self._closed)

    def _answer_is(self, message: Message) -> None:
        self.messages = (*self.messages, message)
        ids_T, mask_T = np.array(self.input_ids, dtype=np.int32), np.array(self._loss_mask, dtype=bool)
        self._answered = Part(self.messages, ids_T, mask_T)

    def _append(self, token_ids: Sequence[int], *, supervised: bool) -> None:
        self.input_ids += token_ids
        self._loss_mask += [supervised] * len(token_ids)
