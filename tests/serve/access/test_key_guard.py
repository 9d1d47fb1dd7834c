"""The door of a server: what no route sees without a key, and what it never has to read."""

import asyncio
import json
import random

import pytest

from phalanx.access_gate import enter_gate
from phalanx.errors import RoleError
from phalanx.serve.access import KeyGuard, RequestBounds, RequestRefused, parse_object

PATHS = (
    "/",
    "/v1/models",
    "/v1/chat/completions",
    "/v1/messages",
    "/metrics",
    "/health",
    "/sleep",
    "/collective_rpc",
    "//",
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")


class App:
    """Answers 200 with the size of what it read, and keeps the scopes that it was given."""

    def __init__(self) -> None:
        self.scopes = []

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        message = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


def make_scope(path="/v1/models", method="GET", headers=(), **more):
    return {
        "type": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "method": method,
        "headers": list(headers),
        "client": ("127.0.0.1", 5),
        **more,
    }


async def never():
    await asyncio.Event().wait()


def pieces(*bodies: bytes):
    messages = [{"type": "http.request", "body": body, "more_body": True} for body in bodies[:-1]]
    messages.append({"type": "http.request", "body": bodies[-1], "more_body": False})

    async def receive():
        return messages.pop(0)

    return receive


def ask(guard, scope, receive=None) -> tuple[int, dict, bytes]:
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard(scope, receive or pieces(b""), send))
    body = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


def bearer(secret: str):
    return [(b"authorization", b"Bearer " + secret.encode("latin-1"))]


def with_json(secret: str, body: bytes = b"", **headers):
    more = [(name.replace("_", "-").encode(), str(value).encode()) for name, value in headers.items()]
    return [*bearer(secret), (b"content-type", b"application/json"), *more]


def test_no_path_and_no_method_is_open_without_a_key_and_no_body_is_read(keys):
    app = App()
    guard = KeyGuard(app, keys.store)
    answers = set()

    for path in PATHS:
        for method in METHODS:
            for slash in ("", "/"):
                status, headers, body = ask(guard, make_scope(path + slash, method), never)
                assert status == 401, (path, method)
                assert headers[b"www-authenticate"] == b"Bearer"
                assert headers[b"connection"] == b"close"
                answers.add(body)

    assert not app.scopes
    # nothing, the OpenAI form and the Anthropic form: an answer does not tell whether a path exists
    assert len(answers) == 3
    assert b"" in answers


@pytest.mark.parametrize("extension", [True, False])
def test_a_websocket_is_refused_without_a_key(keys, extension):
    app = App()
    scope = make_scope(
        "/v1/realtime", type="websocket", extensions={"websocket.http.response": {}} if extension else None
    )
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    asyncio.run(KeyGuard(app, keys.store)(scope, receive, send))

    assert sent[0] == {"type": "websocket.close", "code": 1008} if not extension else sent[0]["status"] == 401
    assert not app.scopes


class NoRole:
    """A gate for which nobody has a role, and which keeps what it was asked."""

    def __init__(self) -> None:
        self.calls = []

    def check_caller(self, call, name, key):
        self.calls.append((call, name, key))
        raise RoleError("none")


def test_a_valid_key_of_somebody_without_the_role_is_refused_before_its_body_is_read(keys):
    _, secret = keys.make()
    app, gate = App(), NoRole()
    with enter_gate(gate):
        status, _, body = ask(KeyGuard(app, keys.store), make_scope(headers=bearer(secret)), never)

    assert (status, app.scopes) == (403, [])
    assert b"role_missing" in body
    assert [(call, key) for call, _, key in gate.calls] == [("/v1/models", None)]


def test_a_valid_key_is_taken_from_either_header_and_the_app_gets_the_caller(keys):
    key_id, secret = keys.make()
    app = App()
    guard = KeyGuard(app, keys.store)

    for headers in (
        bearer(secret),
        [(b"authorization", b"bEARER   " + secret.encode() + b" ")],
        [(b"x-api-key", secret.encode())],
        [*bearer(secret), (b"x-api-key", secret.encode())],
    ):
        assert ask(guard, make_scope(headers=headers))[0] == 200

    assert {scope["state"]["caller"].key_id for scope in app.scopes} == {key_id}


