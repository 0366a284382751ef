"""`triforce launch`: a coding agent with a model of this machine, by one command."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from offload.errors import UsageError
from triforce_cli.ground.text import path_text
from triforce_cli.options import completion, options
from triforce_cli.options.call import Changed, ProgramFlags, spread
from triforce_cli.options.options import option, switch
from triforce_cli.options.serving import CONTEXT, SERVER, ServerFlags
from triforce_cli.screen.output import Output

if TYPE_CHECKING:
    from triforce_cli.agents.agent import Agent, Endpoint

_HIDDEN, _FOLDER, _MODEL = "HIDDEN", "FOLDER", "MODEL"  # in place of a key, a run's folder, the server's own choice
_OWN = ("url", "dry-run", "api-key")  # options that no server takes, or not on its command line

AgentName = Annotated[
    str | None,
    typer.Argument(
        metavar="AGENT",
        help="claude, codex, opencode, pi, aider or qwen-code. Without it, those that are installed here.",
        autocompletion=completion.agents,
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments of the agent, behind --.", show_default=False),
]
Url = Annotated[
    str | None,
    option(
        "--url",
        "A server that runs elsewhere, up to the paths of its APIs, instead of one at --host and --port.",
        SERVER,
        metavar="URL",
    ),
]
DryRun = Annotated[
    bool, switch("--dry-run", "Print the environment, the files and the command, and run nothing.", options.OUTPUT)
]


@spread
def launch(
    agent: AgentName = None,
    arguments: Arguments = None,
    *,
    url: Url = None,
    server: ServerFlags,
    dry_run: DryRun = False,
    quiet: options.Quiet = False,
    program: ProgramFlags,
    changed: Changed,
) -> None:
    """Run a coding agent with a model of this machine.

    The agent talks to the server at --host and --port; if none runs there, it is started with the options of triforce
    serve, and ends with the agent. What the agent needs is told to it for this run alone: its own settings stay, and
    keys of clouds are not passed on. The exit code is the agent's.

    Example: triforce launch claude --model path/to/model --context 65536 -- -p 'Which tests fail?'
    """
    from triforce_cli.agents.installed import installed, path_of
    from triforce_cli.agents.server import arguments_of, free_port
    from triforce_cli.agents.table import agent_of
    from triforce_cli.render.agents import running, table

    if not 0 <= server.port <= 65_535:
        raise UsageError(f"port is {server.port}, it must be a whole number from 0 to 65535")
    with Output(quiet=quiet) as output:
        if agent is None:
            output.text(table(installed()))
            return
        chosen, words = agent_of(agent), arguments or ()
        port = server.port or free_port(server.host)
        taken = _others(changed) | ({"port": port} if "port" in changed else {})
        place = _Place(url, replace(server, port=port), (*_config(program), *arguments_of(taken)))
        if dry_run:
            output.text(_shown(chosen, words, place))
            return
        path = path_of(chosen)
        if path is None:
            raise UsageError(f"{chosen.title} is not installed: {chosen.install}")
        with (
            TemporaryDirectory(prefix="triforce-") as folder,
            _endpoint(place, output, Path(folder), _ignored(changed)) as endpoint,
        ):
            for line in running(chosen, endpoint):
                output.note(line)
            _run(chosen, path, words, endpoint, Path(folder))


@dataclass(frozen=True)
class _Place:
    """The place of a server that runs or is started. arguments: of `triforce serve`, without the key."""

    given: str | None
    server: ServerFlags
    arguments: tuple[str, ...]

    @property
    def url(self) -> str:
        from triforce_cli.agents.server import url_of

        return url_of(self.server.host, self.server.port) if self.given is None else self.given.rstrip("/")

    @property
    def key(self) -> str:
        return self.server.api_key or ""

    @property
    def model(self) -> str:
        """The name of the wanted model as the server knows it; "" if none is named."""
        model = self.server.pair.model
        return "" if model is None else model.name if os.path.exists(model) else str(model)

    @property
    def assumed(self) -> str:
        """The name that the model of a server will have which is started."""
        return (self.server.serve_as or [self.model or _MODEL])[0]

    def running(self) -> Endpoint | None:
        """Raises UsageError."""
        from triforce_cli.agents.server import running

        found = running(self.url, self.key, wanted=self.model, is_ours=self.given is None)
        if found is None and self.given is not None:
            raise UsageError(f"nothing serves at {self.url}; without --url a server is started here")
        return found


def _config(program: ProgramFlags) -> list[str]:
    return [] if program.config is None else [f"--config={path_text(program.config)}"]


def _others(changed: Changed) -> dict[str, Any]:
    """The options that a server is started with."""
    return {name: value for name, value in changed.items() if name not in _OWN}


def _ignored(changed: Changed) -> str:
    """The options that a server which runs already does not heed."""
    return ", ".join(f"--{name}" for name in _others(changed) if name not in ("model", "host", "port", "quiet"))


@contextmanager
def _endpoint(place: _Place, output: Output, folder: Path, ignored: str) -> Iterator[Endpoint]:
    """The server that runs, or one that is started and ends with the context. Raises TriforceError."""
    from triforce_cli.agents.server import started

    found = place.running()
    if found is not None:
        if ignored:
            output.note(f"a server runs at {place.url} already, which does not heed {ignored}")
        yield found
        return
    place.server.pair.make_present()  # its own standard error is the log
    log = folder / "server.log"
    output.note(f"starting a server at {place.url}; its log is {log}")
    with started(place.arguments, place.url, place.key, log=log, note=output.note) as endpoint:
        yield endpoint


def _run(agent: Agent, path: Path, words: Sequence[str], endpoint: Endpoint, folder: Path) -> None:
    """Run the agent to its end. Raises TriforceError."""
    from triforce_cli.agents.agent import environment
    from triforce_cli.agents.foreground import run

    settings = agent.settings(endpoint, folder)
    for name, text in settings.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    run([str(path), *settings.arguments, *words], environment(os.environ, settings, _host(endpoint)))


def _shown(agent: Agent, words: Sequence[str], place: _Place) -> str:
    """The text of a dry run. Raises UsageError."""
    from triforce_cli.agents.agent import Endpoint, is_of_a_cloud
    from triforce_cli.render.agents import dry_run

    found = place.running()
    endpoint = found or Endpoint(place.url, place.assumed, place.server.engine.decoding.context or CONTEXT, place.key)
    settings = agent.settings(replace(endpoint, key=_HIDDEN if endpoint.key else ""), Path(_FOLDER))
    key = ("env", f"TRIFORCE_API_KEY={_HIDDEN}") if endpoint.key else ()
    serve = None if found is not None else (*key, "triforce", "serve", *place.arguments)
    command = (agent.command, *settings.arguments, *words)
    return dry_run(serve, settings, _FOLDER, filter(is_of_a_cloud, os.environ), command)


def _host(endpoint: Endpoint) -> str:
    return urlsplit(endpoint.url).hostname or ""
