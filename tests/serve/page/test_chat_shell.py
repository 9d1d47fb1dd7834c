"""The shell of the chat page: what it says to strangers, where it is shown, and what a browser may do with it."""

import asyncio
import base64
import contextlib
import hashlib
import importlib.metadata
import json
import re
from dataclasses import replace
from importlib.resources import files

import pytest

from phalanx.data.chat import ChatMessage
from phalanx.errors import ConfigError
from phalanx.serve.access import LOG_FOLDER, KeyStore, ListenConfig, RequestBounds, bind_socket, make_server
from phalanx.serve.chat_page import ChatPage, make_policy
from phalanx.serve.engine import BadRequestError, GenerationRequest
from phalanx.serve.server import ServerPlan, find_link_key
from tiny_served import add_key, serve_model, write_model

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "sec-fetch-dest": "document"}
PAGE = files("phalanx.serve").joinpath("chat_page.html").read_bytes()
SOURCE = PAGE.decode()


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def test_a_browser_without_a_key_gets_the_page_and_401(http):
    answer = http.get("/", headers=BROWSER)

    assert answer.status_code == 401
    assert answer.content == PAGE
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_tells_strangers_nothing_of_the_server(server):
    version = importlib.metadata.version("phalanx-train")
    words = [
        "harbour-model",
        "alice",
        server.pool.cards[0].digest,
        server.url,
        str(server.access),
        *server.keys["alice"],
    ]

    assert [word for word in words if word in SOURCE] == []
    assert not re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", SOURCE)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"accept": "application/json"},
        {"accept": "*/*"},
        # framed, embedded, fetched by a script, as an image or a style
        *(
            {**BROWSER, "sec-fetch-dest": kind}
            for kind in ("iframe", "frame", "embed", "object", "empty", "image", "style")
        ),
        # DNS rebinding: another name that points here
        *(
            {**BROWSER, "host": host}
            for host in (
                "evil.example",
                "evil.example:8080",
                "localhost.evil.example",
                "127.0.0.1.evil.example",
                "127.0.0.1.evil.example:80",
                "evil.example:127.0.0.1",
                "[::1].evil.example",
                "localhost:80:80",
                "",
            )
        ),
        # with a key, though a wrong one
        {**BROWSER, "authorization": "Bearer wrong"},
        {**BROWSER, "x-api-key": "wrong"},
    ],
)
def test_everybody_else_is_refused_as_everywhere(http, headers):
    answer = http.get("/", headers=headers)

    assert answer.status_code == 401
    assert answer.content == http.get("/no/such/path").content


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:99", "[::1]:8080", "192.168.7.7:8080"])
def test_the_page_is_shown_under_names_that_nobody_else_can_point_here(http, host):
    assert http.get("/", headers={**BROWSER, "host": host}).content == PAGE


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_and_paths_are_refused_as_everywhere(server, http, method):
    assert http.request(method, "/", headers=BROWSER).content == http.request(method, "/x", headers=BROWSER).content
    for path in ("//", "/?key=phx_secret", "/index.html", "/chat", "/favicon.ico", "/%2F", "/chat/session"):
        answer = http.get(server.url + path, headers=BROWSER)
        assert answer.status_code == 401
        assert answer.content != PAGE


@pytest.mark.parametrize(
    ("scheme", "host", "is_shown"),
    [
        ("http", "chat.example.org", True),
        ("http", "CHAT.example.org:8443", True),
        ("http", "other.example.org", False),
        # the certificate has bound the name already
        ("https", "other.example.org", True),
    ],
)
def test_a_proxys_name_is_named_and_a_certificates_is_not(scheme, host, is_shown):
    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def send(message):
        sent.append(message)

    sent = []
    headers = [(b"accept", b"text/html"), (b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "scheme": scheme, "headers": headers}
    asyncio.run(ChatPage(refuse, ["Chat.Example.org"])(scope, None, send))

    assert (sent[-1].get("body") == PAGE) == is_shown
    assert sent[0]["status"] == 401


def test_who_asks_for_many_pages_and_reads_none_is_cut_off():
    """Attacker: a client without a key that would hold its connection, and what is to be sent, for ever."""
    num_bytes, num_open = asyncio.run(ask_and_never_read())

    assert num_open == 0
    assert 0 < num_bytes < 400 * len(PAGE), "it got all of its pages"


async def ask_and_never_read() -> tuple[int, int]:
    """Return how many bytes the server had sent, and how many connections it holds, once it has closed one."""

    async def app(scope, receive, send):
        pass

    with contextlib.closing(bind_socket(ListenConfig(port=0))) as sock:
        server = make_server(ChatPage(app), ListenConfig(port=0), RequestBounds(send_timeout_s=0.2), 1)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        async with asyncio.timeout(120):
            while not server.started:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*sock.getsockname(), limit=1024)
            writer.transport.pause_reading()
            writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/html\r\n\r\n" * 400)
            connections = server.server_state.connections
            while not connections:
                await asyncio.sleep(0.01)
            while connections:
                await asyncio.sleep(0.01)
            num_open = len(connections)
            writer.transport.resume_reading()
            num_bytes = 0
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 16):
                    num_bytes += len(piece)
            writer.transport.abort()
            server.should_exit = True
            await serving
    return num_bytes, num_open


