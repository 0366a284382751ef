"""`triforce launch`: a stand-in for an agent, with a server that runs or that is started."""

from __future__ import annotations

import ast
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer

from kit import programs
from kit.models import save_pair
from kit.served import Server, until
from test_cli_fake import ROOT, environment
from triforce_cli.agents import server as server_module
from triforce_cli.agents.agent import NO_KEY, Endpoint, is_of_a_cloud
from triforce_cli.agents.server import arguments_of, free_port
from triforce_cli.agents.table import AGENTS, agent_of
from triforce_cli.app import app
from triforce_cli.serve.access import Access
from triforce_cli.settings import tree

Triforce = Callable[..., tuple[int, str, str]]
NAMES = [agent.name for agent in AGENTS]
SERVES = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        model = {"id": "m", "owned_by": "triforce", "context_length": 4096}
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps({"data": [model]}).encode())
    def log_message(self, *said): pass
print("loading", file=sys.stderr, flush=True)
leads = os.getsid(0) == os.getpid()  # else the terminal's signals reach it
with open(sys.argv[1], "w") as file:
    print(os.getpid(), leads, os.environ.get("TRIFORCE_API_KEY"), sys.argv[3:], file=file)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""  # what `serve` does, for the options of these tests


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path, since sockets are below it."""
    return tmp_path_factory.mktemp("l")


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put an agent on PATH: a script of sh, or of the interpreter."""
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path / "bin"), "/usr/bin", "/bin")))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing is
    monkeypatch.setattr(server_module, "_LOOK_SECONDS", 0.02)
    (tmp_path / "bin").mkdir()
    (tmp_path / "tmp").mkdir()

    def put(name: str, script: str, interpreter: str = "/bin/sh") -> None:
        (made := tmp_path / "bin" / agent_of(name).command).write_text(f"#!{interpreter}\n{script}\n")
        made.chmod(0o755)

    return put


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A quick program in place of `triforce serve`. Says its process, whether its session is its own, its key and its
    arguments."""
    told = tmp_path / "told"

    def line(arguments: Any) -> list[str]:
        port = next(each.partition("=")[2] for each in arguments if each.startswith("--port="))
        return [sys.executable, "-c", SERVES, str(told), port, *arguments]

    monkeypatch.setattr(server_module, "serve_line", line)
    return lambda: told.read_text().split(maxsplit=3)


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def port() -> str:
    return f"--port={free_port('127.0.0.1')}"


@pytest.mark.parametrize("name", NAMES)
def test_an_agent_gets_its_settings_and_no_key_of_a_cloud(
    name: str, put: Callable[..., None], triforce: Triforce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are removed, and its exit code is the program's."""
    put(name, f'env > {tmp_path}/env; cp -r "$TMPDIR" {tmp_path}/copy; for each in "$@"; do echo "$each"; done; exit 7')
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "GEMINI_API_KEY", "OPENROUTER_API_KEY"):
        monkeypatch.setenv(variable, "of-a-cloud")
    monkeypatch.setenv("GITHUB_TOKEN", "kept")
    with Server() as server:
        code, out, err = triforce("launch", name, "--port", str(server.client.port), "--", "-p", "a b", "--help")
    url = f"http://127.0.0.1:{server.client.port}"
    (folder,) = (tmp_path / "copy").iterdir()
    settings = agent_of(name).settings(Endpoint(url, "tiny", 4096), tmp_path / "tmp" / folder.name)
    assert (code, out.splitlines()) == (7, [*settings.arguments, "-p", "a b", "--help"])
    assert err.splitlines() == [
        f"{agent_of(name).title}: tiny at {url}, 4,096 tokens of context",
        "agents want 32,768 tokens of context or more (--context): with less they shorten all the time",
    ]
    assert {file.name: file.read_text() for file in folder.iterdir()} == settings.files
    given = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert given.items() >= settings.variables.items()
    assert "of-a-cloud" not in given.values()
    assert (given["GITHUB_TOKEN"], given["NO_PROXY"].split(",")[-1]) == ("kept", "127.0.0.1")
    assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.parametrize("name", NAMES)
