"""Every route needs a key, refuses what it does not know, and tells nothing that it should not."""

import json

import httpx2
import pytest

from phalanx.security.crypto import read_public_signer
from phalanx.serve.access import LOG_FOLDER, SERVER_FILE, verify_request_log

PATHS = [
    "/",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/health/live",
    "/health/ready",
    "/openapi.json",
    "/chat/session",
    "/metrics",
    "/tokenize",
    "/collective_rpc",
    "/no/such/route",
]
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"]
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "the"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def http(server):
    with httpx2.Client(base_url=server.url, trust_env=False) as http:
        yield http


@pytest.fixture(scope="module")
def headers(server):
    return {"authorization": f"Bearer {server.secrets['alice']}"}


@pytest.mark.parametrize("method", METHODS)
def test_no_path_answers_without_a_key(http, method):
    answers = {path: http.request(method, path + slash) for path in PATHS for slash in ("", "/")}

    assert {answer.status_code for answer in answers.values()} == {401}
    # one answer for a path that there is and one that there is not, in each protocol's form
    assert len({answer.content for answer in answers.values()}) <= 2


@pytest.mark.parametrize("method", METHODS)
def test_nor_does_one_to_a_browser_though_the_root_shows_it_where_to_sign_in(http, method):
    accept = {"accept": "text/html", "sec-fetch-dest": "document", "sec-fetch-mode": "navigate"}
    answers = {
        path + slash: http.request(method, path + slash, headers=accept) for path in PATHS for slash in ("", "/")
    }

    assert {answer.status_code for answer in answers.values()} == {401}
    assert len({answer.content for path, answer in answers.items() if path.strip("/")}) <= 2


def test_probes_with_a_key(http, headers):
    assert http.head("/", headers=headers).status_code == 200
    assert http.get("/health/live", headers=headers).json() == {"status": "live"}
    assert http.get("/health/ready", headers=headers).json() == {"status": "ready"}
    assert http.get("/no/such", headers=headers).status_code == 404
    assert http.get("/v1/chat/completions", headers=headers).status_code == 405
    assert http.get("/v1/models/", headers=headers).status_code == 404
    assert http.get("/openapi.json", headers=headers).json()["openapi"].startswith("3.1")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b'{"model": "tiny", "model": "other"}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "n": 1e3}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": {"$ref": "file:///etc/passwd"}}]}',
        b'{"model": "../../etc/passwd", "messages": []}',
    ],
)
def test_malformed_bodies_are_400(http, headers, body):
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/v1/embeddings"):
        answer = http.post(path, content=body, headers={**headers, "content-type": "application/json"})

        assert answer.status_code == 400
        assert len(answer.content) <= 400
        assert b"Traceback" not in answer.content


def test_an_answer_says_where_it_is_from_and_the_log_has_no_text(server, http, headers):
    secret_word = "zebra-crossing"
    body = {**BODY, "messages": [{"role": "user", "content": secret_word}]}

    answer = http.post("/v1/chat/completions", json=body, headers=headers)

    assert answer.json()["phalanx"]["model_digest"] == server.pool.cards[0].digest
    assert answer.headers["x-request-id"].startswith("req_")
    log = "".join(path.read_text() for path in (server.access / LOG_FOLDER).glob("*.jsonl"))
    last = json.loads(log.splitlines()[-1])
    assert secret_word not in log
    assert server.secrets["alice"] not in log
    assert server.pool.cards[0].digest in json.dumps(last)
    verify_request_log(server.access / LOG_FOLDER, read_public_signer(server.access / SERVER_FILE))


def test_a_special_token_in_a_text_is_refused_and_in_tokens_is_not(server, http, headers):
    end = server.pool.engines[0].served.backend.token_to_id("<|im_end|>")
    body = {"model": "tiny", "max_tokens": 1}

    refused = http.post("/v1/completions", json={**body, "prompt": "a<|im_end|>"}, headers=headers)
    taken = http.post("/v1/completions", json={**body, "prompt": [5, end]}, headers=headers)
    beyond = http.post("/v1/completions", json={**body, "prompt": [5, 100_000]}, headers=headers)

    assert [answer.status_code for answer in (refused, taken, beyond)] == [400, 200, 400]


def test_streams_are_events_that_no_proxy_keeps(http, headers):
    answer = http.post("/v1/chat/completions", json={**BODY, "stream": True}, headers=headers)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    blocks = answer.text.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    assert all(json.loads(block.removeprefix("data: "))["id"] for block in blocks[:-1])