def test_a_model_without_a_template_says_so_and_not_where_it_lies(tmp_path):
    directory = write_model(tmp_path)
    (directory / "chat_template.jinja").unlink()
    asked = GenerationRequest(model="base", owner="alice", messages=(ChatMessage(role="user", content="the"),))

    with pytest.raises(BadRequestError, match="base: has no chat template") as refusal:
        serve_model(directory, "base").encode_prompt(asked)

    assert str(tmp_path) not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"link_key": "nobody"}, "0 active keys"),
        ({"link_key": "twin"}, "2 active keys"),
        ({"link_key": "late"}, "0 active keys"),
        ({"link_key": "alice", "has_chat_page": False}, "chat page"),
        ({"link_key": "alice", "listen": ListenConfig(host="10.0.0.1", unsafe_plain_http=True)}, "this machine"),
    ],
)
def test_a_link_needs_one_key_the_page_and_this_machine(tmp_path, changes, reason):
    access = tmp_path / "access"
    key_id, _ = add_key(access)
    for owner, terms in (("twin", {}), ("twin", {}), ("late", {"expires": 1})):
        add_key(access, owner, **terms)
    store, plan = KeyStore.open(access), ServerPlan(models={}, access=access)

    assert {find_link_key(replace(plan, link_key=name), store) for name in ("alice", key_id)} == {key_id}
    assert find_link_key(plan, store) is None
    with pytest.raises(ConfigError, match=reason):
        find_link_key(replace(plan, **changes), store)


def test_the_policy_allows_the_pages_own_script_and_style_alone(http):
    policy = http.get("/", headers=BROWSER).headers["content-security-policy"]
    directives = dict(part.split(" ", 1) for part in policy.split("; "))
    (script,) = re.findall(rb'<script type="module">(.*?)</script>', PAGE, re.DOTALL)
    (style,) = re.findall(rb"<style>(.*?)</style>", PAGE, re.DOTALL)

    def digest_of(content):
        return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"

    assert directives == {
        "default-src": "'none'",
        "script-src": digest_of(script),
        "style-src": digest_of(style),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert make_policy(PAGE.replace(b"const ", b"let ")) != policy


def test_no_text_becomes_markup_and_nothing_is_fetched_from_elsewhere():
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|createContextualFragment"
    )

    assert re.findall(forbidden, SOURCE) == []
    assert re.findall(r"<[^>]*\s(?:on\w+|style)\s*=", SOURCE) == []
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", SOURCE))
    assert addresses == {"http://www.w3.org/2000/svg"}


def test_a_key_is_exchanged_for_a_session(server, http):
    key_id, key = server.keys["alice"]
    answer = http.post("/chat/session", headers=bearer(key), json={})
    session = answer.json()

    assert answer.headers["cache-control"] == "no-store"
    assert session["owner"] == "alice"
    assert session["filters"]["input"]["special_tokens"] == "refuse"
    assert set(session) == {"secret", "owner", "filters"}
    models = http.get("/v1/models", headers=bearer(session["secret"])).json()["data"]
    assert [model["id"] for model in models] == ["harbour-model"]
    log = "".join(path.read_text() for path in (server.access / LOG_FOLDER).glob("*.jsonl"))
    assert session["secret"] not in log
    assert [json.loads(line) for line in log.splitlines() if '"/chat/session"' in line and key_id in line]


def test_a_session_opens_no_further_session(server, http):
    session = http.post("/chat/session", headers=bearer(server.keys["alice"][1]), json={}).json()["secret"]

    assert http.post("/chat/session", headers=bearer(session), json={}).status_code == 403


@pytest.mark.parametrize("body", [b"", b"[]", b'{"key": "x"}', b"null"])
def test_a_request_for_a_session_has_no_fields(server, http, body):
    headers = {**bearer(server.keys["alice"][1]), "content-type": "application/json"}

    assert http.post("/chat/session", headers=headers, content=body).status_code == 400


def test_without_a_key_there_is_no_session(http):
    for headers in ({}, bearer("phl_" + "0" * 64), bearer("phs_" + "0" * 64), {"cookie": "session=1"}):
        assert http.post("/chat/session", headers=headers, json={}).status_code == 401


def test_revoking_the_key_ends_the_session_at_once(server, http):
    store = KeyStore.open(server.access)
    key_id, key = server.keys["ops"]
    session = http.post("/chat/session", headers=bearer(key), json={}).json()["secret"]
    assert http.get("/v1/models", headers=bearer(session)).status_code == 200

    store.revoke_key(key_id)

    assert http.get("/v1/models", headers=bearer(session)).status_code == 401


def test_signing_out_ends_the_session_and_no_other_one(server, http):
    """Attacker: who finds the secret of a session afterwards, in the memory or history of a shared browser."""
    key = server.keys["alice"][1]
    first, other = (http.post("/chat/session", headers=bearer(key), json={}).json()["secret"] for _ in range(2))

    ended = http.post("/chat/session/end", headers=bearer(first), json={})

    assert (ended.status_code, ended.json()) == (200, {"status": "ended"})
    statuses = [http.get("/v1/models", headers=bearer(secret)).status_code for secret in (first, other, key)]
    assert statuses == [401, 200, 200]
    assert http.post("/chat/session/end", headers=bearer(first), json={}).status_code == 401


def test_only_a_session_ends_itself(server, http):
    """Attacker: a holder of another key, who would end what is not theirs."""
    answer = http.post("/chat/session/end", headers=bearer(server.keys["alice"][1]), json={})

    assert answer.status_code == 403
    session = http.post("/chat/session", headers=bearer(server.keys["alice"][1]), json={}).json()["secret"]
    assert http.post("/chat/session/end", headers=bearer(session), json={"secret": "phs_1"}).status_code == 400
    assert http.get("/v1/models", headers=bearer(session)).status_code == 200


def test_the_page_ends_its_session_when_one_signs_out():
    handler = SOURCE[SOURCE.index('byId("sign-out").addEventListener') :].partition("\n});")[0]

    assert 'callServer("/chat/session/end", secret, {})' in handler
    assert handler.index("state.session.secret") < handler.index("leaveChat")
