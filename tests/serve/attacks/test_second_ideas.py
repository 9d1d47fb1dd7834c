"""A further idea for each class of attack on servers of models: what a second attacker tries."""

import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_attack_classes import JSON, MARKER, ask_chat, check_target, exchange, statuses_of

from access_keys import make_terms
from phalanx.data.chat import ChatMessage
from phalanx.errors import ModelError, PhalanxError
from phalanx.serve import TextModel
from phalanx.serve.access import KeyStore
from phalanx.serve.access.event_padding import EventPadder
from phalanx.serve.filters import TextFilters, TextRefused
from phalanx.serve.gateway.requests import holds_personal_data
from tiny_served import write_model

# headers by which a proxy tells an application another path, method or client
ROUTING_HEADERS = (
    "X-Original-URL: {}",
    "X-Rewrite-URL: {}",
    "X-Forwarded-Prefix: {}",
    "X-Forwarded-Uri: {}",
    "X-HTTP-Method-Override: GET",
    "X-Forwarded-For: 127.0.0.1",
    "Forwarded: for=127.0.0.1;host=localhost",
    "X-Original-Host: localhost",
)


def test_no_header_tells_a_server_another_path_method_or_client(target):
    """Class 1. Attacker: a client with the key of a user, or with none, who wants the operator's metrics."""
    before = target.num_forwarded()
    for key in (b"", b"Authorization: Bearer " + target.secret.encode() + b"\r\n"):
        for header in ROUTING_HEADERS:
            for line in ("GET /v1/models", "GET /metrics", "POST /none", "OPTIONS *"):
                head = f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header.format('/metrics')}\r\n".encode()
                answer = exchange(target.port, head + key + b"\r\n")
                (status,) = statuses_of(answer)
                assert b"phalanx_" not in answer.partition(b"\r\n\r\n")[2], head
                assert status == 401 if not key else status == (200 if line == "GET /v1/models" else status), head
                assert status != 200 or line == "GET /v1/models", head

    assert target.num_forwarded() == before


