"""Templates of every kind: whose tokens are supervised, what the target reads, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from stages.corpus import Corpus
from stages.datagen.template import ChatTemplate, TemplateRefusal
from stages.datagen.transcript import Transcript
from stages.engine.requests import GenerationRequest, GenerationResult
from stages.tiny_target.tokenizer import CHAT_TEMPLATE as WITH_SPANS
from tests.stages.datagen_helpers import (
    CHATML,
    END_OF_TURN,
    FakePool,
    everything,
    make_target,
    plain_answer,
    run_datagen,
    supervised_spans,
    unsupervised_start,
)

# Shows the thoughts of answers to the last question only, as Qwen3's does, and writes empty ones for a last answer.
THINKER = """
{%- set last = namespace(question=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set last.question = messages.index(m) -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' and loop.index0 > last.question and (m.reasoning_content or loop.last) -%}
{{- '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content.lstrip('\n') -}}
{%- for call in m.tool_calls or [] -%}
{{- '<call>' + call.function.name + call.function.arguments | tojson + '</call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""

# Opens the thoughts itself, and removes them from what was said, as DeepSeek-R1's does.
OPENER = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}").replace(
    "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
)

# Opens the thoughts, keeps them, and has marks around what is said, as Kimi K3's does.
TAGGER = """
{%- macro opening() -%}{{- '[think]' if thinking is undefined or thinking else '[say]' -}}{%- endmacro -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
{{- opening() -}}
{%- if thinking is undefined or thinking -%}{{- (m.get('reasoning') or '') + '[/think][say]' -}}{%- endif -%}
{{- m.content + '[/say]' -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + opening() -}}{%- endif -%}"""

SHOUTER = CHATML.replace("{{ m.content }}", "{{ m.content | upper if m.role == 'assistant' else m.content }}")
OTHER_END = CHATML.replace("<|im_end|>\n", "<|endoftext|>\n")
HEADLESS = (
    "{% for m in messages %}{{ '[Q]' + m.content + '[/Q]' if m.role == 'user' else m.content + eos_token }}{% endfor %}"
)

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
TOOL_CHAT = [
    {"role": "user", "content": "1+1?"},
    CALL,
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "somebody's"},
]

Load = Callable[..., ChatTemplate]
Run = Callable[..., Corpus]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_(chat_template: str, thinking: str = "template") -> ChatTemplate:
        return ChatTemplate.load(make_target(tmp_path / "target", chat_template), thinking)

    return load_


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePool:
    return FakePool(ChatTemplate.load(make_target(tmp_path / "for-pool"), "template").tokenizer).install(monkeypatch)


@pytest.fixture
def run(tmp_path: Path, pool: FakePool) -> Run:
    def run_(chat_template: str, *rows: Any, **values: Any) -> Corpus:
        return run_datagen(tmp_path, make_target(tmp_path / "target", chat_template), list(rows), **values)

    return run_


def thoughtful(opened: bool, thoughts: bool) -> Callable[[GenerationRequest, Any], GenerationResult]:
    """An answer that begins with thoughts, the mark that opens them included unless the prompt has it."""

    def answer(request: GenerationRequest, tokenizer: Any) -> GenerationResult:
        said = ("" if opened else "<think>\n") + "hmm\n</think>\n\n" if thoughts else ""
        ids = tokenizer(said, add_special_tokens=False).input_ids
        return GenerationResult(request.id, (*ids, *plain_answer(request, tokenizer).token_ids), "stop")

    return answer


@pytest.mark.parametrize(
    ("chat_template", "opened", "thinking"),
    [
        (THINKER, False, "template"),
        (OPENER, True, "template"),
        (THINKER, False, "off"),
        (SHOUTER, False, "off"),
        (OTHER_END, False, "off"),
    ],
    ids=["thoughts", "opened-thoughts", "thoughts-off", "upper-case", "other-end-of-turn"],
)
def test_past_that_is_shown_differently_makes_one_sequence_an_answer(
    run: Run, pool: FakePool, tmp_path: Path, chat_template: str, opened: bool, thinking: str
) -> None:
    pool.answer = thoughtful(opened, thinking == "template")
    corpus = run(chat_template, {"id": "x", "turns": ["one", "two", "three"]}, thinking=thinking)
    template = ChatTemplate.load(make_target(tmp_path / "again", chat_template), thinking)
    sequences = everything(corpus)
    assert list(sequences) == ["x#1", "x#2", "x#3"]
    for request, sequence in zip(pool.requests, sequences.values(), strict=True):
        read = len(request.prompt_token_ids)
        assert tuple(sequence.input_ids[:read]) == request.prompt_token_ids
        assert tuple(sequence.input_ids[read:]) == pool.answer(request, pool.tokenizer).token_ids
        assert sequence.loss_mask.tolist() == [False] * read + [True] * (len(sequence) - read)
        past = json.loads(sequence.messages)[:-1]
        assert unsupervised_start(sequence, template) == template.render(past)
        assert "hmm" not in unsupervised_start(sequence, template)
    counts = corpus.record.counts
    assert (counts["prompts_in"], counts["kept"], counts["kept_train"], counts["sequences_train"]) == (1, 1, 1, 3)
    assert {sequence.opening for sequence in sequences.values()} == {"one"}


def tagged(text: str) -> Callable[[GenerationRequest, Any], GenerationResult]:
    def answer(request: GenerationRequest, tokenizer: Any) -> GenerationResult:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return GenerationResult(request.id, (*ids, tokenizer.eos_token_id), "stop")

    return answer


@pytest.mark.parametrize(("thinking", "text"), [("template", "hmm[/think][say]yes[/say]"), ("off", "yes[/say]")])
def test_marks_of_the_template_are_not_taken_for_what_was_said(
    run: Run, load: Load, pool: FakePool, thinking: str, text: str
) -> None:
    pool.answer = tagged(text)
    (sequence,) = everything(run(TAGGER, {"turns": ["one", "two", "three"]}, thinking=thinking)).values()
    template = load(TAGGER, thinking)
    assert supervised_spans(sequence, template) == [text + END_OF_TURN] * 3
    messages = json.loads(sequence.messages)
    thoughts = {"reasoning_content": "hmm"} if thinking == "template" else {}
    assert messages[1::2] == [{"role": "assistant", "content": "yes", **thoughts}] * 3
    assert template.decode(sequence.input_ids.tolist()) == template.render(messages, ask=False)


def test_answer_that_no_message_is_shown_like_ends_the_conversation(run: Run, pool: FakePool) -> None:
    pool.answer = tagged("no marks")
    corpus = run(TAGGER, {"id": "x", "turns": ["one", "two", "three"]})
    (sequence,) = everything(corpus).values()
    assert [m["content"] for m in json.loads(sequence.messages)] == ["one", "no marks"]
    assert (len(pool.requests), corpus.record.counts["turns_left_out"]) == (1, 2)


def test_short_parts_are_counted_and_do_not_take_the_conversation_with_them(run: Run, pool: FakePool) -> None:
    def answer(request: GenerationRequest, tokenizer: Any) -> GenerationResult:
        if tokenizer.decode(request.prompt_token_ids).endswith("two<|im_end|>\n<|im_start|>assistant\n"):
            return GenerationResult(request.id, (*tokenizer("a").input_ids, tokenizer.eos_token_id), "stop")
        return plain_answer(request, tokenizer)

    pool.answer = answer
    corpus = run(
        SHOUTER,
        {"id": "x", "turns": ["one", "two", "three"]},
        {"id": "y", "turns": ["two"]},
        {"id": "z", "turns": ["z"]},
        min_supervised_tokens=3,
    )
    assert everything(corpus).keys() == {"x#1", "x#3", "z"}
    counts = corpus.record.counts
    assert (counts["prompts_in"], counts["kept"], counts["dropped_too_few_supervised"]) == (3, 2, 1)
    assert (counts["sequences_train"], counts["parts_dropped_too_few_supervised"]) == (3, 1)


def test_conversation_that_outgrows_the_room_ends_with_its_last_answer(run: Run, pool: FakePool) -> None:
    rows = [{"id": "x", "turns": ["one", "two", "y" * 500]}, {"id": "long", "prompt": "y" * 500}]
    corpus = run(CHATML, *rows, max_sequence_tokens=400)
    assert everything(corpus).keys() == {"x"}
    (sequence,) = everything(corpus).values()
    assert [m["role"] for m in json.loads(sequence.messages)] == ["user", "assistant"] * 2
    assert sequence.loss_mask[-1]
    assert sequence.input_ids[-1] == pool.tokenizer.eos_token_id
    assert corpus.record.counts["dropped_too_long"] == corpus.record.counts["turns_left_out"] == 1


@pytest.mark.parametrize("same_call", [True, False])
def test_results_of_tools_follow_the_call_that_was_given(run: Run, load: Load, pool: FakePool, same_call: bool) -> None:
    template = load(THINKER)
    said = '<call>add{"a": 1}</call>' if same_call else "I do not know."

    def answer(request: GenerationRequest, tokenizer: Any) -> GenerationResult:
        if template.decode(request.prompt_token_ids).endswith("1+1?<|im_end|>\n<|im_start|>assistant\n"):
            return GenerationResult(request.id, (*template.encode(said), tokenizer.eos_token_id), "stop")
        return plain_answer(request, tokenizer)

    pool.answer = answer
    corpus = run(THINKER, {"id": "x", "messages": TOOL_CHAT, "tools": [ADD]})
    first, second = pool.requests
    assert template.decode(first.prompt_token_ids) == template.render(TOOL_CHAT[:1], [ADD])
    assert template.decode(second.prompt_token_ids) == template.render(TOOL_CHAT[:3], [ADD])
    sequences = everything(corpus)
    assert "somebody's" not in "".join(sequence.messages for sequence in sequences.values())
    spans = [supervised_spans(sequence, template) for sequence in sequences.values()]
    assert [span for of_one in spans for span in of_one] == [
        said + END_OF_TURN,
        template.decode(plain_answer(second, pool.tokenizer).token_ids),
    ]
    assert list(sequences) == (["x"] if same_call else ["x#1", "x#2"])


def spans_of(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[list[str]]:
    """Supervised texts of given answers, sequence by sequence; and every sequence reads as it is rendered."""
    transcript = Transcript(template, tools or [])
    context: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            context.append(message)
            continue
        transcript.ask(context)
        transcript.answer_given(message)
        context = []
    spans = []
    for part in transcript.parts():
        edges = np.flatnonzero(np.diff(np.concatenate([[False], part.loss_mask, [False]]).astype(int)))
        spans.append([template.decode(part.input_ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)])
        whole = template.render(part.messages, tools or [], ask=False)
        assert whole.startswith(template.decode(part.input_ids.tolist()))
    return spans


def said(*texts: str, **of_answers: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text, **(of_answers if i % 2 else {})} for i, text in enumerate(texts)]


def test_given_answers_and_their_ends_are_supervised(load: Load) -> None:
    system = [{"role": "system", "content": "assistant\n<|im_start|>assistant"}]
    assert spans_of(load(CHATML), system + said("q", "a<|im_start|>b", "assistant", " padded \n", "unanswered")) == [
        ["a<|im_start|>b<|im_end|>", " padded \n<|im_end|>"]
    ]


def test_masks_agree_with_a_template_that_marks_its_spans(load: Load) -> None:
    """The tiny target's template says itself what the assistant says; transformers turns that into a mask."""
    template, messages = load(WITH_SPANS), said("question", "an answer", "number", "the word")
    marked = template.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    transcript = Transcript(template)
    for i in (0, 2):
        transcript.ask(messages[i : i + 1])
        transcript.answer_given(messages[i + 1])
    (part,) = transcript.parts()
    assert part.input_ids.tolist() == marked["input_ids"]
    assert part.loss_mask.tolist() == [flag == 1 for flag in marked["assistant_masks"]]


def test_given_thoughts_are_supervised_where_the_template_shows_them(load: Load) -> None:
    template = load(THINKER)
    assert spans_of(template, said("a", "one", "b", "two", reasoning_content="hmm")) == [
        ["<think>\nhmm\n</think>\n\none<|im_end|>"],
        ["<think>\nhmm\n</think>\n\ntwo<|im_end|>"],
    ]
    assert spans_of(template, said("a", "one")) == [["<think>\n\n</think>\n\none<|im_end|>"]]
    assert spans_of(load(THINKER, "off"), said("a", "one", "b", "two")) == [
        ["one<|im_end|>"],
        ["two<|im_end|>"],
    ]


def test_given_thoughts_go_by_the_template_s_own_name(load: Load) -> None:
    template = load(TAGGER)
    assert spans_of(template, said("a", "one", "b", "two", reasoning_content="hmm")) == [
        ["hmm[/think][say]one[/say]<|im_end|>", "hmm[/think][say]two[/say]<|im_end|>"]
    ]


def test_given_calls_are_supervised_and_results_are_not(load: Load) -> None:
    messages = [*TOOL_CHAT, *said("thanks", "welcome")]
    assert spans_of(load(THINKER), messages, [ADD]) == [
        ['<think>\n\n</think>\n\n<call>add{"a": 1}</call><|im_end|>'],
        ["<think>\n\n</think>\n\nsomebody's<|im_end|>"],
        ["<think>\n\n</think>\n\nwelcome<|im_end|>"],
    ]


def test_end_of_turn_may_be_another_token_than_the_end_of_sequence(tmp_path: Path) -> None:
    target = make_target(tmp_path, OTHER_END)
    with pytest.raises(TemplateRefusal) as caught:
        spans_of(ChatTemplate.load(target, "template"), said("q", "a"))
    assert caught.value.reason == "dropped_template_no_end_of_turn"
    tokenizer = ChatTemplate.load(target, "template").tokenizer
    ids = [tokenizer.convert_tokens_to_ids("<|endoftext|>"), tokenizer.eos_token_id]
    (target.folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert spans_of(ChatTemplate.load(target, "template"), said("q", "a")) == [["a<|endoftext|>"]]


@pytest.mark.parametrize(
    ("chat_template", "messages", "reason"),
    [
        (SHOUTER, said("q", "loud"), "dropped_template_hides_answer"),
        (OPENER, said("q", "a"), "dropped_template_hides_answer"),  # the prompt opens thoughts, the answer has none
        (CHATML, said("q", "a", reasoning_content="hmm"), "dropped_template_hides_answer"),
        (CHATML, [{"role": "user", "content": "q"}, CALL], "dropped_template_hides_answer"),
        (CHATML, said("q", "a<|im_end|>b"), "dropped_template_hides_answer"),
        (CHATML + "{{ raise_exception('no') if messages | length > 1 }}", said("q", "a"), "failed_template"),
        (CHATML + "{{ messages[1].content + 1 if messages | length > 1 }}", said("q", "a"), "failed_template"),
    ],
)
def test_what_a_template_does_not_show_is_refused(
    load: Load, chat_template: str, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(TemplateRefusal) as caught:
        spans_of(load(chat_template), messages)
    assert caught.value.reason == reason


def test_template_without_tools_is_not_given_any(load: Load) -> None:
    with pytest.raises(TemplateRefusal) as caught:
        spans_of(load(CHATML), said("q", "a"), [ADD])
    assert caught.value.reason == "dropped_template_ignores_tools"


def test_template_must_open_the_assistants_turn(load: Load) -> None:
    assert spans_of(load(HEADLESS), said("q", "a", "r", "b")) == [["a<|im_end|>", "b<|im_end|>"]]
    for silent in (CHATML.replace("add_generation_prompt", "false"), "{# renders nothing #}"):
        with pytest.raises(ValueError, match="expected a chat template that opens the assistant's turn"):
            load(silent)


def test_day_is_the_same_every_day(load: Load) -> None:
    template = load("{{ strftime_now('%d %b %Y') }}\n" + CHATML)
    assert template.render(said("q")).startswith("01 Jan 2026\n")
    assert (template.today, load(CHATML).today) == ("2026-01-01", None)


def test_thinking_off_reaches_templates_that_have_the_switch(load: Load) -> None:
    assert load(THINKER, "off").options == {"enable_thinking": False}
    assert load(TAGGER, "off").options == {"thinking": False}
    assert load(THINKER, "template").options == {}
    assert load(CHATML, "off").options == {}


def test_tokenizer_that_cannot_be_fed_in_pieces_is_refused(tmp_path: Path) -> None:
    """A space before every text, as SentencePiece models have it, would come between prompt and answer."""
    target = make_target(tmp_path)
    vocab = {piece: i for i, piece in enumerate(["<s>", "</s>", "▁", "\n", *"abcdefghijklmnopqrstuvwxyz"])}
    spaced = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    spaced.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaced.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spaced, eos_token="</s>", bos_token="<s>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(target.folder)
    with pytest.raises(ValueError, match=r"expected a tokenizer that reads .* found 'one\\n two'"):
        ChatTemplate.load(target, "template")
