"""A coding agent, and its settings for one run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

NO_KEY = "none"  # in place of a key, which agents insist on
_LARGEST_ANSWER = 16_384  # tokens that an agent may ask for at a time
_OTHERS = (
    *("ANTHROPIC", "OPENAI", "AZURE_OPENAI", "OPENROUTER", "GEMINI", "VERTEX", "MISTRAL", "DEEPSEEK", "GROQ", "XAI"),
    *("CEREBRAS", "TOGETHER", "TOGETHERAI", "FIREWORKS", "PERPLEXITY", "COHERE", "MOONSHOT", "KIMI", "ZAI", "ZHIPU"),
    *("MINIMAX", "DASHSCOPE", "BAILIAN", "QWEN", "OPENCODE", "HUGGINGFACE", "NVIDIA", "OLLAMA", "LMSTUDIO", "LITELLM"),
)
# Variables that name another server, or a key of one: all of an API's own, and keys of the others.
_CLOUD = re.compile(
    r"(?:ANTHROPIC|OPENAI|CLAUDE_CODE_USE|CLAUDE_CODE_OAUTH)_\w+"
    rf"|(?:{'|'.join(_OTHERS)})_(?:API_)?(?:KEY|TOKEN)"
    r"|GOOGLE_(?:GENERATIVE_AI_)?API_KEY|AWS_BEARER_TOKEN_BEDROCK|AIDER_\w*API_(?:KEY|BASE)"
)


@dataclass(frozen=True)
class Endpoint:
    """A server for an agent. url: up to the paths of the APIs. context: tokens of a prompt and its answer together.
    key: "" for none."""

    url: str
    model: str
    context: int
    key: str = ""

    @property
    def sent_key(self) -> str:
        return self.key or NO_KEY

    @property
    def answer(self) -> int:
        """The most tokens of one answer, as agents ask for, which they keep free of the context."""
        return min(_LARGEST_ANSWER, self.context // 4)


@dataclass(frozen=True)
class Settings:
    """An agent's settings for one run. arguments: before the user's own. variables: of the environment. files: in the
    run's folder, by their names."""

    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Agent:
    """An agent. title: as it calls itself. command: its program. install: a command line that installs it. settings: of
    a run with an endpoint, whose files are in a folder."""

    name: str
    title: str
    command: str
    install: str
    settings: Callable[[Endpoint, Path], Settings]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.name, self.command)))


def is_of_a_cloud(variable: str) -> bool:
    """Whether an environment variable names another server that answers, or has the key of one."""
    return _CLOUD.fullmatch(variable) is not None


def environment(given: Mapping[str, str], settings: Settings, host: str) -> dict[str, str]:
    """The environment of an agent: the given one without variables of clouds, and with its own. No proxy stands before
    the server's host."""
    kept = {name: value for name, value in given.items() if not is_of_a_cloud(name)}
    for name in ("no_proxy", "NO_PROXY"):
        kept[name] = ",".join(filter(None, (kept.get(name), host)))
    return {**kept, **settings.variables}