def test_settings_say_the_server_the_model_the_context_and_the_key(name: str) -> None:
    told = str(agent_of(name).settings(Endpoint("http://host:1", "some/model", 65_536, "key"), Path("folder")))
    assert all(word in told for word in ("http://host:1", "some/model", "65536", "key"))
    assert NO_KEY in str(agent_of(name).settings(Endpoint("http://host:1", "m", 65_536), Path("folder")))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("OPENAI_API_KEY OPENAI_BASE_URL ANTHROPIC_AUTH_TOKEN ANTHROPIC_MODEL CLAUDE_CODE_USE_BEDROCK", True),
        ("GEMINI_API_KEY GOOGLE_API_KEY GROQ_API_KEY AZURE_OPENAI_API_KEY CLAUDE_CODE_OAUTH_TOKEN XAI_API_KEY", True),
        ("PATH HOME GITHUB_TOKEN STRIPE_API_KEY AWS_PROFILE CLAUDE_CONFIG_DIR CODEX_HOME TRIFORCE_API_KEY", False),
        ("MY_OPENAI_API_KEY QWEN_HOME GOOGLE_CLOUD_PROJECT GROQ_API_KEYS", False),
    ],
)
def test_variables_of_clouds(names: str, expected: bool) -> None:
    assert {is_of_a_cloud(name) for name in names.split()} == {expected}


