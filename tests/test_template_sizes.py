"""Chat templates that would fill the memory are refused before they do; others are rendered as by transformers."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kit.models import byte_tokenizer
from offload.errors import ModelError, UsageError
from offload.text import template_sizes
from offload.text.chat_template import TooMuchText, render
from offload.text.tokenizer import Tokenizer
from triforce_cli.prompts.conversation import Conversation
from triforce_cli.prompts.formats import ChatFormat

MESSAGES = [{"role": "user", "content": "Hi <there>, 3 < 4\n"}, {"role": "assistant", "content": " Yes. "}]
HUGE = "4000000000"
LONG = "{% set s = 'ab ' * 1000000 %}"
LARGE = [  # each makes gigabytes in one step
    f"{{{{ 'a' * {HUGE} }}}}",
    f"{{{{ ['a'] * {HUGE} }}}}",
    f"{{{{ 9 ** {HUGE} }}}}",
    f"{{{{ 'a'.center({HUGE}) }}}}",
    f"{{{{ 'a'|center({HUGE}) }}}}",
    f"{{{{ 'a'.ljust({HUGE}) }}}}",
    f"{{{{ 'a'.encode().zfill({HUGE}) }}}}",
    f"{{{{ (5).to_bytes({HUGE}, 'big') }}}}",
    f"{{{{ '\t'.expandtabs({HUGE}) }}}}",
    f"{{{{ '%{HUGE}d' % 1 }}}}",
    f"{{{{ '%*d' % ({HUGE}, 1) }}}}",
    f"{{{{ '%{HUGE}d'|format(1) }}}}",
    f"{{{{ '{{:{HUGE}}}'.format(1) }}}}",
    f"{{{{ '{{:{{}}}}'.format(1, {HUGE}) }}}}",
    f"{{{{ '{{:{{w}}}}'.format_map({{'w': '{HUGE}'}}) }}}}",
    f"{{{{ [1]|tojson(indent={HUGE}) }}}}",
    f"{{{{ 1|round({HUGE}) }}}}",
    f"{{{{ [1]|batch({HUGE}, 'x')|list }}}}",
    f"{{{{ [1]|slice({HUGE})|list }}}}",
    LONG + "{{ s.replace('a', s) }}",
    LONG + "{{ s|replace('', s) }}",
    LONG + "{{ s.join(s) }}",
    LONG + "{{ range(10000)|join(s) }}",
    LONG + "{{ s|indent(1000000) }}",
    LONG + "{{ s|wordwrap(2, wrapstring=s) }}",
    LONG + "{{ s.translate({97: s}) }}",
    LONG + "{{ [s] * 10000 }}",
    LONG + "{{ [s] * 10000 ~ '' }}",
    LONG + "{{ ([s] * 10000)|tojson }}",
    LONG + "{{ ('%s' * 10000) % (([s] * 10000)|list) }}",
    LONG + "{{ ('{0}' * 10000).format(s) }}",
    LONG + "{{ dict(a=[s] * 10000).items()|string }}",
]
DOUBLING = [
    "{% set ns = namespace(x='abcdefgh') %}{% for i in range(40) %}{% set ns.x = " + twice + " %}{% endfor %}"
    for twice in ("ns.x ~ ns.x", "ns.x + ns.x", "[ns.x, ns.x]|join", "'%s%s' % (ns.x, ns.x)", "ns.x.replace('a', 'aa')")
] + [
    LONG + "{% set ns = namespace(x=[]) %}{% for i in range(2000) %}{% set ns.x = ns.x + [s[1:]] %}{% endfor %}",
    LONG + "{% for i in range(2000) %}{{ s }}{% endfor %}",
    LONG + "{% macro all() %}{% for i in range(2000) %}{{ s }}{% endfor %}{% endmacro %}{{ all()|length }}",
    LONG + "{% set all %}{% for i in range(2000) %}{{ s }}{% endfor %}{% endset %}{{ all|length }}",
    LONG + "{% set ns = namespace(x=[]) %}{% for i in range(200) %}{% set ns.x = [s.split(' '), ns.x] %}{% endfor %}",
]


@pytest.mark.parametrize("template", LARGE + DOUBLING)
def test_a_template_that_would_fill_the_memory_is_refused_before_it_does(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One took gigabytes and minutes, and what was said of it in the end was "()"."""
    monkeypatch.setattr("offload.text.chat_template.MOST_BYTES", 1 << 24)
    with pytest.raises(TooMuchText, match="makes more than 16 MiB of text"):
        render(template, MESSAGES, {})


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content|trim ~ 1 ~ none ~ [1, 'a'] }}{{ loop.index }}{% endfor %}",
        "{{ messages[1:] }}{{ messages[::-1][0].content[3:-2:2] }}{{ x }}{{ messages|tojson(indent=2) }}",
        "{{ 'a' * 3 + 'b' }}{{ [1] + [2] * 2 }}{{ 7 % 4 }}{{ '%s-%5d|' % ('a', 3) }}{{ '{:>4}|'.format('é') }}",
        "{{ messages|map(attribute='role')|join(', ') }}{{ messages|map('length')|list }}{{ [3, 4]|sum ** 2 }}",
        "{{ messages[0].content|e }}{{ messages[0].content|replace('<', '[')|upper }}{{ 'a b'.split(' ') }}",
        "{% macro said(m) %}<{{ m.content }}>{% endmacro %}{{ said(messages[0]) }}{% set t %}x{% endset %}{{ t ~ t }}",
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ 'abc'|center(9)|indent(2) }}{{ tools }}",
        "{% generation %}{{ eos_token }}{% endgeneration %}{% for m in messages %}{% break %}{% endfor %}",
        "{{ 'a\nb'.splitlines()|join('|') }}{{ {'k': 'v'}.items()|list }}{{ namespace(a=1).a }}{{ 1.5|round(1) }}",
        "{{ messages|batch(1)|list }}{{ '9' * 9 }}{{ ['b', 'a']|sort|first }}{{ 'x'.join(['a', 'b']) }}",
    ],
)
def test_other_templates_write_what_transformers_writes(template: str) -> None:
    inner = byte_tokenizer()
    theirs = inner.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert Tokenizer(inner).render_chat(MESSAGES, template) == theirs


