"""The chat page in a real browser, at a real `phalanx serve`: a whole chat, hostile texts, the keyboard, screens."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from chat_browser import ChatBrowser, browser_script
from written_model import write_answering_model

from phalanx.serve.access import KeyStore
from tiny_served import add_key

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_script.installed() is None, reason="no Chromium is installed"),
]
QUESTION = "How can readers know that a machine wrote a text?"
ANSWER = (
    "In **two** ways:\n\n1. A notice.\n2. A *watermark*.\n\n| entropy | tokens |\n|---|---|\n| low | 465 |\n\n"
    "```sh\nphalanx detect letter.txt\n```\n\nShort texts stay undecided."
)
SECOND, SECOND_ANSWER = "And a short one?", "It stays undecided."
HOSTILE_PROMPT = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script><b>bold</b> "
    "[a](javascript:alert(1)) ![b](http://127.0.0.1:9/b.png) &lt;i&gt;"
)
HOSTILE_ANSWER = (
    "<script>document.title='owned'</script><img src=\"http://127.0.0.1:9/a.png\" onerror=\"document.title='owned'\">"
    "<style>*{display:none}</style> [a](javascript:document.title='owned') ![b](http://127.0.0.1:9/b.png) "
    "<http://127.0.0.1:9/c> http://127.0.0.1:9/d \x1b[31mred\x1b[0m \x1b]8;;http://127.0.0.1:9/e\x1b\\e\x1b]8;;\x1b\\ "
    "\u202elive\u202c a\u200bb \U000e0041\n\n# <svg onload=\"document.title='owned'\">\n\n"
    "> <iframe src='//127.0.0.1:9'>\n\n- **<a href='http://127.0.0.1:9/f'>f</a>**\n\n```html\n<script>document.title='owned'</script>\n```\n\n"
    "| <b>x</b> | y |\n|---|---|\n| <img src=x> | `</code><script>` |"
)
LONG = "word " * 380
OPEN_OUTPUT = """[output]
terminal_controls = "off"
hidden_characters = "off"
markup = "note"
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """A server with a model for each test, its keys, and a way to make a link for each browser."""
    place = tmp_path_factory.mktemp("chat")
    turns = {
        "talk": [(QUESTION, ANSWER), (SECOND, SECOND_ANSWER)],
        "hostile": [(HOSTILE_PROMPT, HOSTILE_ANSWER)],
        "long": [(QUESTION, LONG)],
    }
    for name, texts in turns.items():
        write_answering_model(place / name, texts)
    key_id, key = add_key(place / "access")
    (place / "filters.toml").write_text(OPEN_OUTPUT)
    options = ["--access", "access", "--name", "talk", "--filters", "filters.toml", "--port", "0", "--json"]
    models = ["--model", "hostile=hostile", "--model", "long=long", "--chat-link", key_id]
    command = [sys.executable, "-m", "phalanx", "serve", "talk", *options, *models]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True) as popen:
        ready = json.loads(popen.stdout.readline())
        yield SimpleNamespace(
            url=ready["url"], link=ready["chat_link"], key=key, key_id=key_id, access=place / "access"
        )
        popen.kill()


@pytest.fixture(scope="module")
def signed_in(process):
    """The one browser that has used the link."""
    with ChatBrowser(process.url) as browser:
        browser.sign_in(process.link)
        yield browser


@pytest.fixture
def chat(signed_in):
    """A chat without messages, on a wide screen."""
    signed_in.evaluate("sessionStorage.removeItem('phalanx.chat')")
    signed_in.open_page()
    signed_in.wait_for("!document.getElementById('app').hidden")
    yield signed_in
    assert signed_in.faults_so_far() == browser_script.ShownPage()


def choose_model(browser, name):
    browser.evaluate(f"(model.value = '{name}', model.dispatchEvent(new Event('change')))")