def test_two_headers_that_disagree_let_nobody_in(keys):
    _, secret = keys.make()
    _, other = keys.make("bob")
    guard = KeyGuard(App(), keys.store)

    for more in (
        [(b"x-api-key", other.encode())],
        [(b"x-api-key", b"")],
        [(b"authorization", b"Basic " + secret.encode())],
        bearer(other),
        bearer(""),
    ):
        assert ask(guard, make_scope(headers=[*bearer(secret), *more]))[0] == 401
        assert ask(guard, make_scope(headers=[*more, *bearer(secret)]))[0] == 401


def fuzzed_headers(rng: random.Random, secret: str, count: int):
    """Yield values that are near a valid header, and values that are nothing like one."""
    alphabet = "abcdefghijklmnopqrstuvwxyz234567"
    schemes = ["Bearer ", "bearer ", "Bearer\t", "Basic ", "Token ", "", "Bearer Bearer ", "Bearer phx_", "' OR 1=1 --"]
    for _ in range(count):
        kind = rng.randrange(6)
        if kind == 0:
            place = rng.randrange(len(secret))
            letter = rng.choice([letter for letter in alphabet + "_A\0 " if letter != secret[place]])
            value = "Bearer " + secret[:place] + letter + secret[place + 1 :]
        elif kind == 1:
            value = rng.choice(schemes) + secret[: rng.randrange(len(secret))]
        elif kind == 2:
            random_part = "".join(rng.choices(alphabet, k=52))
            value = f"Bearer {secret[:17]}{random_part}"
        elif kind == 3:
            value = rng.choice(schemes) + "".join(map(chr, rng.choices(range(256), k=rng.randrange(120))))
        elif kind == 4:
            value = "Bearer " + "".join(rng.choices("%00../'\";{}$()\r\n\t phx_", k=rng.randrange(80)))
        else:
            value = "Bearer " + secret + "".join(map(chr, rng.choices(range(33, 256), k=rng.randrange(1, 9))))
        yield value.encode("latin-1")


@pytest.mark.parametrize("num_headers", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_of_100_000_fuzzed_authorization_headers_none_lets_anybody_in(keys, num_headers):
    _, secret = keys.make()
    app = App()
    guard = KeyGuard(app, keys.store)
    statuses = set()

    async def send(message):
        if message["type"] == "http.response.start":
            statuses.add(message["status"])

    async def knock():
        rng = random.Random(37)
        for number, value in enumerate(fuzzed_headers(rng, secret, num_headers)):
            name = b"authorization" if number % 3 else b"x-api-key"
            await guard(make_scope(headers=[(name, value)]), never, send)

    asyncio.run(knock())

    assert statuses == {401}
    assert not app.scopes


def test_errors_have_the_form_of_the_route_and_never_a_part_of_the_key(keys):
    _, secret = keys.make()
    guard = KeyGuard(App(), keys.store)
    wrong = secret[:-1] + ("2" if secret[-1] != "2" else "3")

    openai = json.loads(ask(guard, make_scope("/v1/chat/completions", headers=bearer(wrong)))[2])
    anthropic = json.loads(ask(guard, make_scope("/v1/messages", headers=bearer(wrong)))[2])

    assert openai["error"]["code"] == "invalid_api_key"
    assert anthropic == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "A valid API key is required."},
    }
    assert not any(part in json.dumps([openai, anthropic]) for part in (wrong[:12], wrong[17:25], wrong[-8:]))


def test_a_body_is_bounded_by_its_length_and_by_what_arrives(keys):
    _, secret = keys.make()
    guard = KeyGuard(App(), keys.store, RequestBounds(max_body_bytes=1024))
    most = b'"' + b"x" * 1022 + b'"'

    def post(*bodies, **headers):
        return ask(guard, make_scope(method="POST", headers=with_json(secret, **headers)), pieces(*bodies))

    assert post(most, content_length=1024)[::2] == (200, b"1024")
    assert post(most[:500], most[500:])[::2] == (200, b"1024")
    assert post(b"", content_length=1025)[0] == 413
    assert post(most, b" ")[0] == 413
    assert post(most, content_length=5)[0] == 413
    for length in ("-1", "1e3", "9" * 30, "x", "\u0661"):
        assert post(b"", content_length=length.encode().decode("latin-1"))[0] == 400
    assert post(b"{}", content_encoding="gzip")[0] == 415


