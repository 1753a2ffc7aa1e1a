"""One row as a conversation: which forms a row may have, and what is asked and answered in it.

    {"prompt": text}                                 a prompt alone
    {"turns": [text, ...]}                           the user's turns alone
    {"messages": [{"role", "content", ...}, ...]}    a conversation; "conversations" with "from" and "value" too
    {"input_ids": [...], "loss_mask": [...]}         token ids, with "messages" if they are known

and optionally "id", "domain" and, for the first three, "tools". Messages may carry "reasoning_content"
(also called "reasoning" or "thinking") and "tool_calls"; the latter may be answered by messages of the
role "tool". "messages" and "tools" may be JSON text, which in Parquet is the way to keep objects that
differ from row to row.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from stages.artifacts import digest
from stages.corpus import normalised, opening
from stages.datagen.sources import FORMS, Row, short

Message = dict[str, Any]

EXPECTED_ROW = (
    '"prompt": text, "turns": [text, ...], "messages": [{"role", "content"}, ...] or "input_ids" with "loss_mask"'
)
MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")  # and thoughts; others are left out
THOUGHTS_KEYS = ("reasoning_content", "reasoning", "thinking")  # the first is the name that is used here
ROLES = {"human": "user", "gpt": "assistant"}  # of "conversations"


@dataclass(frozen=True)
class Turn:
    """What is said since the last answer, and the answer of the source if there is one."""

    context: tuple[Message, ...]
    given: Message | None = None

    @property
    def has_tool_results(self) -> bool:
        return any(message["role"] == "tool" for message in self.context)


@dataclass(frozen=True)
class Conversation:
    """Messages, or token ids of length T. `source` is file:line, for messages to people."""

    id: str
    domain: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()
    source: str = ""
    input_ids: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32), compare=False)  # int32 [T]
    loss_mask: np.ndarray = field(default_factory=partial(np.zeros, 0, bool), compare=False)  # bool [T]

    @property
    def is_tokens(self) -> bool:
        return len(self.input_ids) > 0

    @cached_property
    def opening(self) -> str:
        """Conversations that share it never lie in different splits."""
        return opening(self.messages, self.input_ids, self.loss_mask)

    @property
    def covers(self) -> str:
        """Digest of everything that the corpus could show."""
        return digest(
            [self.id, self.domain, self.messages, self.tools, self.input_ids.tolist(), self.loss_mask.tolist()]
        )

    def key(self, regenerate: bool) -> str:
        """Equal for duplicates: what is asked is the same up to case and white space, and given answers too."""
        if self.is_tokens:
            return digest([self.input_ids.tolist(), self.loss_mask.tolist()])
        said = [message for turn in self.turns(regenerate) for message in turn.context]
        if not regenerate:
            said += [turn.given for turn in self.turns(regenerate) if turn.given]
        return digest([[_comparable(message) for message in said], self.tools])

    def turns(self, regenerate: bool) -> list[Turn]:
        """The answers to be made, each with what is said before it.

        Given answers are taken as they come; what follows the last one is left out. To regenerate,
        whatever the user said or a tool returned wants an answer, also where the source has none; an
        assistant that speaks first is context.
        """
        turns: list[Turn] = []
        context: list[Message] = []
        for message, following in zip(self.messages, (*self.messages[1:], None), strict=True):
            after = following["role"] if following else None
            if message["role"] != "assistant":
                context.append(message)
                wants_answer = message["role"] == "user" or (message["role"] == "tool" and after != "tool")
                if regenerate and wants_answer and after != "assistant":
                    turns.append(Turn(tuple(context)))
                    context = []
            elif not regenerate or any(said["role"] in ("user", "tool") for said in context):
                turns.append(Turn(tuple(context), message))
                context = []
            elif turns:  # two answers in a row: results of tools, if any, answer the second
                turns[-1] = replace(turns[-1], given=message)
            else:
                context.append(message)
        return turns


def parse(row: Row, *, regenerate: bool, vocab_size: int) -> Conversation:
    """The conversation of a row. Raises ValueError, one line, naming source and line."""
    where = row.where
    if not isinstance(row.value, dict):
        raise ValueError(f"{where}: expected a JSON object, found {short(row.value)}")
    fields = {key: value for key, value in row.value.items() if value is not None}
    form = next((name for name in FORMS if name in fields), None)
    if form is None:
        raise ValueError(f"{where}: expected {EXPECTED_ROW}, found only {sorted(fields)}")
    id_ = fields.get("id", f"{row.stem}-{row.line}")
    if isinstance(id_, bool) or not isinstance(id_, str | int):
        raise ValueError(f'{where}: expected "id" to be a text or a whole number, found {short(id_)}')
    domain = _text(fields.get("domain", row.stem), where, '"domain"')
    found = Conversation(_text(str(id_), where, '"id"'), domain, source=where)
    if form == "input_ids":
        if regenerate:
            raise ValueError(
                f"{where}: expected a conversation with answers to regenerate, found token ids;"
                " datagen.regenerate=false keeps them"
            )
        input_ids, loss_mask = _tokens(fields, where, vocab_size)
        messages = _messages(fields["messages"], where, "messages") if "messages" in fields else ()
        return replace(found, messages=messages, input_ids=input_ids, loss_mask=loss_mask)
    found = replace(found, tools=_tools(fields, where))
    if form in ("messages", "conversations"):
        found = replace(found, messages=_messages(fields[form], where, form))
    else:
        texts = [fields["prompt"]] if form == "prompt" else fields["turns"]
        if not isinstance(texts, list) or not texts:
            raise ValueError(f'{where}: expected "turns" to be a list of at least one text, found {short(texts)}')
        turns = [_text(text, where, f'"{form}"') for text in texts]
        found = replace(found, messages=tuple({"role": "user", "content": text} for text in turns))
    if not any(message["role"] == "user" for message in found.messages):
        raise ValueError(f'{where}: expected "{form}" with at least one message from the user, found none')
    if not found.turns(regenerate):
        raise ValueError(f"{where}: expected answers for datagen.regenerate=false to keep, found a prompt alone")
    return found


def _tokens(fields: dict[str, Any], where: str, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = fields["input_ids"], fields.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(id_) is int for id_ in ids):
        raise ValueError(f'{where}: expected "input_ids" to be a list of whole numbers, found {short(ids)}')
    if not isinstance(mask, list) or not all(type(flag) in (bool, int) and flag in (0, 1) for flag in mask):
        raise ValueError(
            f'{where}: expected "loss_mask" to be a list of true and false or 1 and 0, found {short(mask)}'
        )
    if len(ids) != len(mask):
        raise ValueError(
            f'{where}: expected "input_ids" and "loss_mask" of one length, found {len(ids)} and {len(mask)}'
        )
    if wrong := next((id_ for id_ in ids if not 0 <= id_ < vocab_size), None):
        raise ValueError(f'{where}: expected "input_ids" from 0 to {vocab_size - 1} (the vocabulary), found {wrong}')
    return np.array(ids, dtype=np.int32), np.array(mask, dtype=bool)


def _messages(value: Any, where: str, form: str) -> tuple[Message, ...]:
    raw = _from_json(value, where, form)
    if not isinstance(raw, list) or not all(isinstance(message, dict) for message in raw):
        raise ValueError(f'{where}: expected "{form}" to be a list of {{"role", "content"}}, found {short(raw)}')
    messages: list[Message] = []
    for place, given in enumerate(raw):
        message = {key: given[key] for key in MESSAGE_KEYS if given.get(key) not in (None, [])}
        thoughts = next((given[key] for key in THOUGHTS_KEYS if given.get(key) is not None), None)
        if thoughts is not None:
            message["reasoning_content"] = thoughts
        if "from" in given:
            message |= {"role": ROLES.get(given["from"], given["from"]), "content": given.get("value")}
        role, before = message.get("role"), messages[-1]["role"] if messages else None
        fits = {"system": place == 0, "user": True, "assistant": True, "tool": before in ("assistant", "tool")}
        if not isinstance(role, str) or not fits.get(role, False):
            raise ValueError(
                f"{where}: expected roles user and assistant, tool after an assistant, and at most one leading"
                f" system, found {role!r} in message {place}"
            )
        what = f'"content" of message {place}'
        if role in ("system", "user"):
            _text(message.get("content"), where, what)
        for key in ("content", "reasoning_content"):
            if not isinstance(message.get(key, ""), str):
                raise ValueError(
                    f'{where}: expected "{key}" of message {place} to be a text, found {short(message[key])}'
                )
        message["content"] = message.get("content") or ""
        if "tool_calls" in message:
            message["tool_calls"] = _calls(message["tool_calls"], where, place)
        messages.append(message)
    _unicode(json.dumps(messages, ensure_ascii=False), where, f'"{form}"')
    return tuple(messages)


def _calls(calls: Any, where: str, place: int) -> list[Message]:
    """Arguments that are JSON text become objects, which is what templates expect and servers give them."""
    found = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'{where}: expected "tool_calls" of message {place} to be a list of {{"function": {{"name",'
                f' "arguments"}}}}, found {short(call)}'
            )
        if isinstance(function.get("arguments"), str):
            with suppress(ValueError):  # a call that was made like this is shown like this
                function = function | {"arguments": json.loads(function["arguments"])}
        found.append(call | {"function": function} if "function" in call else function)
    return found


def _tools(fields: dict[str, Any], where: str) -> tuple[Message, ...]:
    tools = _from_json(fields.get("tools", []), where, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f'{where}: expected "tools" to be a list of JSON schemas, found {short(tools)}')
    _unicode(json.dumps(tools, ensure_ascii=False), where, '"tools"')
    return tuple(tools)


def _from_json(value: Any, where: str, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f'{where}: expected "{what}" to be a list or its JSON text, found {short(value)}') from error


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected {what} to be a text that is not empty, found {short(value)}")
    return _unicode(value, where, what)


def _unicode(text: str, where: str, what: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON lets half a surrogate pair through, tokenizers do not
        raise ValueError(
            f"{where}: expected {what} to be valid Unicode, found {error.reason} at character {error.start}"
        ) from error
    return text


def _comparable(message: Message) -> list[Any]:
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    return [message["role"], normalised(message["content"]), rest]