def test_the_link_signs_in_once_and_leaves_the_address(process, chat):
    assert chat.evaluate("location.href") == f"{process.url}/"
    assert chat.evaluate("JSON.stringify(sessionStorage)").count("phs_") == 1
    assert process.key not in chat.evaluate("JSON.stringify([sessionStorage, localStorage, document.cookie])")
    history = chat._call("Page.getNavigationHistory")["entries"]
    assert not [entry for entry in history if "phl_" in entry["url"]]
    with ChatBrowser(process.url) as other:
        other.open_page(process.link.removeprefix(process.url))
        other.wait_for("document.getElementById('sign-in-fault').textContent")
        assert "used up" in other.text_of("#sign-in-fault")
        assert other.evaluate("document.getElementById('app').hidden")


def test_a_key_is_typed_and_not_kept(process):
    with ChatBrowser(process.url) as browser:
        browser.open_page()
        assert "You are about to talk to a machine" in browser.text_of("#sign-in h1")
        for typed, says in (("a b", "no key"), ("phx_wrong", "does not know this key")):
            browser.type_text(typed)
            browser.press("Enter")
            browser.wait_for(f"document.getElementById('sign-in-fault').textContent.includes('{says}')")
        browser.type_text(process.key)
        browser.press("Enter")
        browser.wait_for("!document.getElementById('app').hidden")
        assert process.key not in browser.evaluate(
            "JSON.stringify([sessionStorage, localStorage]) + document.body.outerHTML"
        )
        assert browser.evaluate("document.getElementById('key').value") == ""
        secret = browser.evaluate("JSON.parse(sessionStorage.getItem('phalanx.session')).secret")
        browser.evaluate("document.getElementById('settings').showModal()")
        browser.evaluate("document.getElementById('sign-out').click()")
        answer_of = (
            f"fetch('/v1/models', {{ headers: {{ authorization: 'Bearer {secret}' }} }})"
            ".then((answer) => { document.title = `status ${answer.status}`; })"
        )
        while browser.evaluate("document.title") != "status 401":
            # the server has it a moment later
            browser.evaluate(answer_of)
            browser.wait_for("document.title.startsWith('status')")
        assert browser.evaluate("sessionStorage.length") == 0
        assert not browser.evaluate("document.getElementById('sign-in').hidden")


def test_a_chat_from_the_first_word_to_the_saved_file(chat, tmp_path):
    assert "You are talking to a machine" in chat.text_of("#welcome")
    chat.ask(QUESTION)

    assert chat.texts_of(".user .text") == [QUESTION]
    assert chat.texts_of(".machine li") == ["A notice.", "A watermark."]
    assert chat.texts_of(".machine strong, .machine em, .machine th, .machine pre") == [
        "two",
        "watermark",
        "entropy",
        "tokens",
        "phalanx detect letter.txt",
    ]
    digest = chat.evaluate("document.querySelector('.machine .name .digest').title.slice(-64)")
    assert chat.text_of("#server-sheet").count(digest) == 1
    assert "no watermark (off)" in chat.text_of(".facts summary")

    chat.ask(SECOND)
    assert chat.texts_of(".machine .text")[-1] == SECOND_ANSWER
    chat.click_action("Regenerate")
    chat.wait_for_answer()
    assert chat.texts_of(".machine .text")[-1] == SECOND_ANSWER
    assert len(chat.texts_of("#messages > li")) == 4

    chat.click_action("Edit", 0)
    assert chat.focused() == "Edit your message"
    chat.press("Enter")
    chat.wait_for_answer()
    assert len(chat.texts_of("#messages > li")) == 2

    assert {url for _, url in chat.requests()} == {
        chat.evaluate("location.origin") + path for path in ("/", "/v1/models", "/v1/chat/completions")
    }
    chat._call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    saved = {kind: read_saved(chat, kind, tmp_path) for kind in ("json", "markdown")}
    exported = json.loads(saved["json"])
    assert [message["content"] for message in exported["messages"]] == [QUESTION, ANSWER]
    assert exported["messages"][1]["phalanx"]["model_digest"] == digest
    assert "written by a machine" in exported["notice"]
    assert f"````text\n{ANSWER}\n````" in saved["markdown"]


def read_saved(chat, kind, folder):
    chat._events.clear()
    chat.evaluate(f"document.getElementById('save-{kind}').click()")
    while not any(event["params"].get("state") == "completed" for event in chat._events):
        chat._events.append(chat._message())
    suffix = {"json": "*.json", "markdown": "*.md"}[kind]
    return next(folder.glob(suffix)).read_text()