def test_a_server_is_started_with_the_options_and_ends_with_the_agent(
    put: Callable[..., None], triforce: Triforce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`triforce serve` itself. Its key is on no command line."""
    asks = """
import json, os, urllib.request
base, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_AUTH_TOKEN"]
body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
request = urllib.request.Request(base + "/v1/messages", json.dumps(body).encode(), {"x-api-key": key})
print(json.load(urllib.request.urlopen(request))["model"], key, os.environ["CLAUDE_CODE_MAX_CONTEXT_TOKENS"])
raise SystemExit(3)
"""
    put("claude", asks, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    target = save_pair(tmp_path / "pair", context=1024)[0]
    args = ("--model", str(target), "--draft=none", "--dtype=fp32", "--context=512", "--no-store", "--stop", "a b")
    listens = port()
    code, out, err = triforce("launch", "claude", *args, listens, "--api-key", "secret", "--serve-as", "mine")
    assert (code, out) == (3, "mine secret 512\n"), err
    assert err.splitlines()[-2] == f"Claude Code: mine at http://127.0.0.1:{listens[7:]}, 512 tokens of context"
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(listens[7:]))):
        pass
    assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.parametrize(("script", "expected"), [("true", 0), ("exit 9", 9), ("kill -KILL $$", 137)])
def test_the_server_ends_however_the_agent_ends(
    script: str, expected: int, put: Callable[..., None], stand_in: Callable[[], list[str]], triforce: Triforce
) -> None:
    put("pi", script)
    listens = port()
    code, _, err = triforce("launch", "pi", listens, "--api-key=secret", "--batch", "2", "--no-store", "-q")
    pid, leads, key, arguments = stand_in()
    assert (code, err, leads, key) == (expected, "", "True", "secret")
    assert {*ast.literal_eval(arguments)} - {"--config=/dev/null"} == {"--batch=2", "--no-store", listens, "--quiet"}
    until(lambda: has_ended(int(pid)))


def test_notes_say_how_the_server_starts_and_that_it_ended_under_the_agent(
    put: Callable[..., None], stand_in: Callable[[], list[str]], triforce: Triforce, tmp_path: Path
) -> None:
    put("pi", f'kill -KILL "$(cut -d" " -f1 {tmp_path}/told)"; sleep 0.3')
    code, _, err = triforce("launch", "pi", port())
    lines = err.splitlines()
    assert (code, lines[1]) == (0, "loading")
    assert lines[-1] == "the server had ended (exit code -9): loading"


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("import sys; sys.exit('error: context needs 64 GiB; try --context 4096')", 1, "error: context needs 64 GiB"),
        ("import sys; print('error: none fits', file=sys.stderr); sys.exit(3)", 3, "error: none fits"),
        (
            "import sys, time\nfor part in ('load', 'ing\\n', 'error: no', 'ne fits', '\\n'):\n"
            "    print(part, file=sys.stderr, end='', flush=True); time.sleep(0.1)\nsys.exit(3)",
            3,
            "error: none fits",
        ),
        ("import os; os.kill(os.getpid(), 9)", 1, "error: the server ended with exit code -9"),
    ],
)
def test_a_server_that_ends_at_its_start_is_an_error_with_its_code(
    script: str,
    code: int,
    said: str,
    put: Callable[..., None],
    triforce: Triforce,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put("pi", "touch ran")
    monkeypatch.setattr(server_module, "serve_line", lambda arguments: [sys.executable, "-c", script])
    found, _, err = triforce("launch", "pi", port())
    assert (found, err.count("error: ")) == (code, 1)
    assert err.splitlines()[-1].startswith(said)
    assert not {"load", "ing"} & {*err.splitlines()}
    assert not Path("ran").exists()


def test_a_model_to_be_fetched_is_asked_for_before_a_server_starts_which_has_nobody_to_ask(
    put: Callable[..., None], stand_in: Callable[[], list[str]], triforce: Triforce, tmp_path: Path
) -> None:
    put("pi", "touch ran")
    code, _, err = triforce("launch", "pi", port(), "--model", "owner/none-GGUF:Q4_0")
    assert (code, err.splitlines()[-1].endswith("fetches it, and so does --yes")) == (4, True)
    assert not (tmp_path / "told").exists()


class Other(BaseHTTPRequestHandler):
    """Another program at a port. answer: (status, text) of whatever is asked for."""

    answer = (200, "")

    def do_GET(self) -> None:
        self.send_response(self.answer[0])
        self.end_headers()
        self.wfile.write(self.answer[1].encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def other() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, "<html>"), "is no server of models; --port N names another port, --url URL another server"),
        ((404, ""), "is no server of models (status 404); --port N"),
        ((200, '{"data": []}'), "is no server of models; --port N"),
        ((200, '{"data": [{"id": "llama", "context_length": 4}]}'), "another program serves at http://127.0.0.1:"),
    ],
)
def test_another_program_at_the_port_is_refused(
    answer: tuple[int, str],
    said: str,
    other: HTTPServer,
    put: Callable[..., None],
    triforce: Triforce,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put("pi", "true")
    monkeypatch.setattr(Other, "answer", answer)
    code, _, err = triforce("launch", "pi", f"--port={other.server_port}")
    assert (code, len(err.splitlines())) == (2, 1)
    assert said in err


def test_a_port_that_gives_no_answer_is_refused(
    put: Callable[..., None], triforce: Triforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("pi", "true")
    monkeypatch.setattr(server_module, "_ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, _, err = triforce("launch", "pi", f"--port={silent.getsockname()[1]}")
    assert code == 2
    assert "gives no answer; if a server starts there, wait until it serves; --port N" in err


def test_a_server_elsewhere_may_be_of_another_kind_and_has_to_be_there(
    other: HTTPServer, put: Callable[..., None], triforce: Triforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("pi", 'echo "$@"')
    models = '{"data": [{"id": "llama", "context_length": 4096}, {"id": "b"}]}'
    monkeypatch.setattr(Other, "answer", (200, models))
    url = f"http://127.0.0.1:{other.server_port}"
    assert triforce("launch", "pi", "--url", f"{url}/", "-q")[1].endswith(" --model llama\n")
    code, _, err = triforce("launch", "pi", "--url", url, "--model", "b")
    assert (code, "does not say its context" in err) == (2, True)
    code, _, err = triforce("launch", "pi", "--url", f"http://127.0.0.1:{port()[7:]}")
    assert (code, "; without --url a server is started here" in err) == (2, True)


def test_a_server_with_another_model_or_a_key_is_refused_by_name(put: Callable[..., None], triforce: Triforce) -> None:
    put("pi", 'echo "$TRIFORCE_API_KEY"')
    with Server(access=Access("127.0.0.1", "secret")) as server:
        listens = f"--port={server.client.port}"
        code, _, err = triforce("launch", "pi", listens)
        assert (code, err.endswith("asks for its key: --api-key KEY\n")) == (2, True)
        keyed = (listens, "--api-key", "secret")
        assert triforce("launch", "pi", *keyed, "--model", "other", "-q") == (0, "secret\n", "")
        code, _, err = triforce("launch", "pi", *keyed, "--model", "third")
        assert (code, "has tiny, other, not third; leave --model out, or --port N" in err) == (2, True)
        _, out, err = triforce("launch", "pi", *keyed, "--context", "99", "--dry-run")
        assert ("secret" in out + err, "HIDDEN" in out, "triforce serve" in out) == (False, True, False)
        _, _, err = triforce("launch", "pi", *keyed, "--context", "99")
        assert "already, which does not heed --context\n" in err


def test_an_agent_that_is_not_installed_or_unknown_is_a_usage_error(
    put: Callable[..., None], triforce: Triforce
) -> None:
    assert triforce("launch", "qwen")[::2] == (
        2,
        "error: Qwen Code is not installed: npm install -g @qwen-code/qwen-code\n",
    )
    code, _, err = triforce("launch", "cursor")
    assert (code, "there is no agent 'cursor'; there are claude, codex," in err) == (2, True)


def test_the_list_names_programs_versions_and_how_to_install_the_others(
    put: Callable[..., None], triforce: Triforce, tmp_path: Path
) -> None:
    package = tmp_path / "lib" / "node_modules" / "@openai" / "codex"
    (package / "bin").mkdir(parents=True)
    (package / "package.json").write_text('{"version": "1.2.3"}')
    (package / "bin" / "codex.js").write_text("exit 1")
    (package / "bin" / "codex.js").chmod(0o755)
    (tmp_path / "bin" / "codex").symlink_to(package / "bin" / "codex.js")
    put("aider", "exit 1")
    code, out, err = triforce("launch")
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert [*lines] == NAMES
    assert lines["codex"] == f"Codex 1.2.3, {tmp_path}/bin/codex"
    assert lines["aider"] == f"aider, {tmp_path}/bin/aider"
    assert lines["claude"] == "not installed: npm install -g @anthropic-ai/claude-code"


def test_the_names_of_a_servers_options_are_those_of_its_command_line() -> None:
    """A server is started with the options that differ, by the names of their parameters."""
    command = tree.commands(typer.main.get_command(app))[("serve",)]
    for name, found in tree.options(command).items():
        assert found.name.replace("_", "-") == name
        assert not found.is_flag or found.default is False or f"--no-{name}" in found.secondary_opts
    assert arguments_of({"no-lookup": True, "store": False, "stop": ["a b", "-c"], "context": 9}) == [
        *("--no-lookup", "--no-store", "--stop=a b", "--stop=-c", "--context=9"),
    ]  # fmt: skip


@pytest.fixture
def terminal(put: Callable[..., None]) -> Iterator[Callable[[str], programs.ProgramTerminal]]:
    """`triforce launch pi` at a terminal, once the script has said that it is ready."""
    made = []
    with Server() as server:

        def begin(script: str) -> programs.ProgramTerminal:
            put("pi", f"{script}\necho ready\nwhile :; do sleep 0.05; done")
            made.append(programs.ProgramTerminal(["launch", "pi", f"--port={server.client.port}"], env=environment()))
            made[0].until_shown("ready")
            return made[0]

        yield begin
        for each in made:
            each.close()


def test_ctrl_c_is_the_agents(terminal: Callable[[str], programs.ProgramTerminal]) -> None:
    begun = terminal("trap 'trap \"exit 5\" INT; echo first' INT")
    begun.send("\x03")
    begun.until_shown("first")
    begun.send("\x03")
    assert begun.finish() == 5


def test_a_request_to_end_is_passed_on(terminal: Callable[[str], programs.ProgramTerminal]) -> None:
    begun = terminal("trap 'echo heard; exit 6' TERM")
    begun.signal(signal.SIGTERM)
    begun.until_shown("heard")
    assert begun.finish() == 6


def test_an_agent_that_stops_itself_stops_the_program_with_it(
    terminal: Callable[[str], programs.ProgramTerminal],
) -> None:
    """The shell would not notice, and the terminal would be nobody's."""
    begun = terminal("trap 'kill -STOP $$; echo again; exit 0' USR1; echo pid $$")
    pid = int(next(line for line in begun.lines if line.startswith("pid ")).split()[1])
    os.kill(pid, signal.SIGUSR1)
    until(lambda: _state(pid) == "T" and _state(_parent(pid)) == "T")
    os.kill(_parent(pid), signal.SIGCONT)
    begun.until_shown("again")
    assert begun.finish() == 0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
