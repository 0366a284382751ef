"""OpenAI's harmony format in tests: a chat template with the shape of gpt-oss's, and its tokens. No tests in here."""

from __future__ import annotations

from tokenizers import AddedToken

from kit.models import byte_tokenizer
from offload.text.tokenizer import Tokenizer

SPECIAL = ("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>")
_THOUGHTS = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + thoughts + '<|end|>' }}"
TEMPLATE = (
    "{{ '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) }}"
    "{{ '\\n# Valid channels: analysis, commentary, final.<|end|>' }}"
    "{% set told = messages[0].role in ('system', 'developer') %}"
    "{% if told or tools %}{{ '<|start|>developer<|message|>' }}"
    "{% if told %}{{ '# Instructions\\n\\n' + messages[0].content }}{% endif %}"
    "{% for tool in tools or [] %}{{ '\\ntype ' + tool.function.name + ' = () => any;' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
    "{% set called = namespace(name='') %}"
    "{% for m in (messages[1:] if told else messages) %}"
    "{% if m.role == 'assistant' %}"
    "{% set content = m.content or '' %}"
    "{% if '<|channel|>final<|message|>' in content or '<|channel|>analysis<|message|>' in content %}"
    "{{ raise_exception('You have passed a message containing channel tags.') }}{% endif %}"
    "{% if 'tool_calls' in m %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking.') }}{% endif %}"
    "{% set thoughts = m.content or m.thinking %}{% if thoughts %}" + _THOUGHTS + "{% endif %}"
    "{% set called.name = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if 'thinking' in m %}{% set thoughts = m.thinking %}" + _THOUGHTS + "{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ (m.content | tojson) + '<|end|>' }}"
    "{% else %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
THOUGHTS, ANSWER = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def harmony(template: str = TEMPLATE, *, special: bool = True) -> Tokenizer:
    """A tokenizer of bytes with this template and the format's tokens. special: they are tokens without text."""
    inner = byte_tokenizer()
    inner.chat_template = template
    inner.add_tokens([AddedToken(token, special=special, normalized=False) for token in SPECIAL])
    return Tokenizer(inner)
