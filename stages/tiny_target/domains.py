"""What the tiny target talks about: short conversations in nine domains, made from templates.

Owns every sentence the tiny target is trained and prompted with (single words: `words.py`).
Knows nothing of tokens or models. Every answer is a function of its prompt alone, so a model of a
million weights can learn it, and the slots span enough combinations that held-out prompts are new.

`python -m stages.tiny_target.domains > conf/prompts/tiny.jsonl` writes the prompt file.
"""

# ruff: noqa: E501 - a template is easier to check on one line
from __future__ import annotations

import itertools
import json
import random
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from stages.tiny_target.words import POOLS

PROMPT_SEED = 20
"""Seed of the prompt file; training uses another one and leaves these prompts out."""
PROMPTS_PER_DOMAIN = 80
DRAWS_PER_SAMPLE = 20
"""Draws allowed for each distinct prompt before a domain counts as exhausted."""


@dataclass(frozen=True)
class Sample:
    """One single-turn conversation: what the user says and the only right answer."""

    domain: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class _Task:
    """Ways to ask for one thing, and the answer template they share."""

    asks: tuple[str, ...]
    answer: str


_TASKS: dict[str, tuple[_Task, ...]] = {
    "arithmetic": (
        _Task(
            (
                "{name} has {large} {item}, buys {small} more and then finds {middle}. How many {item} are there?",
                "If {name} has {large} {item}, buys {small} and finds {middle}, how many {item} are there?",
            ),
            "{name} has {large} {item}. First, {large} + {small} = {sum2}. Then, {sum2} + {middle} = {sum3}. So there are {sum3} {item}.",
        ),
        _Task(
            (
                "Help {name} with a sum: start at {large}, add {small}, finally add on {middle}.",
                "A task for {name}, step by step: start at {large}, then add {small}, and add on {middle}.",
            ),
            "Start at {large}. Step 1: {large} + {small} = {sum2}. Step 2: {sum2} + {middle} = {sum3}. The sum for {name} is {sum3}.",
        ),
    ),
    "code": (
        _Task(
            (
                "Write a Python function that adds {large} to the {var}, multiplies by {small} and takes off {middle}.",
                "In Python, add {large} to the {var}, then multiply by {small} and take off {middle}.",
            ),
            "def update_{var}({var}):\n    {var} = {var} + {large}\n    return {var} * {small} - {middle}",
        ),
        _Task(
            (
                "Write a Python function that returns {small} times each {var} above {large} and below {limit}.",
                "In Python, filter a list: take {small} times each {var} above {large} but below {limit}.",
            ),
            "def filter_{var}(values):\n    return [{small} * {var} for {var} in values if {large} < {var} < {limit}]",
        ),
    ),
    "translation": (
        _Task(
            (
                "Translate to French: the {trait[en]} {who[en]} {verb[en]} the {what[en]} {time[en]}.",
                "How do you say in French that the {trait[en]} {who[en]} {verb[en]} the {what[en]} {time[en]}?",
            ),
            "In French: {who[fr]} {trait[fr]} {verb[fr]} {what[fr]} {time[fr]}. Here, {who[fr]} means the {who[en]}.",
        ),
        _Task(
            (
                "Translate to English: {who[fr]} {trait[fr]} {verb[fr]} {what[fr]} {time[fr]}.",
                "What does this mean in English: {who[fr]} {trait[fr]} {verb[fr]} {what[fr]} {time[fr]}?",
            ),
            "In English: the {trait[en]} {who[en]} {verb[en]} the {what[en]} {time[en]}. Here, {who[fr]} means the {who[en]}.",
        ),
    ),
    "qa": (
        _Task(
            (
                "{name} would like to know: what are the capitals of {near[name]} and {far[name]}?",
                "A question from {name} on {day}: which are the capitals of {near[name]} and {far[name]}?",
            ),
            "The capital of {near[name]} is {near[capital]}, in Europe. The capital of {far[name]} is {far[capital]}.",
        ),
        _Task(
            (
                "{name} would like to know: which languages do people speak in {near[name]} and {far[name]}?",
                "A question from {name} on {day}: what do people speak in {near[name]} and {far[name]}?",
            ),
            "People in {near[name]} speak {near[language]}, and the capital is {near[capital]}. People in {far[name]} speak {far[language]}.",
        ),
    ),
    "summarization": (
        _Task(
            (
                "Summarize: On {day}, {name} went to the {place} with {friend}. It was late. They bought {food} and took the {ride} home.",
                "Give the short version: On {day}, when it was late, {name} was at the {place} with {friend}. They bought {food}. Then they took the {ride} home.",
            ),
            "On {day}, {name} was at the {place} with {friend}. They bought {food} and took the {ride}.",
        ),
        _Task(
            (
                "Summarize: The team met on {day} to talk about the {topic}. Some people liked it. A long list was made by {name}. It was led by {friend}.",
                "Give the short version: People met on {day}. It was about the {topic}. There is a list by {name}. The talk was led by {friend}.",
            ),
            "The team met on {day} about the {topic}. The list is by {name}, and it was led by {friend}.",
        ),
    ),
    "tool_call": (
        _Task(
            (
                "Book a table at {shop} for {large} people on {day}.",
                "Please reserve seats at {shop} for {large} people on {day}, with {name}.",
            ),
            '{{"name": "book", "arguments": {{"place": "{shop}", "people": {large}, "day": "{day}"}}}}',
        ),
        _Task(
            (
                "What will the weather be in {near[capital]} for {large} days from {day}?",
                "Check the weather in {near[capital]} for {large} days from {day}, says {name}.",
            ),
            '{{"name": "weather", "arguments": {{"city": "{near[capital]}", "days": {large}, "day": "{day}"}}}}',
        ),
    ),
    "writing": (
        _Task(
            (
                "Write a short poem about a {mood} {hero} at the {scene[at]}.",
                "Here is {name}: I need a rhyme about a {mood} {hero} at the {scene[at]}.",
            ),
            "The {mood} {hero} looks at the {scene[at]},\n{scene[rhyme]}.\nOh {mood} {hero}, stay by the {scene[at]}!",
        ),
        _Task(
            (
                "Write a story about {name} the {hero} and a {color} door.",
                "Tell me a story about {name}, the {hero} who found a {color} door.",
            ),
            "Once there was a {hero} named {name}. One day {name} found a {color} door. Behind the {color} door was another {hero}, and they became friends.",
        ),
    ),
    "rag": (
        _Task(
            (
                "Context: The {shop} {kind} opens at {middle}. The {color} {item} of {name} are in the {place}. Question: when can I visit the {shop} {kind}?",
                "Context: The {color} {item} of {name} are in the {place}. The {shop} {kind} opens at {middle}. Question: when can I visit the {shop} {kind}?",
            ),
            "According to the context, the {shop} {kind} opens at {middle}. You can visit the {shop} {kind} after {middle}.",
        ),
        _Task(
            (
                "Context: The {shop} {kind} opens at {middle}. The {color} {item} of {name} are in the {place}. Question: where can I find the {color} {item}?",
                "Context: The {color} {item} of {name} are in the {place}. The {shop} {kind} opens at {middle}. Question: where can I find the {color} {item}?",
            ),
            "According to the context, the {color} {item} of {name} are in the {place}. You can ask {name} for the {item}.",
        ),
    ),
    "chat": (
        _Task(
            (
                "Hi, I am {name} and I like {hobby}. What can I do in {near[capital]} on {day}?",
                "Hello, I am {name}. I will be in {near[capital]} on {day} and I like {hobby}. Any ideas?",
            ),
            "Hello {name}! If you like {hobby}, there is a {hobby} club in {near[capital]}. It is open on {day}. Have a nice day!",
        ),
        _Task(
            (
                "I feel tired after {hobby} with {name}. Should we have {food} or {drink}?",
                "Today I was out for a day of {hobby} with {name}. Should we now have {food} or {drink}?",
            ),
            "That sounds like a long day of {hobby}! You should have {food} now and {drink} later. Say hello to {name} from me.",
        ),
    ),
}

