"""The page of runs is closed to whoever has no session, and holds nothing of a run before."""

import asyncio
import json
import re
from urllib.parse import urlencode

import pytest

from phalanx.serve.chat_page import make_policy
from phalanx.watch.page import Snapshots, WatchPage, build_page
from phalanx.watch.run_view import RunView
from watched_run import write_run


class Door:
    """The page's application, asked without a socket."""

    def __init__(self, path):
        self.intruders = []
        self.view = RunView(write_run(path / "harbour-run"))
        self.view.read_new()
        self.page = WatchPage([self.view], self.intruders.append)
        self.link = self.page.make_link("http://127.0.0.1:1").partition("#link=")[2]

    def ask(self, method, path, secret=None, headers=(), host="127.0.0.1:1"):
        return asyncio.run(self.answer(method, path, secret, headers, host))

    async def answer(self, method, path, secret, headers, host):
        path, _, query = path.partition("?")
        names = [(b"host", host.encode()), (b"accept", b"text/html"), *headers]
        names += [] if secret is None else [(b"authorization", secret.encode())]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "scheme": "http"}
        scope |= {"query_string": query.encode(), "headers": names, "root_path": "", "http_version": "1.1"}
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        await self.page.app(scope, receive, send)
        head = next(message for message in sent if message["type"] == "http.response.start")
        return head["status"], dict(head["headers"]), b"".join(message.get("body", b"") for message in sent[1:])

    def sign_in(self):
        status, _, body = self.ask("POST", "/session", f"Bearer {self.link}")
        assert status == 200
        return f"Bearer {json.loads(body)['secret']}"


@pytest.fixture
def door(tmp_path):
    return Door(tmp_path)


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/session", "/curves?run=0&curve=loss", "/stream", "/harbour-run", "/../metrics.jsonl", "//"]
)
@pytest.mark.parametrize("secret", [None, "Bearer x", "Basic eDp5", "bearer phs_" + "0" * 64, "Bearer phs_" + "0" * 64])
def test_without_a_session_every_path_is_refused_with_no_word_of_a_run(door, method, path, secret):
    status, _, body = door.ask(method, path, secret)

    assert status == 401
    assert b"harbour" not in body
    assert door.intruders == ["unexpected_reader" if secret is None else "wrong_token"]


def test_the_sign_in_page_is_the_same_for_everybody_and_names_no_run(door):
    status, headers, body = door.ask("GET", "/")

    assert status == 401
    assert body == build_page()
    assert b"harbour" not in body
    assert headers[b"content-security-policy"].decode() == make_policy(body)
    assert b"set-cookie" not in headers
    assert headers[b"x-frame-options"] == b"DENY"
    assert door.intruders == []


@pytest.mark.parametrize("host", ["evil.example.org", "evil.example.org:80", ""])
def test_under_another_name_there_is_no_page(door, host):
    status, _, body = door.ask("GET", "/", host=host)

    assert (status, b"<script" in body) == (401, False)


def test_a_link_is_good_once_and_for_a_session_alone(door):
    assert door.ask("GET", "/curves?run=0&curve=loss", f"Bearer {door.link}")[0] == 401
    # it is used up by that
    assert door.ask("POST", "/session", f"Bearer {door.link}")[0] == 401
    fresh = Door.sign_in.__get__(door)
    door.link = door.page.make_link("").partition("#link=")[2]
    session = fresh()
    assert door.ask("POST", "/session", f"Bearer {door.link}")[0] == 401
    # a session opens no further session
    assert door.ask("POST", "/session", session)[0] == 401


def test_curves_are_answered_by_range_and_points_and_without_nan(door):
    session = door.sign_in()
    query = urlencode(
        {"run": 0, "points": 10, "first": 20, "last": 99, "curve": ["loss", "validation_perplexity"]}, True
    )

    status, headers, body = door.ask("GET", f"/curves?{query}", session)

    found = json.loads(body)
    assert (status, headers[b"cache-control"]) == (200, b"no-store")
    assert found["rows"] == 120
    assert len(found["curves"]["loss"]) == len(found["curves"]["step"]) == 10
    assert found["curves"]["step"][0] == 20
    assert door.ask("GET", f"/curves?{query}", session)[2] == body


@pytest.mark.parametrize(
    "query",
    [
        "",
        "run=1&curve=loss",
        "run=-1&curve=loss",
        "run=0",
        "run=0&curve=loss&points=3",
        "run=0&curve=loss&points=1000000",
        "run=0&curve=loss&first=x",
        "run=0&curve=" + "x" * 201,
        "run=0" + "&curve=loss" * 129,
    ],
)
def test_a_request_for_something_else_is_a_mistake_of_the_client(door, query):
    assert door.ask("GET", f"/curves?{query}", door.sign_in())[0] == 400


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
def test_a_range_that_is_no_number_breaks_nothing(door, value):
    assert door.ask("GET", f"/curves?run=0&curve=loss&first={value}", door.sign_in())[0] == 200


def test_a_slow_reader_gets_the_newest_state_and_all_streams_end_with_the_server():
    is_over = False

    async def read():
        nonlocal is_over
        page = WatchPage([], lambda _: None, lambda: is_over)
        page.snapshots.publish_state({"now": 1})
        stream = page.snapshots.stream_events()
        first = await anext(stream)
        for number in range(2, 6):
            page.snapshots.publish_state({"now": number})
        second = await anext(stream)
        is_over = True
        rest = [part async for part in stream]
        return first, second, rest

    first, second, rest = asyncio.run(read())

    pace = b'"pace": {"state_s": 1.0, "curves_s": 2.0}}\n\n'
    assert first == b'event: state\ndata: {"now": 1, ' + pace
    assert second == b'event: state\ndata: {"now": 5, ' + pace
    assert rest == []


def test_a_hundred_viewers_get_states_more_rarely_and_all_the_same_bytes():
    async def view():
        moment = 0.0
        snapshots = Snapshots(lambda: moment > 30, lambda: moment)
        parts = [[] for _ in range(100)]

        async def read(number):
            async for part in snapshots.stream_events():
                parts[number].append(part)

        snapshots.publish_state({"now": 0})
        tasks = [asyncio.create_task(read(number)) for number in range(100)]
        for second in range(1, 32):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            moment = float(second)
            snapshots.publish_state({"now": second})
        await asyncio.gather(*tasks)
        return parts

    parts = asyncio.run(view())

    # one every five seconds, the first at once
    assert {len(each) for each in parts} == {7}
    assert b'"pace": {"state_s": 5.0, "curves_s": 20.0}' in parts[0][-1]
    assert len({id(each[-1]) for each in parts}) == 1


def test_the_page_asks_nothing_from_elsewhere_and_makes_no_markup_from_texts():
    page = build_page().decode()

    assert "/*uplot" not in page
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|document\.cookie", page
    )
    assert set(re.findall(r"https?://[\w.]+", page)) <= {"https://github.com", "http://www.w3.org"}
