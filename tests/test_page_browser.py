"""The page in a headless browser, on a stand-in for the model, which says again what it reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.browser import CHROMIUM, DRIVER, ENTER, ESCAPE, NEW_LINE, Browser
from kit.served import Server, until
from triforce_cli.serve.access import Access

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"),
]

HOSTILE = """<script>document.title = 'bad'</script><img src=x onerror="document.title='bad'">
[a link](javascript:document.title='bad') <a href="http://evil.com">evil</a> **<b onclick=bad>bold</b>**

# <style>body { display: none }</style>

```html"><script>document.title = 'bad'</script>
</code></pre><script>document.title = 'bad'</script>
```

| <iframe src="http://evil.com"></iframe> | <svg onload="document.title='bad'"> |
|---|---|
| <form action="http://evil.com"><input name=key> | <meta http-equiv=refresh content="0; http://evil.com"> |

- <details open ontoggle="document.title='bad'">"""


class Chat:
    """The page of a server in a browser."""

    def __init__(self, server: Server, browser: Browser) -> None:
        self.server, self.browser = server, browser

    def open(self) -> None:
        self.browser.go(f"http://127.0.0.1:{self.server.client.port}/")

    def ask(self, text: str) -> None:
        self.browser.type("#question", text + ENTER)

    def asked(self, text: str) -> str:
        """The reply, whole."""
        count = len(self.replies)
        self.ask(text)
        until(lambda: len(self.replies) > count and self.is_still)
        return self.replies[-1]

    @property
    def replies(self) -> list[str]:
        return self.browser.texts(".assistant .text")

    @property
    def notes(self) -> list[str]:
        return self.browser.texts(".assistant .note")

    @property
    def said(self) -> str:
        return "".join(self.replies)

    @property
    def is_still(self) -> bool:
        return bool(self.browser.texts("#send"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def chat(browser: Browser) -> Iterator[Chat]:
    """Each server's port has a storage of its own."""
    with Server(batch=2) as server:
        (chat := Chat(server, browser)).open()
        yield chat
        browser.go("about:blank")
        assert browser.complaints() == []
        assert (server.error, server.refused) == (None, [])


def test_a_reply_is_streamed(chat: Chat) -> None:
    chat.ask("gated")
    until(lambda: "tick tick" in chat.said)
    assert not chat.is_still
    until(lambda: chat.browser.texts("#now")[0].startswith("1 running"))
    chat.server.model.gate.set()
    until(lambda: chat.said.endswith("done") and chat.is_still)
    [told] = chat.browser.texts(".assistant .tools")
    assert told.endswith("5 tokens read, 3 written, 8 a second")


def test_thoughts_are_folded(chat: Chat) -> None:
    assert chat.asked("<think>hm so</think> It rains") == "It rains"
    assert chat.browser.texts(".thoughts > div") == []
    chat.browser.click(".thoughts summary")
    assert chat.browser.texts(".thoughts > div") == ["hm so"]


@pytest.mark.parametrize("how", ["button", "escape"])
def test_a_reply_is_stopped_and_asked_for_again(chat: Chat, how: str) -> None:
    chat.ask("endless")
    until(lambda: "more more" in chat.said)
    chat.browser.click("#stop") if how == "button" else chat.browser.type("#question", ESCAPE)
    until(lambda: chat.notes == ["stopped"] and chat.is_still)
    until(lambda: chat.server.model.left == ["endless"])  # nobody computes on
    chat.browser.press("Retry")
    until(lambda: len(chat.server.model.said) == 2 and chat.said.count("more") > 1 and not chat.notes)
    assert chat.server.model.said == ["endless"] * 2
    chat.browser.click("#fresh")
    until(lambda: chat.replies == [] and chat.is_still)
    until(lambda: len(chat.server.model.left) == 2)


def test_the_last_question_is_edited(chat: Chat) -> None:
    chat.asked("It rains")
    chat.browser.press("Edit")
    assert (chat.replies, chat.browser.run("return document.activeElement.value")) == ([], "It rains")
    assert chat.asked(f" now{NEW_LINE}here") == "It rains now\nhere"
    assert chat.browser.texts(".user .text") == ["It rains now\nhere"]