@pytest.mark.parametrize("place", ["query", "cookie", "proxy", "second", "first", "both names", "list", "fragment"])
def test_a_key_counts_in_its_two_headers_alone_and_two_keys_are_none(target, place):
    """Class 2. Attacker: a page or proxy that adds a key where two readers take another one of them."""
    secret, wrong = target.secret, target.secret[:-4] + "aaaa"
    path, headers = {
        "query": (f"/v1/models?api_key={secret}&key={secret}&access_token={secret}", ""),
        "cookie": ("/v1/models", f"Cookie: authorization={secret}; x-api-key={secret}\r\n"),
        "proxy": ("/v1/models", f"Proxy-Authorization: Bearer {secret}\r\n"),
        "second": ("/v1/models", f"Authorization: Bearer {wrong}\r\nAuthorization: Bearer {secret}\r\n"),
        "first": ("/v1/models", f"Authorization: Bearer {secret}\r\nAuthorization: Bearer {wrong}\r\n"),
        "both names": ("/v1/models", f"Authorization: Bearer {wrong}\r\nx-api-key: {secret}\r\n"),
        "list": ("/v1/models", f"Authorization: Bearer {wrong}, Bearer {secret}\r\n"),
        "fragment": (f"/v1/models#{secret}", ""),
    }[place]

    answer = exchange(target.port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n".encode())

    assert statuses_of(answer) in ([401], [400])
    assert secret[17:30] not in target.read_log()


HOSTILE_FORMS = {
    "repeats": {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"},
    "backtracking": {"type": "string", "pattern": "^(a+)+$"},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "length": {"type": "string", "minLength": 10**9},
    "digits": {"type": "number", "multipleOf": 1e-300},
    "remainders": {"type": "integer", "multipleOf": 999_999_937},
    "thousands": {"type": "integer", "multipleOf": 99_991_000},
    "factors": {"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]},
    "recursion": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "product": {"allOf": [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(300)]},
    "choices": {"enum": [str(number) * 50 for number in range(900)]},
}


@pytest.mark.parametrize("name", HOSTILE_FORMS)
def test_a_form_of_the_text_cannot_take_the_server(own_target, name):
    """Class 3. Attacker: a client whose schema is small and whose automaton is not."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": HOSTILE_FORMS[name]}}
    with own_target.client(own_target.secret) as http:
        answer = ask_chat(own_target, http, response_format=form)

    assert answer.status_code in {200, 400}
    check_target(own_target)


@pytest.mark.parametrize("place", ["tool", "lark"])
def test_a_schema_in_another_place_is_bounded_too(own_target, place):
    """Class 3. Attacker: the same client, whose schema is that of a tool or stands inside a grammar."""
    schema = HOSTILE_FORMS["remainders"]
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    grammar = {"type": "grammar", "syntax": "lark", "definition": f"start: %json {json.dumps(schema)}"}
    more = {
        "tool": {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
        "lark": {"response_format": grammar},
    }[place]
    with own_target.client(own_target.secret) as http:
        answer = ask_chat(own_target, http, **more)

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


UNITS = ("1 ", "1-", "1.", "a@", "a@a.", "::", "ab:", "http://a", "sk-", "key=", "[a](", "<a", "eyJh", "-----BEGIN ")


@pytest.mark.parametrize("unit", UNITS)
def test_the_time_of_filters_grows_with_the_text_and_not_with_its_square(unit):
    """Class 3. Attacker: a client whose text makes an expression of a filter search again from every place."""
    filters = TextFilters()

    def judge(length: int) -> float:
        text = (unit * length)[:length]
        used = []
        for _ in range(3):
            begun = time.thread_time()
            holds_personal_data([text])
            try:
                filters.admit_input(text)
                stream = filters.open_stream()
                stream.feed(text)
                stream.close()
            except TextRefused:
                pass
            used.append(time.thread_time() - begun)
        return min(used)

    # of a square it would be 256 times as much
    assert judge(32_000) < 100 * max(judge(2_000), 5e-4)


LONG_TEXTS = {"numbers": "4111 1111 ", "zero-width": "\u200b\u200dx"}


@pytest.mark.parametrize("unit", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_the_longest_text_of_one_client_stops_no_other_one(target, unit):
    """Class 3. Attacker: a client whose texts take filters seconds, once a second."""
    texts = [(unit * 95_000)[:95_000]] * (2_000_000 // (95_000 * len(unit.encode()) // len(unit)))
    body = json.dumps(
        {"model": target.model, "messages": [{"role": "user", "content": text} for text in texts]}, ensure_ascii=False
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.secret}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    num_answers = 0

    with (
        target.client(target.secret) as http,
        socket.create_connection(("127.0.0.1", target.port), timeout=250) as connection,
    ):
        connection.sendall(head.encode() + body)
        while not select.select([connection], [], [], 0)[0]:
            assert http.get("/v1/models").status_code == 200
            num_answers += 1
        assert connection.recv(12) in {b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 403"}

    # whoever is stopped waits for nearly all of it at once, and is answered once or twice
    assert num_answers > 5


def test_requests_that_are_refused_use_up_the_requests_of_their_key(target):
    """Class 3. Attacker: a client that has its bodies parsed, filtered and cut into tokens, and none answered."""
    limits = {
        "requests_per_minute": 4,
        "requests_per_month": 100,
        "tokens_per_minute": 10**9,
        "tokens_per_month": 10**9,
    }
    _, secret = KeyStore.open(target.access).create_key(make_terms("carol", limits=limits))
    chat = {"model": target.model, "messages": [{"role": "user", "content": "a"}]}
    bodies = [{}, {**chat, "max_tokens": 10**6}, {**chat, "n_discard": 1}, {**chat, "model": "none"}, chat, {}]

    with target.client(secret) as http:
        statuses = [http.post("/v1/chat/completions", json=body).status_code for body in bodies]

    assert statuses == [400, 400, 400, 404, 429, 429]


@contextmanager
def watched_events(kind: str):
    """Yield a list that fills with the facts of the interpreter's audit events; a hook cannot be taken out again."""
    facts_of_events, is_watching = [], [True]
    sys.addaudithook(lambda event, facts: facts_of_events.append(facts) if event == kind and is_watching else None)
    try:
        yield facts_of_events
    finally:
        is_watching.clear()


def test_an_address_that_names_a_schema_is_not_opened(own_target):
    """Class 4. Attacker: a client whose tool or schema says by address which language it is in."""
    schema = {"$schema": "http://127.0.0.1:9/x", "type": "object", "properties": {"a": {"$comment": "http://x/"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with watched_events("socket.connect") as opened, own_target.client(own_target.secret) as http:
        for url in ("http://127.0.0.1:9/", "//127.0.0.1:9/"):
            nested = {**schema, "properties": {"a": {"$id": url}, "b": {"anyOf": [{"$ref": url}]}}}
            form["json_schema"]["schema"] = nested
            assert ask_chat(own_target, http, response_format=form).status_code == 400

    assert {address[1] for _, address in opened} <= {own_target.port}


def test_no_request_loads_a_pickle(own_target):
    """Class 5. Attacker: a client whose bytes reach a reader of pickles inside of a package."""
    pickled = "\x80\x04\x95cos\nsystem\n(S'touch owned'\ntR."
    with watched_events("pickle.find_class") as found, own_target.client(own_target.secret) as http:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"):
            for content_type in ("application/json", "application/octet-stream", "application/x-pickle"):
                content = pickled.encode("latin-1")
                assert http.post(path, content=content, headers={"content-type": content_type}).status_code >= 400
        assert ask_chat(own_target, http, logprobs=True, n=2).status_code == 200
        assert http.post("/v1/embeddings", json={"model": "tiny", "input": "x"}).status_code == 200

    assert found == []


ESCAPES = (
    "{{ cycler.__init__.__globals__.os.popen('touch PROOF').read() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__()|length }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__['sys'].modules['os'].system('touch PROOF') }}",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_that_a_model_brings_reaches_nothing_of_the_process(tmp_path, template):
    """Class 6. Attacker: the maker of a model, whose chat template is a program."""
    proof = tmp_path / "owned"
    directory = write_model(tmp_path / "models")
    (directory / "chat_template.jinja").write_text(template.replace("PROOF", str(proof)))

    try:
        text = TextModel(directory)
        shown = text.tokenizer.decode(text.chat_prompt([ChatMessage(role="user", content="x")], []))
    except Exception as exc:  # noqa: BLE001 - refusing is as good as an empty text
        shown = "" if isinstance(exc, PhalanxError | ValueError) else type(exc).__name__
    assert not proof.exists()
    assert "root:" not in shown and not re.search(r"\b[1-9]\d\d+\b|class '", shown)


def test_a_working_directory_brings_no_module_into_a_server(tmp_path):
    """Classes 6 and 11. Attacker: the maker of a model with a ``torch.py``, whose user has gone into its folder."""
    proof = tmp_path / "ran"
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in ("torch", "typer", "json", "pydantic", "sitecustomize", "usercustomize", "starlette"):
        (folder / f"{name}.py").write_text(f"open({str(proof)!r}, 'w').write({name!r})\n")
    source = Path(__file__).parents[3] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}

    program = shutil.which("phalanx", path=str(Path(sys.executable).parent))
    commands = [[sys.executable, "-m", "phalanx", "serve", "--help"], [sys.executable, "-m", "phalanx.serve.probe"]]
    commands += [[program, "serve", "--help"]] if program else []
    for command in commands:
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
        assert not proof.exists(), (command, proof.read_text())


def _header(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode()


DAMAGED = {
    "header beyond the file": (1 << 62).to_bytes(8, "little") + b"{}",
    "negative place": _header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}') + b"\0" * 4,
    "places beyond the file": _header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4000000000]}}') + b"\0" * 4,
    "shape that overflows": _header('{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}')
    + b"\0" * 4,
    "two tensors in one place": _header(
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    )
    + b"\0" * 4,
    "nesting": _header('{"__metadata__":' + "[" * 50_000 + "]" * 50_000 + "}"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_weights_of_a_damaged_form_are_refused(tmp_path, name):
    """Class 7. Attacker: the maker of a file whose header says more than its bytes hold."""
    directory = write_model(tmp_path / "models")
    next(directory.glob("*.safetensors")).write_bytes(DAMAGED[name])

    with pytest.raises(ModelError):
        TextModel(directory)


def test_forms_and_sounds_are_no_requests(target):
    """Class 8. Attacker: a client who reaches a parser of files or sounds by another type of body or field."""
    before = target.num_forwarded()
    boundary = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--b--\r\n'
    with target.client(target.secret) as http:
        for path in ("/v1/chat/completions", "/v1/audio/transcriptions", "/v1/images/edits", "/v1/files"):
            for kind in ("multipart/form-data; boundary=b", "audio/wav", "application/x-www-form-urlencoded"):
                answer = http.post(path, content=boundary, headers={"content-type": kind})
                assert answer.status_code in {404, 415}, (path, kind)
        for field in ({"modalities": ["audio"]}, {"audio": {"voice": "a"}}, {"prediction": {"type": "content"}}):
            assert ask_chat(target, http, **field).status_code == 400, field

    assert target.num_forwarded() == before


def _lengths(target, **options) -> list[int]:
    body = {"model": target.model, "messages": [{"role": "user", "content": "say x"}], "max_tokens": 40}
    body |= {"stream": True, "temperature": 2.0, "seed": 5, "stream_options": options}
    with target.client(target.secret) as http:
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
    parts = [part for part in answer.text.split("\n\n") if part.startswith("data: {")]
    return [len(part) for part in parts if json.loads(part[6:])["choices"][0]["delta"].get("content")]


def test_lengths_of_events_tell_no_lengths_of_tokens(own_target):
    """Class 9. Attacker: somebody on the way who sees how long each encrypted piece of an answer is."""
    plain, padded = _lengths(own_target), _lengths(own_target, include_obfuscation=True)

    assert len(set(plain)) > 3
    assert len(padded) == len(plain) > 10
    assert len(set(padded)) == 1


def test_a_padder_hides_lengths_up_to_its_bound_and_passes_over_what_is_no_json():
    padder = EventPadder()
    events = [f"data: {json.dumps({'text': 'x' * length})}\n\n" for length in (30, 1, 9, 2, 300, 3, 20)]

    padded = [padder.pad_event(event) for event in events]

    assert len({len(event) for event in padded[:4]}) == len({len(event) for event in padded[4:]}) == 1
    assert [json.loads(event[6:])["text"] for event in padded] == [json.loads(event[6:])["text"] for event in events]
    assert padder.pad_event("data: [DONE]\n\n") == "data: [DONE]\n\n"
    large = f"data: {json.dumps({'text': 'x' * 5000})}\n\n"
    assert padder.pad_event(large) == large


def test_a_name_of_a_model_makes_no_line_of_log_or_metrics(target):
    """Class 10. Attacker: a client whose model's name closes a label or a line."""
    name = 'x"} 1\nforged_metric{a="b"} 2\n{"key":"forged"}'
    with target.client(target.secret) as http:
        assert ask_chat(target, http, model=name).status_code in {400, 404}
        assert ask_chat(target, http, user=name).status_code in {200, 400}
    log = "".join(path.read_text() for path in target.access.rglob("*.jsonl"))

    assert "forged" not in target.read_log()
    assert not [line for line in log.splitlines() if line.startswith(("forged", '{"key":"forged'))]


def test_a_secret_in_a_wrong_place_of_a_request_is_in_no_log(target):
    """Class 12. Attacker: a reader of logs; a client by mistake sends its key in the address, a name or a text."""
    secret = target.secret
    exchange(target.port, f"GET /{secret} HTTP/1.1\r\nHost: {secret[:40]}\r\nUser-Agent: {secret}\r\n\r\n".encode())
    with target.client(secret) as http:
        http.get(f"/v1/models/{secret}", headers={"x-request-id": secret, "referer": f"http://x/{secret}"})
        ask_chat(target, http, model=secret, user=secret)
        http.post(f"/v1/chat/completions?key={secret}", content=secret.encode(), headers=JSON)
        ask_chat(target, http, metadata={"a": secret, MARKER: MARKER})
        for method in ("GET", "PUT"):
            http.request(method, f"/v1/models/{MARKER}")
    files = [path for path in target.access.rglob("*.jsonl*") if path.is_file()]

    assert files
    for text in (target.read_log(), *(path.read_text() for path in files)):
        assert secret[17:30] not in text
        assert MARKER not in text