def test_headers_and_path_are_bounded(keys):
    _, secret = keys.make()
    guard = KeyGuard(App(), keys.store)

    assert ask(guard, make_scope(headers=with_json(secret, a="x" * 16_384)))[0] == 431
    assert ask(guard, make_scope(headers=[*bearer(secret), *[(b"a", b"")] * 64]))[0] == 431
    assert ask(guard, make_scope("/" + "x" * 3000, headers=bearer(secret)))[0] == 414
    assert ask(guard, make_scope(headers=bearer(secret), query_string=b"x" * 3000))[0] == 414


def test_a_body_whose_length_is_said_in_two_ways_is_refused(keys):
    """Behind a proxy that believes the other one, its rest would be taken for a request of another client."""
    _, secret = keys.make()
    app = App()
    headers = with_json(secret, content_length=2, transfer_encoding="chunked")

    assert ask(KeyGuard(app, keys.store), make_scope(method="POST", headers=headers), pieces(b"{}"))[0] == 400
    assert not app.scopes


@pytest.mark.parametrize("path", ["/v1/models\n", "/v1/\x00models", "/v1/models\u2028", "/\u202e"])
def test_a_path_with_a_control_character_is_refused(keys, path):
    _, secret = keys.make()
    app = App()

    assert ask(KeyGuard(app, keys.store), make_scope(path, headers=bearer(secret)))[0] == 400
    assert not app.scopes


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}',
        b'{"b": {"a": 1, "a": 1}}',
        b'{"a": 1, "\\u0061": 2}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e400}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b"\xff",
        b"[]",
        b"{} {}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"}",
    ],
    ids=range(13),
)
def test_json_that_two_readers_could_understand_differently_is_refused(text):
    with pytest.raises(RequestRefused):
        parse_object(text)


def test_json_that_has_one_meaning_is_parsed():
    text = '{"a": [1, -2.5e3, true, null, {}], "é": "\\ud83d\\ude00 \\\\u00e9"}'

    assert parse_object(text.encode()) == {"a": [1, -2500.0, True, None, {}], "é": "😀 \\u00e9"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[" * 32 + b"]" * 32, 200),
        (b"[" * 33 + b"]" * 33, 400),
        (b"[" * 1_000_000, 400),
        (b'{"a":' * 33 + b"1" + b"}" * 33, 400),
        (b'"' + b"[" * 100 + b'"', 200),
        (b'"\\"' + b"[" * 100 + b'"', 200),
        (b'"\\\\"' + b"[" * 33, 400),
        (b'"' + b'\\"' * 500_000, 200),
        (b'"' + b"\\" * 500_001, 200),
        (b'""' * 100_001, 400),
        (b"[]" * 60_000, 400),
        (b"]" * 50 + b"[" * 33, 200),
    ],
    ids=range(12),
)
def test_json_is_bounded_in_depth_and_parts_before_anything_parses_it(keys, body, status):
    """What is no JSON passes here and is refused by whoever parses it."""
    _, secret = keys.make()
    scope = make_scope(method="POST", headers=with_json(secret))

    assert ask(KeyGuard(App(), keys.store), scope, pieces(body))[0] == status