def test_a_conversation_outlives_a_reload_and_one_under_way_is_told_as_cut(chat: Chat) -> None:
    chat.asked("It rains")
    chat.browser.reload()
    assert (chat.browser.texts(".user .text"), chat.replies) == (["It rains"], ["It rains"])
    assert "tokens read" in chat.browser.texts(".assistant .tools")[0]
    chat.browser.click("#fresh")
    chat.ask("endless")
    until(lambda: "more" in chat.said)
    chat.browser.reload()
    assert chat.notes == ["cut by a reload of the page"]
    chat.browser.click("#fresh")
    chat.browser.reload()
    assert chat.browser.texts("article") == []


def test_the_whole_conversation_is_sent(chat: Chat) -> None:
    chat.asked("One.")
    assert chat.asked("Two.") == "One.One.Two."
    first, second = chat.server.model.said
    assert (first, second) == ("One.", "One.One.Two.")


@pytest.mark.parametrize("stage", ["refused", "streamed", "gone"])
def test_an_error_is_told_and_the_question_stays(browser: Browser, stage: str) -> None:
    questions = {"refused": "x" * 5000, "streamed": "fail now", "gone": "hi"}
    told = {"refused": "the prompt is too long", "streamed": "the model failed", "gone": "the server does not answer"}
    with Server() as server:
        (chat := Chat(server, browser)).open()
        if stage == "gone":
            server.__exit__(None, None, None)
        browser.run("document.getElementById('question').value = arguments[0]", questions[stage])
        chat.ask("")
        until(lambda: chat.notes and told[stage] in chat.notes[0])
        assert chat.is_still
        assert browser.texts(".note.bad") == chat.notes
        assert browser.texts(".assistant .tools button")[-1] == "Retry"
        assert browser.texts(".user .text") == [questions[stage]]
    browser.go("about:blank")
    browser.complaints()


def test_html_of_a_model_is_text(chat: Chat) -> None:
    """In every kind of block. What it would run or load never is."""
    browser = chat.browser
    browser.run("document.getElementById('question').value = arguments[0]", HOSTILE)
    said = chat.asked("")
    for part in ("<script>document.title = 'bad'</script>", "javascript:document.title", "<iframe", "<style>", "<meta"):
        assert part in said
    names = browser.run("return [...document.querySelectorAll('.assistant .text *')].map(e => e.localName)")
    assert set(names) <= {"p", "strong", "h3", "pre", "code", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}
    assert {"strong", "h3", "code", "td", "li"} <= set(names)
    assert browser.run("return document.querySelectorAll('article a, article [onclick], article [src]').length") == 0
    assert browser.run("return document.title") == "tiny"


def test_the_policy_refuses_what_slips_through(browser: Browser) -> None:
    """A text that became HTML, an inline script, a request to elsewhere."""
    with Server() as server:
        Chat(server, browser).open()
        for attack in (
            "document.body.innerHTML = '<img src=x>'",
            "document.createElement('script').text = 'document.title = 1'",
            "document.body.setAttribute('onclick', 'document.title = 1')",
        ):
            with pytest.raises(AssertionError, match=r"requires 'Trusted(HTML|Script)'"):
                browser.run(attack)
        refused = "return fetch('http://127.0.0.1:1/').then(() => 'sent', error => error.message)"
        assert browser.run(refused) == "Failed to fetch"
        assert any("connect-src" in line for line in browser.complaints())
        assert browser.run("return document.title") != "1"


def test_files_become_documents_before_the_question(chat: Chat) -> None:
    browser = chat.browser
    browser.run("""const data = new DataTransfer();
        data.items.add(new File(['The rent is 300.\\n'], 'lease.txt'));
        data.items.add(new File(['\\0'], 'a.bin'));
        document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true}));""")
    until(lambda: browser.texts("#trouble"))
    assert browser.texts("#sent .file") == ["lease.txt (text)×"]
    assert browser.texts("#trouble") == [
        "a.bin was not added: a.bin is no text, and no PDF, Word document, EPUB or web page"
    ]
    assert [refusal.path for refusal in chat.server.refused] == ["/documents"]
    chat.server.refused.clear()
    browser.complaints()  # of the refusal
    chat.asked("How much?")
    assert chat.server.model.said == ["[file: lease.txt]\nThe rent is 300.\n[end of file]\n\nHow much?"]
    assert (browser.texts(".user .file"), browser.texts(".user .text")) == (["lease.txt"], ["How much?"])
    browser.press("Edit")
    assert browser.texts("#sent .file") == ["lease.txt (text)×"]
    browser.click("#sent .file button")
    assert browser.texts("#sent .file") == []


