"""The page of runs in a real browser: a run that is attacked while it is looked at, strangers, screens."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[1] / "serve" / "page"))
from chat_browser import ChatBrowser, browser_script

from phalanx.watch.page import build_page
from watched_run import VERDICT, append_rows, event_row, metric_row, write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_script.installed() is None, reason="no Chromium is installed"),
]
SCREENS = [(1280, 900, False), (1280, 900, True), (390, 844, False), (390, 844, True)]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\x1b[2J\u202e"


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A watcher of two runs, in a process of its own."""
    place = tmp_path_factory.mktemp("watched")
    runs = [write_run(place / "guarded"), write_run(place / "plain", num_steps=90, parties=False)]
    command = [sys.executable, "-m", "phalanx", "watch", *map(str, runs), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as popen:
        ready = json.loads(popen.stdout.readline())
        yield SimpleNamespace(url=ready["url"], link=ready["link"], guarded=runs[0], plain=runs[1])
        popen.terminate()
        popen.wait(60)


@pytest.fixture(scope="module")
def browser(watched):
    """The one browser that has used the link."""
    with ChatBrowser(watched.url) as opened:
        opened.sign_in(watched.link)
        yield opened


def open_board(browser, width=1280, height=900, *, dark=False):
    browser.open_page("/", width, height, dark=dark)
    browser.wait_for("!document.getElementById('app').hidden && document.querySelectorAll('canvas').length >= 8")


def test_the_link_leaves_the_address_and_works_once(watched, browser):
    assert browser.evaluate("location.href") == f"{watched.url}/"
    assert browser.evaluate("document.cookie") == ""
    with ChatBrowser(watched.url) as other:
        other.open_page(watched.link.removeprefix(watched.url))
        other.wait_for("document.getElementById('sign-in-fault').textContent")
        assert "used up" in other.text_of("#sign-in-fault")
        assert other.evaluate("document.getElementById('app').hidden")
        assert "guarded" not in other.evaluate("document.body.innerText")


@pytest.mark.parametrize(("width", "height", "dark"), SCREENS)
def test_every_screen_shows_the_runs_without_a_fault_and_asks_nothing_elsewhere(browser, width, height, dark):
    open_board(browser, width, height, dark=dark)

    shown = browser.faults_so_far()
    assert shown == browser_script.ShownPage()
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(17, 23, 30)") == dark
    assert [rule for rule in browser.check_accessibility() if rule[1] in ("serious", "critical")] == []
    assert {"guarded", "plain"} <= set(browser.evaluate("document.body.innerText").split())


def test_an_attack_and_a_recovery_appear_while_one_looks(watched, browser):
    open_board(browser)
    events = [
        event_row("verdict", VERDICT),
        event_row("evicted", {"party": "worker-1", "step": 41, "stages": [1]}),
        event_row("takeover", {"stage": 1, "by": "worker-2", "step": 41}),
        event_row("refused", {"party": HOSTILE, "error": "SignatureError", "reason": HOSTILE}),
    ]
    append_rows(watched.guarded / "events.jsonl", events)
    append_rows(watched.guarded / "metrics.jsonl", [metric_row(120, leak={"exposure": 3.0}), metric_row(121)])

    browser.wait_for("document.querySelectorAll('#alerts li').length >= 2")
    browser.wait_for("[...document.querySelectorAll('h2')].some((node) => node.textContent.startsWith('Leak meter'))")

    text = browser.evaluate("document.body.innerText")
    assert "verdict: worker-1" in text
    assert "phalanx audit explain" in text
    assert "bad signature 1" in text
    assert "122 of 400" in text
    assert browser.evaluate("document.title").startswith("122 guarded")
    assert browser.evaluate("document.querySelectorAll('main img').length") == 0
    assert browser.faults_so_far() == browser_script.ShownPage()


def test_a_part_of_a_run_is_looked_at_by_dragging_and_left_again(browser):
    open_board(browser)
    browser.evaluate("zoom([20, 40])")
    browser.wait_for("page.charts.get('Loss').plot.scales.x.max <= 40")
    assert browser.evaluate("document.getElementById('reset').hidden") is False
    browser.click("#reset")
    browser.wait_for("page.charts.get('Loss').plot.scales.x.max > 100")


def test_another_run_is_chosen_by_its_button(browser):
    open_board(browser)
    browser.evaluate("document.querySelectorAll('.run')[1].click()")
    browser.wait_for("document.querySelector('#parties').textContent.includes('no other parties')")
    assert browser.text_of("#foot").startswith("plain")


def test_a_run_of_a_million_steps_is_shown(tmp_path):
    run = write_run(tmp_path / "long", num_steps=0)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1_000_000):
            loss = 99.0 if step == 654_321 else 5 / (1 + step / 1e5)
            file.write(f'{{"step": {step}, "time": 1.0, "loss": {loss:.4f}, "tokens_per_s": 800, "wall_s": 1.0}}\n')
    command = [sys.executable, "-m", "phalanx", "watch", str(run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as popen:
        ready = json.loads(popen.stdout.readline())
        with ChatBrowser(ready["url"]) as browser:
            browser.sign_in(ready["link"])
            browser.wait_for("page.charts.get('Loss')?.plot?.data[1].length > 100")
            assert browser.evaluate("page.charts.get('Loss').plot.data[1].length") <= 2000
            assert browser.evaluate("Math.max(...page.charts.get('Loss').plot.data[1])") == 99
            assert browser.faults_so_far() == browser_script.ShownPage()
        popen.terminate()
        popen.wait(60)


def test_a_hundred_viewers_are_sent_one_snapshot():
    """What a viewer costs is a copy of bytes: the files are read once a look, whoever looks."""
    import asyncio

    from phalanx.watch.page import WatchPage

    async def view():
        page = WatchPage([], lambda _: None)
        page.snapshots.publish_state({"now": 1})
        streams = [page.snapshots.stream_events() for _ in range(100)]
        return {await anext(stream) for stream in streams}

    assert len(asyncio.run(view())) == 1
    assert threading.active_count() < 50
    assert len(build_page()) < 120_000