def test_what_a_person_gives_may_be_written_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates put the conversation together message by message, which takes the square of them."""
    monkeypatch.setattr("offload.text.chat_template.MOST_BYTES", 0)
    messages = [{"role": "user", "content": "x" * 10_000} for _ in range(50)]
    template = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}"
    )
    assert len(render(template, messages, {})) == 500_000


def test_sizes_are_never_less_than_what_is_written() -> None:
    values: list[Any] = ["é" * 9, ["a", {"b": (1, None)}], 10**50, b"abc", {"k": "v" * 99}.items(), True, 2.5]
    charged = list[int]()
    for value in values:
        assert template_sizes.written(value, charged.append) >= len(str(value))
    assert sum(charged) > sum(sys.getsizeof(str(value)) for value in values)


def chatting(template: str) -> ChatFormat:
    inner = byte_tokenizer()
    inner.chat_template = template
    return ChatFormat(Tokenizer(inner))


def test_the_reason_is_said_and_is_short() -> None:
    asks = "{% if messages[0].content != 'A' %}WHAT{% endif %}{{ messages[0].content }}"
    with pytest.raises(ModelError, match=r"chat template makes more than 256 MiB of text; choose another template"):
        chatting(asks.replace("WHAT", LARGE[0])).prompt(Conversation().asked("Hi"))
    for raised, said in (("''", r"\(TemplateError\)"), ("'no ' * 1000", r"\((no ){133}n \.\.\.\)")):
        with pytest.raises(UsageError, match=said):
            chatting(asks.replace("WHAT", f"{{{{ raise_exception({raised}) }}}}")).prompt(Conversation().asked("Hi"))


@pytest.mark.parametrize(
    "template",
    [
        "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(1) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ NESTED }}".replace("NESTED", "[" * 60_000 + "]" * 60_000),
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    ],
    ids=["macro", "loop", "lists", "conditions"],
)
def test_a_template_that_calls_itself_without_end_is_refused(template: str) -> None:
    """It is the template's fault and not the conversation's, which the error said."""
    with pytest.raises(ModelError, match=r"calls itself too often, or is given .*; choose another template"):
        chatting("{{ messages[0].content }}{% if messages[0].content != 'A' %}" + template + "{% endif %}").prompt(
            Conversation().asked("Hi")
        )