DOMAINS: tuple[str, ...] = tuple(_TASKS)


@cache
def _slots(template: str) -> frozenset[str]:
    """Pools a template draws from; `near` for both `{near}` and `{near[capital]}`."""
    fields = (field for _, field, _, _ in string.Formatter().parse(template) if field)
    return frozenset(field.partition("[")[0] for field in fields) & POOLS.keys()


def _fill(rng: random.Random, ask: str, answer: str) -> tuple[str, str]:
    """Draws a value for every slot; `sum2` and `sum3` are running sums of three of the numbers."""
    values: dict[str, Any] = {slot: rng.choice(POOLS[slot]) for slot in sorted(_slots(ask) | _slots(answer))}
    if {"large", "small", "middle"} <= values.keys():
        values["sum2"] = int(values["large"]) + int(values["small"])
        values["sum3"] = values["sum2"] + int(values["middle"])
    return ask.format(**values), answer.format(**values)


def _stream(domain: str, seed: int) -> Iterator[Sample]:
    """Endless samples of one domain, prompts possibly repeated."""
    rng = random.Random(f"{domain}/{seed}")
    while True:
        task = rng.choice(_TASKS[domain])
        prompt, answer = _fill(rng, rng.choice(task.asks), task.answer)
        yield Sample(domain, prompt, answer)


def samples(seed: int, per_domain: int) -> list[Sample]:
    """`per_domain` samples of every domain, domain by domain, no prompt twice; a pure function."""
    found: list[Sample] = []
    for domain in DOMAINS:
        distinct: dict[str, Sample] = {}
        for sample in itertools.islice(_stream(domain, seed), DRAWS_PER_SAMPLE * per_domain):
            distinct.setdefault(sample.prompt, sample)
            if len(distinct) == per_domain:
                break
        else:
            raise ValueError(f"per_domain={per_domain}, but {domain} gave only {len(distinct)} prompts; ask for fewer")
        found.extend(distinct.values())
    return found


def prompt_samples() -> list[Sample]:
    """The samples behind the prompt file, answers included; never trained on."""
    return samples(PROMPT_SEED, PROMPTS_PER_DOMAIN)


def prompt_lines() -> Iterator[str]:
    """The prompt file, a JSON object a line: id, domain, and the user's turns."""
    counters = {domain: itertools.count() for domain in DOMAINS}
    for sample in prompt_samples():
        record = {
            "id": f"tiny-{sample.domain}-{next(counters[sample.domain]):03d}",
            "domain": sample.domain,
            "turns": [sample.prompt],
        }
        yield json.dumps(record, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.writelines(prompt_lines())
