"""A headless browser over chromedriver's own protocol. No tests in here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from base64 import b64decode
from pathlib import Path
from types import TracebackType
from typing import Any

from kit.served import PATIENCE_SECONDS

CHROMIUM, DRIVER = (shutil.which(name) or "" for name in ("chromium", "chromedriver"))
ENTER, ESCAPE, NEW_LINE = "\ue007", "\ue00c", "\ue008\ue007\ue000"  # keys, as the protocol has them
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name of a reference to one
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en")


class Browser:
    """A context manager: one window. Places on a page are CSS selectors."""

    def __init__(self) -> None:
        self._driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._driver.stdout is not None
        port = next(
            found[1] for line in self._driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        self._url = f"http://127.0.0.1:{port}/session"

    def __enter__(self) -> Browser:
        options = {"binary": CHROMIUM, "args": _ARGUMENTS}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._url += "/" + self._do("", capabilities={"alwaysMatch": wanted})["sessionId"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._call("DELETE", "", None)
        self._driver.terminate()
        self._driver.wait(PATIENCE_SECONDS)
        assert self._driver.stdout is not None
        self._driver.stdout.close()

    def go(self, url: str) -> None:
        self._do("/url", url=url)

    def reload(self) -> None:
        self._do("/refresh")

    def run(self, script: str, *args: Any) -> Any:
        """The value of a function's body."""
        return self._do("/execute/sync", script=script, args=args)

    def texts(self, place: str) -> list[str]:
        """The text content of all elements at a place that are not hidden."""
        script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
        found: list[str] = self.run(f"{script}.map(e => e.textContent)", place)
        return found

    def click(self, place: str) -> None:
        self._do(f"/element/{self._element(place)}/click")

    def press(self, label: str) -> None:
        """Click the last button with this text."""
        buttons = "[...document.querySelectorAll('button')].filter(e => e.textContent === arguments[0])"
        self.run(f"{buttons}.at(-1).click()", label)

    def type(self, place: str, text: str) -> None:
        self._do(f"/element/{self._element(place)}/value", text=text)

    def device(self, command: str, **params: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._do("/goog/cdp/execute", cmd=command, params=params)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.device("Emulation.setDeviceMetricsOverride", **size)

    def scheme(self, name: str) -> None:
        """light or dark."""
        self.device("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path: Path) -> None:
        path.write_bytes(b64decode(self._call("GET", "/screenshot", None)))

    def complaints(self) -> list[str]:
        """The lines of the console since the last call: errors, and what the page's policy has refused."""
        return [entry["message"] for entry in self._do("/se/log", type="browser")]

    def _element(self, place: str) -> str:
        return str(self._do("/element", using="css selector", value=place)[_ELEMENT])

    def _do(self, what: str, **params: Any) -> Any:
        return self._call("POST", what, params)

    def _call(self, method: str, what: str, params: Any) -> Any:
        data = None if params is None else json.dumps(params).encode()
        request = urllib.request.Request(self._url + what, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error
