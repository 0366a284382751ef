"""The table of coding agents: how each one is pointed to a server for one run, beside its user's own settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offload.errors import UsageError
from triforce_cli.agents.agent import Agent, Endpoint, Settings

_PROVIDER = "triforce"
_KEY_VARIABLE = "TRIFORCE_API_KEY"


def _claude(endpoint: Endpoint, folder: Path) -> Settings:
    """Variables, and the same in a file of settings, which win over those of the user's own settings."""
    models = (
        *("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL"),
        *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
    )
    variables = {
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_AUTH_TOKEN": endpoint.sent_key,
        **dict.fromkeys(models, endpoint.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.answer),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # the billing block, see apis/billing.py
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    name = "settings.json"
    return Settings(("--settings", str(folder / name)), variables, {name: _json({"env": variables})})


def _codex(endpoint: Endpoint, folder: Path) -> Settings:
    provider = f"model_providers.{_PROVIDER}"
    values = {
        "model": endpoint.model,
        "model_provider": _PROVIDER,
        "model_context_window": endpoint.context,
        f"{provider}.name": _PROVIDER,
        f"{provider}.base_url": f"{endpoint.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": _KEY_VARIABLE,
        "web_search": "disabled",  # which only its maker's server runs
    }
    arguments = tuple(word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}"))
    return Settings(arguments, {_KEY_VARIABLE: endpoint.sent_key})


def _opencode(endpoint: Endpoint, folder: Path) -> Settings:
    model = {"name": endpoint.model, "limit": {"context": endpoint.context, "output": endpoint.answer}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _PROVIDER,
        "options": {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.sent_key},
        "models": {endpoint.model: model},
    }
    named = f"{_PROVIDER}/{endpoint.model}"
    content = {
        "provider": {_PROVIDER: provider},
        "enabled_providers": [_PROVIDER],
        "model": named,
        "small_model": named,
        "agent": {"title": {"disable": True}},  # another prompt, which would take the conversation's place in memory
    }
    return Settings(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(content)})


def _pi(endpoint: Endpoint, folder: Path) -> Settings:
    """An extension that registers a provider, as its own files would be read in place of the user's."""
    model = {
        "id": endpoint.model,
        "name": endpoint.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": endpoint.context,
        "maxTokens": endpoint.answer,
    }
    provider = {
        "baseUrl": f"{endpoint.url}/v1",
        "apiKey": _KEY_VARIABLE,
        "api": "openai-completions",
        "models": [model],
    }
    name = "provider.js"
    extension = f"export default (pi) => pi.registerProvider({json.dumps(_PROVIDER)}, {_json(provider)});\n"
    arguments = ("--extension", str(folder / name), "--provider", _PROVIDER, "--model", endpoint.model)
    return Settings(arguments, {_KEY_VARIABLE: endpoint.sent_key}, {name: extension})


def _aider(endpoint: Endpoint, folder: Path) -> Settings:
    model, name = f"openai/{endpoint.model}", "model.json"
    about = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": endpoint.context,
        "max_tokens": endpoint.answer,
        "max_output_tokens": endpoint.answer,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    arguments = (
        *("--model", model, "--weak-model", model, "--editor-model", model),
        *("--openai-api-base", f"{endpoint.url}/v1", "--model-metadata-file", str(folder / name)),
        *("--map-refresh", "files"),  # else the map of the repository, before all messages, changes with each one
    )
    return Settings(arguments, {"OPENAI_API_KEY": endpoint.sent_key}, {name: _json({model: about})})


def _qwen(endpoint: Endpoint, folder: Path) -> Settings:
    """A file of system settings, which win over those of the user's own settings."""
    model = {
        "id": endpoint.model,
        "name": endpoint.model,
        "baseUrl": f"{endpoint.url}/v1",
        "envKey": _KEY_VARIABLE,
        "generationConfig": {
            "contextWindowSize": endpoint.context,
            "samplingParams": {"max_tokens": endpoint.answer},
        },
    }
    settings = {
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": endpoint.model},
        "privacy": {"usageStatisticsEnabled": False},
    }
    name = "settings.json"
    variables = {"QWEN_CODE_SYSTEM_SETTINGS_PATH": str(folder / name), _KEY_VARIABLE: endpoint.sent_key}
    return Settings((), variables, {name: _json(settings)})


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


AGENTS = (
    Agent("claude", "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", _claude),
    Agent("codex", "Codex", "codex", "npm install -g @openai/codex", _codex),
    Agent("opencode", "opencode", "opencode", "npm install -g opencode-ai", _opencode),
    Agent("pi", "pi", "pi", "npm install -g @mariozechner/pi-coding-agent", _pi),
    Agent("aider", "aider", "aider", "pipx install aider-chat", _aider),
    Agent("qwen-code", "Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", _qwen),
)


def agent_of(name: str) -> Agent:
    """The agent of a name. Raises UsageError."""
    found = next((agent for agent in AGENTS if name in agent.names), None)
    if found is None:
        raise UsageError(f"there is no agent {name!r}; there are {', '.join(agent.name for agent in AGENTS)}")
    return found