def test_a_key_has_at_most_as_many_bodies_in_memory_as_it_may_have_requests(keys):
    _, secret = keys.make(limits={"concurrency": 3})
    _, other = keys.make("bob")
    guard = KeyGuard(App(), keys.store)
    statuses = []

    async def fill() -> None:
        async def send(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        scope = make_scope(method="POST", headers=with_json(secret))
        waiting = [asyncio.create_task(guard(scope, never, send)) for _ in range(10)]
        while len(statuses) < 7:
            await asyncio.sleep(0)
        await guard(make_scope(method="POST", headers=with_json(other)), pieces(b"{}"), send)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await guard(scope, pieces(b"{}"), send)

    asyncio.run(fill())

    assert statuses == [429] * 7 + [200] * 2


def test_a_body_of_another_type_is_refused(keys):
    _, secret = keys.make()
    guard = KeyGuard(App(), keys.store)

    for content_type in ([], [(b"content-type", b"text/plain")], [(b"content-type", b"multipart/form-data")]):
        scope = make_scope(method="POST", headers=[*bearer(secret), *content_type])
        assert ask(guard, scope, pieces(b"{}"))[0] == 415
    charset = [*bearer(secret), (b"content-type", b"Application/JSON; charset=utf-8")]
    assert ask(guard, make_scope(method="POST", headers=charset), pieces(b"{}"))[0] == 200


def test_a_body_that_does_not_arrive_and_a_client_that_leaves_hold_nothing(keys):
    _, secret = keys.make()
    app = App()
    guard = KeyGuard(app, keys.store, RequestBounds(body_timeout_s=0.01))

    assert ask(guard, make_scope(method="POST", headers=with_json(secret)), never)[0] == 408

    async def leave():
        return {"type": "http.disconnect"}

    with pytest.raises(IndexError):
        ask(guard, make_scope(method="POST", headers=with_json(secret)), leave)
    assert not app.scopes


async def stream_forever(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    number = 0
    while True:
        await send({"type": "http.response.body", "body": b"%d " % number, "more_body": True})
        number += 1


def test_a_key_that_is_revoked_in_mid_stream_ends_the_stream(keys):
    key_id, secret = keys.make()
    sent = []

    async def send(message):
        sent.append(message)
        if len(sent) == 5:
            keys.store.revoke_key(key_id)

    asyncio.run(KeyGuard(stream_forever, keys.store)(make_scope(headers=bearer(secret)), pieces(b""), send))

    assert len(sent) == 5
    assert sent[-1]["more_body"], "the answer does not look whole"


def test_a_session_that_is_ended_in_mid_stream_ends_the_stream_and_not_that_of_its_key(keys):
    """Attacker: who reads on in a browser from which its user has signed out."""
    key_id, secret = keys.make()
    session = keys.store.sessions.open_session(key_id)
    name = keys.store.find_caller(session, "127.0.0.1").session
    lengths = []
    for way_in in (session, secret):
        sent = []

        async def send(message, sent=sent):
            sent.append(message)
            if len(sent) == 5:
                keys.store.sessions.end_session(name)
            if len(sent) == 9:
                keys.store.revoke_key(key_id)

        asyncio.run(KeyGuard(stream_forever, keys.store)(make_scope(headers=bearer(way_in)), pieces(b""), send))
        lengths.append(len(sent))

    assert lengths == [5, 9]


def test_a_key_that_is_revoked_before_the_answer_gets_none(keys):
    key_id, secret = keys.make()

    async def slow_app(scope, receive, send):
        keys.store.revoke_key(key_id)
        await App()(scope, receive, send)

    assert ask(KeyGuard(slow_app, keys.store), make_scope(headers=bearer(secret)))[0] == 401


def test_a_client_that_takes_nothing_ends_its_answer(keys):
    _, secret = keys.make()
    sent = []

    async def send(message):
        sent.append(message)
        if len(sent) == 3:
            await never()

    guard = KeyGuard(stream_forever, keys.store, RequestBounds(send_timeout_s=0.01))
    asyncio.run(guard(make_scope(headers=bearer(secret)), pieces(b""), send))

    assert len(sent) == 3


def test_faults_of_the_app_are_not_hidden(keys):
    _, secret = keys.make()

    async def broken(scope, receive, send):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask(KeyGuard(broken, keys.store), make_scope(headers=bearer(secret)))


def test_a_file_of_keys_that_was_changed_closes_the_door(keys):
    _, secret = keys.make()
    guard = KeyGuard(App(), keys.store)
    assert ask(guard, make_scope(headers=bearer(secret)))[0] == 200

    path = keys.directory / "keys.json"
    path.write_bytes(path.read_bytes().replace(b"alice", b"mallory"))

    assert ask(guard, make_scope(headers=bearer(secret)))[0] == 401


def test_refusals_are_counted_by_address(keys):
    addresses = []
    guard = KeyGuard(App(), keys.store, on_refusal=addresses.append)

    ask(guard, make_scope())
    ask(guard, make_scope(client=None))

    assert addresses == ["127.0.0.1", ""]
