"""A key or model that is out of service: at once, for streams too, by the operator's signature alone."""

import json

import httpx2
import pytest

from access_keys import make_access
from phalanx.cli import run_command
from phalanx.errors import InputError, KeyFileError
from phalanx.serve.access import KeyStore, ModelOrder
from phalanx.serve.incident import IncidentCase, newest_case, verify_report, write_report
from phalanx.serve.incident.case import CLOSED, INCIDENT_LOG, INCIDENTS_FOLDER, operator_of
from tiny_served import add_key, running_server, serve_model, write_model

CHAT = "/v1/chat/completions"
LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "the"}],
    "max_tokens": 900,
    "temperature": 0,
    "logit_bias": {"65": 100},
    "stream": True,
}
ASK = {**LONG, "max_tokens": 3, "stream": False}


def http_of(url, secret):
    headers = {"authorization": f"Bearer {secret}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=250, trust_env=False, verify=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its address, access directory, and two keys."""
    access = tmp_path_factory.mktemp("incident") / "access"
    keys = [add_key(access, owner) for owner in ("alice", "bob")]
    cache = tmp_path_factory.mktemp("models")
    models = [serve_model(write_model(cache)), serve_model(write_model(cache, seed=2), "other")]
    with running_server(models, access) as (url, pool):
        yield url, access, keys, pool


def read_until_cut(url, secret, act):
    """The lines of a stream in whose middle something happens."""
    lines = []
    with http_of(url, secret) as http, http.stream("POST", CHAT, json=LONG) as answer:
        assert answer.status_code == 200
        try:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    act()
        except httpx2.RemoteProtocolError:
            pass
    return lines


def test_a_quarantined_key_ends_in_mid_stream_and_comes_back(server):
    url, access, [(key, secret), (_, other)], _ = server
    case = IncidentCase.begin(access, "a key leaked")

    lines = read_until_cut(url, secret, lambda: case.quarantine_key(key))

    assert "data: [DONE]" not in lines
    assert len(lines) < 900
    with http_of(url, secret) as http:
        assert http.post(CHAT, json=ASK).status_code == 401
    with http_of(url, other) as http:
        assert http.post(CHAT, json=ASK).status_code == 200
    case.release_key(key)
    with http_of(url, secret) as http:
        assert http.post(CHAT, json=ASK).status_code == 200


@pytest.mark.parametrize("content", [None, b"", b'{"torn', b"x" * 99 + b"\n"])
def test_a_key_is_out_of_service_though_an_older_incident_has_no_whole_log(tmp_path, content):
    """A crash, or whoever can write the directory, leaves such an incident; it must not stand in the operator's way."""
    keys = make_access(tmp_path / "access")
    key, secret = keys.make()
    broken = keys.directory / INCIDENTS_FOLDER / "29991231-235959-abcdef"
    broken.mkdir(parents=True)
    if content is not None:
        (broken / INCIDENT_LOG).write_bytes(content)

    assert run_command(["incident", "quarantine", "--key", key, "--access", str(keys.directory)]) == 0

    assert KeyStore.open(keys.directory).find_caller(secret, "127.0.0.1") is None
    assert newest_case(keys.directory).incident != broken.name


def test_a_quarantined_model_ends_in_mid_stream_on_every_route(server):
    url, access, [(_, secret), _], _ = server
    case = IncidentCase.begin(access, "a model misbehaves")

    lines = read_until_cut(url, secret, lambda: case.quarantine_model("tiny"))

    assert "data: [DONE]" not in lines
    with http_of(url, secret) as http:
        refused = [
            http.post(CHAT, json=ASK),
            http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}),
            http.post("/v1/messages", json={"model": "tiny", "max_tokens": 1, "messages": ASK["messages"]}),
            http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": ASK["messages"]}),
            http.post("/v1/responses", json={"model": "tiny", "input": "a", "max_output_tokens": 1}),
            http.post("/v1/embeddings", json={"model": "tiny", "input": "a"}),
            http.get("/v1/models/tiny"),
        ]
        assert [answer.status_code for answer in refused] == [503] * len(refused)
        assert refused[0].json()["error"]["code"] == "model_quarantined"
        assert http.post(CHAT, json={**ASK, "model": "other"}).status_code == 200
        case.release_model("tiny")
        assert http.post(CHAT, json=ASK).status_code == 200


def test_a_revoked_key_ends_in_mid_stream(server):
    url, access, _, _ = server
    key, secret = add_key(access, "carol")

    lines = read_until_cut(url, secret, lambda: KeyStore.open(access).revoke_key(key))

    assert "data: [DONE]" not in lines


def test_only_the_ordered_files_may_answer(server):
    url, access, [(_, secret), _], pool = server
    store, digest = KeyStore.open(access), pool.find_card("other").digest
    ask = {**ASK, "model": "other"}
    with http_of(url, secret) as http:
        for digests, status in ((("ab" * 32,), 503), ((digest,), 200), (("ab" * 32, digest), 200), ((), 200)):
            store.order_model(ModelOrder(model="other", digests=digests, since=1))
            assert http.post(CHAT, json=ask).status_code == status