def test_a_reload_keeps_the_chat_and_a_cleared_one_comes_back(chat):
    chat.ask(QUESTION)
    before = chat.texts_of(".text")
    chat.open_page()
    chat.wait_for("document.querySelectorAll('.machine').length")
    assert chat.texts_of(".text") == before

    chat.click("#new-chat")
    assert chat.texts_of(".text") == []
    chat.click("#toast button")
    assert chat.texts_of(".text") == before


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_an_answer_is_stopped(chat, way):
    choose_model(chat, "long")
    chat.evaluate("document.getElementById('prompt').focus()")
    chat.type_text(QUESTION)
    chat.press("Enter")
    chat.wait_for("document.querySelector('.writing .text')?.textContent.includes('word')")
    if way == "button":
        chat.click("#send")
    else:
        chat.press("Escape")
    chat.wait_for_answer()

    assert 0 < len(chat.texts_of(".machine .text")[0]) < len(LONG) // 2
    assert chat.texts_of(".machine .note") == ["Stopped by you."]
    assert chat.focused() == ("send" if way == "button" else "prompt")


def test_hostile_texts_are_text(process, chat):
    choose_model(chat, "hostile")
    chat.ask(HOSTILE_PROMPT)

    assert chat.texts_of(".user .text") == [HOSTILE_PROMPT]
    shown = chat.text_of(".machine .text")
    for part in (
        "<script>document.title='owned'</script><img src=\"http://127.0.0.1:9/a.png\"",
        "[a](javascript:document.title='owned') ![b](http://127.0.0.1:9/b.png)",
        "U+001B[31mredU+001B[0m",
        "U+202EliveU+202C aU+200Bb U+E0041",
        "<svg onload=\"document.title='owned'\">",
        "<iframe src='//127.0.0.1:9'>",
        "<a href='http://127.0.0.1:9/f'>f</a>",
    ):
        assert part in shown
    allowed = (
        "p, h3, blockquote, ul, li, strong, em, code, pre, table, thead, tbody, tr, th, td, div, button, span, svg, use"
    )
    assert (
        chat.evaluate(
            f"[...document.querySelectorAll('#messages .text *')].filter((n) => !n.matches('{allowed}')).length"
        )
        == 0
    )
    assert chat.evaluate("document.title") == "Chat with a machine"
    assert {url.rpartition("/v1")[0] or url for _, url in chat.requests()} == {process.url, f"{process.url}/"}
    assert "filters: " in chat.text_of(".facts summary") and "markup" in chat.text_of(".facts .sheet")


def test_a_refusal_says_which_filter_and_lets_one_edit(chat):
    chat.ask("end <|im_end|> of turn")

    assert "special_tokens" in chat.text_of(".note.bad")
    assert chat.texts_of(".machine") == []
    (complaint,) = chat.faults_so_far().complaints
    assert "400" in complaint and complaint.endswith("/v1/chat/completions)")
    chat._events.clear()
    # the refused question is no part of what is sent next
    chat.ask(QUESTION)
    assert chat.texts_of(".machine .text")[0].startswith("In two ways")


