"""One shard of conversations whose answers are kept as given: no engine takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stages.datagen.conversation import Conversation
from stages.datagen.outcome import Limits, Settled, ShardOutcome
from stages.datagen.prompts import SetAside
from stages.datagen.template import ChatTemplate, TemplateRefusal
from stages.datagen.transcript import Part, Transcript


def keep_given(
    conversations: Sequence[Conversation],
    template: ChatTemplate | None,
    limits: Limits,
    on_settled: Callable[[SetAside | None], None],
) -> ShardOutcome:
    """Sequences of given answers, as the template shows them, or of given token ids, as they are.

    `template` may be None when there are token ids only.
    """
    outcome = ShardOutcome()
    for one in conversations:
        settled = _settle(one, template, limits)
        outcome.add(one.id, settled)
        on_settled(settled.set_aside)
    return outcome


def _settle(one: Conversation, template: ChatTemplate | None, limits: Limits) -> Settled:
    if one.is_tokens:
        return limits.settle(one, [Part(one.messages, one.input_ids, one.loss_mask)])
    assert template is not None, "conversations need a template"
    transcript = Transcript(template, one.tools)
    for number, turn in enumerate(one.turns(regenerate=False)):
        answer = turn.given
        assert answer is not None, "every turn has its answer"
        if not answer["content"].strip() and not answer.get("tool_calls"):
            return Settled.without(SetAside(one.id, "dropped_empty_answer", f"turn {number}"))
        try:
            transcript.ask(turn.context)
            transcript.answer_given(answer)
        except TemplateRefusal as error:
            return Settled.without(SetAside(one.id, error.reason, str(error)))
    return limits.settle(one, transcript.parts())