def test_citations_name_the_file_and_the_line(chat: Chat) -> None:
    browser = chat.browser
    texts = {"a.txt": "Of the lease.\n", "b.txt": "The rent is 300.\n"}
    files = [{"name": name, "text": f"[file: {name}]\n{text}[end of file]\n\n"} for name, text in texts.items()]
    whole = "".join(file["text"] for file in files).split("\n")
    cites = [
        {"document": "message 1", "place": "", "first_line": first, "text": "\n".join(whole[first - 1 : last])}
        for first, last in ((1, 2), (6, 6), (6, 7))
    ]
    browser.run(
        """talk = [{role: 'user', text: '', files: arguments[0]}, {role: 'assistant', text: '', thoughts: ''}];
        take(talk[1], {choices: [], citations: arguments[1]}); drawAll()""",
        files,
        cites,
    )
    found = ["Of the lease. a.txt, line 1", "The rent is 300. b.txt, line 1", "The rent is 300. b.txt, line 1"]
    assert browser.texts(".cites li") == found


def test_the_key_is_asked_for_and_kept_for_this_window(browser: Browser) -> None:
    with Server(access=Access("127.0.0.1", "secret-key")) as server:
        (chat := Chat(server, browser)).open()
        until(lambda: browser.texts("#door"))
        assert [refusal.status for refusal in server.refused] == [401]
        browser.type("#key", "wrong" + ENTER)
        until(lambda: browser.texts("#door") and not browser.run("return document.getElementById('key').value"))
        browser.type("#key", "secret-key" + ENTER)
        until(lambda: browser.texts("#now")[0].startswith("0 running"))
        assert chat.asked("It rains") == "It rains"
        browser.reload()
        until(lambda: browser.texts("#now")[0].startswith("0 running"))
        assert browser.texts("#door") == []
        assert "secret" not in browser.run("return JSON.stringify(localStorage) + document.documentElement.outerHTML")
    browser.go("about:blank")
    browser.complaints()


def test_it_fits_a_narrow_window_and_a_dark_one(chat: Chat) -> None:
    browser = chat.browser
    try:
        browser.resize(360, 640)
        table = "| a | b |\n|---|---|\n" + f"| {'wide ' * 30}| {'x' * 90} |\n\n```\n{'long ' * 40}\n```\n" + "y" * 200
        browser.run("document.getElementById('question').value = arguments[0]", table)
        chat.asked("")
        browser.click("#look")
        until(lambda: browser.texts("#status dd"))
        for scheme, is_dark in (("light", False), ("dark", True)):
            browser.scheme(scheme)
            width = "return Math.max(document.documentElement.scrollWidth, document.getElementById('talk').scrollWidth)"
            assert browser.run(width) <= 360
            colour = browser.run("return getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, colour[4:-1].split(","))) < 3 * 64) is is_dark
    finally:
        browser.resize(1000, 800)
        browser.scheme("light")


def test_every_control_has_a_name(chat: Chat) -> None:
    chat.asked("It rains")
    nameless = """return [...document.querySelectorAll('button, input, textarea, summary')].filter(each =>
        !(each.textContent || each.ariaLabel || each.labels?.length) && each.checkVisibility()).length"""
    assert chat.browser.run(nameless) == 0


def test_a_conversation_that_the_browser_cannot_keep_goes_on(chat: Chat) -> None:
    chat.browser.run("talk = [{role: 'user', text: 'x'.repeat(6e6), files: []}]; save()")
    assert "too long for this browser" in chat.browser.texts("#trouble")[0]