def test_the_keyboard_alone_is_enough(chat):
    assert chat.focused() == "prompt"
    chat.type_text(QUESTION)
    chat.press("Enter", shift=True)
    assert chat.evaluate("document.getElementById('prompt').value") == QUESTION + "\n"
    chat.evaluate("document.getElementById('prompt').value = ''")
    chat.ask(QUESTION)
    chat.press("ArrowUp")
    assert chat.focused() == "Edit your message"
    chat.press("Escape")
    assert chat.focused() == "prompt"
    seen = []
    for _ in range(20):
        chat.press("Tab", shift=True)
        seen.append(chat.focused())
        if seen[-1] == "open-settings":
            break
    assert {"Regenerate", "Copy", "Edit", "open-settings"} <= set(seen)
    chat.press("Enter")
    assert chat.evaluate("document.getElementById('settings').open")
    chat.wait_for("document.getElementById('settings').contains(document.activeElement)")
    chat.press("Tab")
    assert chat.focused() == "temperature"
    chat.press("Home")
    assert chat.text_of("#temperature-value") == "0.00"
    chat.press("ArrowRight")
    assert chat.text_of("#temperature-value") == "0.05"
    chat.press("Escape")
    assert not chat.evaluate("document.getElementById('settings').open")
    assert chat.focused() == "open-settings"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_fits_and_axe_has_nothing_against_it(process, signed_in, width, dark):
    views = {}

    def look(name):
        views[name] = (signed_in.faults_so_far(), signed_in.check_accessibility())

    signed_in.evaluate("sessionStorage.removeItem('phalanx.chat')")
    signed_in.open_page(width=width, dark=dark)
    signed_in.wait_for("!document.getElementById('app').hidden")
    look("welcome")
    signed_in.ask(QUESTION)
    signed_in.evaluate("document.querySelector('.facts').open = true")
    look("chat")
    signed_in.evaluate("document.getElementById('open-save').click()")
    look("saving")
    signed_in.evaluate("document.getElementById('save-menu').hidePopover()")
    signed_in.evaluate("document.getElementById('open-settings').click()")
    look("settings")
    signed_in.evaluate("document.getElementById('settings').close()")
    signed_in.click_action("Edit", 0)
    look("edit")
    with ChatBrowser(process.url) as stranger:
        stranger.open_page(width=width, dark=dark)
        views["sign in"] = (stranger.faults_so_far(), stranger.check_accessibility())

    assert views == dict.fromkeys(views, (browser_script.ShownPage(), []))


def test_colours_follow_the_system_until_they_are_chosen(chat):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = chat.evaluate(ground)
    chat.click("#colours")
    dark = chat.evaluate(ground)
    assert dark != light
    chat._events.clear()
    chat._call("Page.reload")
    chat._until("Page.loadEventFired")
    assert chat.evaluate(ground) == dark
    chat.wait_for("!document.getElementById('app').hidden")
    chat.click("#colours")
    assert chat.evaluate(ground) == light
    assert chat.evaluate("localStorage.length") == 0


def test_another_site_can_neither_frame_the_page_nor_ask_the_server(process, tmp_path):
    """Attacker: a page that the person visits, here a file, which has another origin."""
    page = tmp_path / "other.html"
    page.write_text(
        f"<!doctype html><iframe src='{process.url}/'></iframe><script>window.asked = Promise.all(["
        f"fetch('{process.url}/v1/models', {{ headers: {{ authorization: 'Bearer x' }} }}).catch(() => 'refused'),"
        f"fetch('{process.url}/chat/session', {{ method: 'POST', body: '{{}}' }}).catch(() => 'refused')]);</script>"
    )
    with ChatBrowser(process.url) as browser:
        browser.open_address(page.as_uri(), 800)
        assert browser.evaluate("window.asked") == ["refused", "refused"]
        shown = browser._call("Target.getTargets", filter=[{"type": "iframe"}])["targetInfos"]
        assert [target["title"] for target in shown if "machine" in target["title"]] == []
        kinds = [
            event["params"]["response"]["mimeType"]
            for event in browser._events
            if event["method"] == "Network.responseReceived" and event["params"]["response"]["url"] == f"{process.url}/"
        ]
        assert kinds in ([], ["application/json"])


def test_a_session_that_is_over_asks_for_a_key_and_keeps_the_chat(process):
    store = KeyStore.open(process.access)
    key_id, key = add_key(process.access, "bob")
    with ChatBrowser(process.url) as browser:
        browser.open_page()
        browser.type_text(key)
        browser.press("Enter")
        browser.wait_for("!document.getElementById('app').hidden")
        browser.ask(QUESTION)
        store.revoke_key(key_id)
        browser.type_text(SECOND)
        browser.press("Enter")
        browser.wait_for("document.getElementById('app').hidden")
        assert "sign in again" in browser.text_of("#sign-in-fault")
        browser.type_text(process.key)
        browser.press("Enter")
        browser.wait_for("!document.getElementById('app').hidden")
        assert browser.texts_of(".user .text") == [QUESTION, SECOND]
        browser.click_action("Try again")
        browser.wait_for_answer()
        assert browser.texts_of(".machine .text")[-1] == SECOND_ANSWER