def test_an_adapter_goes_with_its_model(tmp_path):
    keys = make_access(tmp_path / "access")
    keys.store.order_model(ModelOrder(model="base", is_quarantined=True, since=1))

    assert not keys.store.allows_models([("adapter", "12"), ("base", "34")])
    assert keys.store.allows_models([("other", "34")])
    # of a model in another's hands no digest is known: an order about files cannot hold for it
    keys.store.order_model(ModelOrder(model="base", digests=("ab" * 32,), since=1))
    assert keys.store.allows_models([("base", "")])


def test_orders_are_signed_with_the_keys(tmp_path):
    keys = make_access(tmp_path / "access")
    keys.store.order_model(ModelOrder(model="base", is_quarantined=True, since=1))
    path = tmp_path / "access" / "keys.json"
    path.write_text(path.read_text().replace('"is_quarantined":true', '"is_quarantined":false'))

    with pytest.raises(KeyFileError):
        KeyStore.open(tmp_path / "access")


def test_keys_and_orders_outlive_each_other(tmp_path):
    keys = make_access(tmp_path / "access")
    key, _ = keys.make("alice")
    keys.store.order_model(ModelOrder(model="base", is_quarantined=True, since=1))
    store = KeyStore.open(tmp_path / "access")
    store.quarantine_key(key, is_quarantined=True)
    store.revoke_key(key)

    again = KeyStore.open(tmp_path / "access")

    assert not again.is_active(key)
    assert [order.model for order in again.list_orders()] == ["base"]
    again.quarantine_key(key, is_quarantined=False)
    assert not again.is_active(key), "what was revoked stays revoked"


def test_a_key_file_of_before_is_read(tmp_path):
    from phalanx.config import canonical_json
    from phalanx.security.crypto import in_domain, load_signer

    directory = tmp_path / "access"
    keys = make_access(directory)
    key, _ = keys.make("alice")
    statement = json.loads((directory / "keys.json").read_text())["statement"]
    del statement["models"], statement["keys"][0]["quarantined"]
    signer = load_signer(directory / "operator", directory / "operator.json")
    signature = signer.sign_data(in_domain("api-keys/1", canonical_json(statement))).hex()
    (directory / "keys.json").write_bytes(canonical_json({"signature": signature, "statement": statement}))

    assert KeyStore.open(directory).is_active(key)


def test_a_report_has_the_time_line_of_the_log_and_no_text(server):
    url, access, [(key, secret), _], _ = server
    case = IncidentCase.begin(access, "who asked what | and when")
    with http_of(url, secret) as http:
        http.post(CHAT, json={**ASK, "messages": [{"role": "user", "content": "secret-word"}]})
    case.quarantine_key(key)
    case.release_key(key)
    statement = write_report(case, hours=1)
    path = case.directory / "report.json"

    assert verify_report(path, operator_of(access)) == statement
    kinds = [entry["kind"] for entry in statement["time_line"]]
    assert kinds.index("opened") < kinds.index("key_quarantined") < kinds.index("key_released")
    times = [entry["time"] for entry in statement["time_line"]]
    assert times == sorted(times)
    requests = [entry for entry in statement["time_line"] if entry["kind"] == "request"]
    assert requests
    assert {entry["key"] for entry in requests} == {key}
    assert [row["owner"] for row in statement["keys"] if row["key"] == key] == ["alice"]
    assert statement["request_log"]["lines"] >= len(requests)
    for text in (path.read_text(), (case.directory / "report.md").read_text()):
        assert "secret-word" not in text
        assert secret not in text
    from phalanx.errors import VerificationError

    path.write_text(path.read_text().replace("alice", "alicf"))
    with pytest.raises(VerificationError):
        verify_report(path, operator_of(access))


def test_an_altered_log_gives_no_report(tmp_path):
    from phalanx.errors import AuditLogError

    access = tmp_path / "access"
    make_access(access)
    case = IncidentCase.begin(access, "title")
    log = case.directory / "incident.jsonl"
    log.write_text(log.read_text().replace("title", "other"))

    with pytest.raises(AuditLogError):
        write_report(case)


def test_the_newest_open_incident_is_the_default(tmp_path):
    access = tmp_path / "access"
    make_access(access)
    assert newest_case(access) is None
    first = IncidentCase.begin(access, "one")
    first.record_action(CLOSED, {"note": "over"})
    assert newest_case(access) is None
    second = IncidentCase.begin(access, "two")
    assert newest_case(access).incident == second.incident
    for name in ("../..", "20260101-000000-abcdef", ""):
        with pytest.raises(InputError):
            IncidentCase(access, name)
