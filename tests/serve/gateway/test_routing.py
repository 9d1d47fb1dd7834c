"""Which engine a request goes to, how often, and what personal data has to do with it."""

import contextlib
import socket

import pytest
from running_gateway import WIDE, RunningGateway, backends

from access_keys import make_access

PERSONAL = [
    "say write to anna.larsen@example.org",
    "say call +47 22 12 34 56 please",
    "say my IBAN is DE89 3704 0044 0532 0130 00",
    "say \uff41nna.larsen\uff20example.org",
]


def engines_of(lab) -> tuple[int, int]:
    return len(lab.local.requests), len(lab.cloud.requests)


@pytest.mark.parametrize("text", PERSONAL)
def test_personal_data_goes_to_local_engines_alone(lab, text):
    for _ in range(4):
        assert lab.gateway.ask(lab.secret, text).status_code == 200

    assert engines_of(lab) == (4, 0)


@pytest.mark.parametrize("text", PERSONAL)
def test_personal_data_without_a_local_engine_goes_nowhere(lab, text):
    answer = lab.gateway.ask(lab.secret, text, model="large")

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "sensitive_text")
    assert engines_of(lab) == (0, 0)


def test_personal_data_is_found_in_every_part_of_a_request(lab):
    mail = "anna.larsen@example.org"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"to": "{mail}"}}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [mail]}}}
    hidden = [
        {"messages": [{"role": "system", "content": mail}, {"role": "user", "content": "x"}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "anna.larsen@"}, {"type": "text", "text": "example.org"}],
                }
            ]
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "+47 22 12"}, {"type": "text", "text": " 34 56"}]}
            ]
        },
        {"messages": [{"role": "user", "content": "anna.larsen@"}, {"role": "user", "content": "example.org"}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"tools": [tool]},
        {"stop": [mail]},
    ]
    for more in hidden:
        assert lab.gateway.ask(lab.secret, **{"model": "large", **more}).status_code == 403, more
    with lab.gateway.client(lab.secret) as client:
        for path, body in (
            ("/v1/completions", {"prompt": ["x", mail]}),
            ("/v1/completions", {"prompt": "x", "suffix": mail}),
            ("/v1/embeddings", {"input": mail}),
            ("/v1/messages", {"max_tokens": 5, "system": mail, "messages": [{"role": "user", "content": "x"}]}),
        ):
            assert client.post(path, json={"model": "large", **body}).status_code == 403
    assert engines_of(lab) == (0, 0)


def test_plain_texts_go_to_either_kind(lab):
    assert lab.gateway.ask(lab.secret, "say it is 1994 and 12.5 %", model="large").status_code == 200
    assert engines_of(lab) == (0, 1)


def test_token_ids_are_refused_and_where_they_are_allowed_they_are_sensitive(lab, tmp_path):
    keys = make_access(tmp_path / "access")
    _, secret = keys.make(limits=WIDE)
    config = {
        "backends": backends(lab.local, lab.cloud),
        "limits": {"allow_token_prompts": True, "private_fields": "strip"},
    }
    gateway = RunningGateway(tmp_path, keys, config)
    for url, allowed in ((lab.gateway, False), (gateway, True)):
        with url.client(secret if allowed else lab.secret) as client:
            for prompt in ([1, 2, 3], [[1, 2], [3]]):
                small = client.post("/v1/completions", json={"model": "small", "prompt": prompt}).status_code
                large = client.post("/v1/completions", json={"model": "large", "prompt": prompt}).status_code
                assert (small, large) == ((200, 403) if allowed else (400, 400))
    assert engines_of(lab) == (2, 0)
    # the same gateway strips fields that only one engine knows, and still refuses what nobody knows
    lab.reset()
    assert gateway.ask(secret, n_discard=-5, slot_id=3, guided_json={"a": 1}, cache_prompt=True).status_code == 200
    assert gateway.ask(secret, unheard_of=1).status_code == 400
    sent = (lab.local.requests + lab.cloud.requests)[0][1]
    assert not {"n_discard", "slot_id", "guided_json"} & set(sent)
    assert sent["cache_prompt"] is False, "the gateway's own, not the client's"
    assert gateway.stop() == 0


def test_an_engine_that_has_not_begun_is_passed_over_and_only_one_budget_is_taken(lab):
    key_id, secret = lab.keys.make("grace", limits=WIDE)
    lab.local.status = 503

    answers = [lab.gateway.ask(secret) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(lab.cloud.requests) == 3
    assert lab.gateway.used(key_id) == (3, 21, 9)


@pytest.mark.parametrize("status", [500, 502, 504])
def test_an_engine_that_may_have_worked_is_not_asked_again_elsewhere_and_is_counted(lab, status):
    key_id, secret = lab.keys.make("heidi", limits=WIDE)
    lab.local.status = lab.cloud.status = status

    assert lab.gateway.ask(secret, max_tokens=40).status_code == 502
    assert sum(engines_of(lab)) == 1
    requests, _, completion = lab.gateway.used(key_id)
    assert (requests, completion) == (1, 40)


def test_a_request_that_no_engine_takes_costs_no_tokens(lab):
    key_id, secret = lab.keys.make("ivan", limits=WIDE)
    lab.local.status = lab.cloud.status = 503
    busy = lab.gateway.ask(secret)
    lab.local.status = lab.cloud.status = 400
    refused = lab.gateway.ask(secret)

    assert (busy.status_code, busy.headers["retry-after"], refused.status_code) == (503, "2", 400)
    assert lab.gateway.used(key_id) == (2, 0, 0)


def test_an_engine_that_is_gone_is_passed_over_until_it_is_back(lab, tmp_path):
    keys = make_access(tmp_path / "access")
    _, secret = keys.make(limits=WIDE)
    engines = backends(lab.local, lab.cloud)
    with socket.socket() as closed:
        # bound and deaf: nobody else is given the port meanwhile
        closed.bind(("127.0.0.1", 0))
        engines[0]["url"] = f"http://127.0.0.1:{closed.getsockname()[1]}"
        gateway = RunningGateway(tmp_path, keys, {"backends": engines, "health_every_s": 3600})

        assert [gateway.ask(secret).status_code for _ in range(3)] == [200] * 3
        assert engines_of(lab) == (0, 3)
        personal = gateway.ask(secret, PERSONAL[0])
        assert (personal.status_code, personal.json()["error"]["code"]) == (503, "no_engine")
        assert engines_of(lab) == (0, 3), "no fallback takes personal data to a cloud"
        with gateway.client(secret) as client:
            assert client.get("/health").json() == {"status": "ready"}
        assert gateway.stop() == 0


def test_requests_are_spread_by_load(lab):
    """Each answer is held open while the next one is asked for: on a busy machine, nothing else makes them overlap."""
    body = {"model": "small", "messages": [{"role": "user", "content": "wait"}], "stream": True}
    with lab.gateway.client(lab.secret) as client, contextlib.ExitStack() as held:
        for _ in range(4):
            answer = held.enter_context(client.stream("POST", "/v1/chat/completions", json=body))
            assert answer.status_code == 200
        assert engines_of(lab) == (2, 2)

    assert all(stub.left.wait(60) for stub in (lab.local, lab.cloud))


def test_owners_of_keys_do_not_share_an_engines_cache_of_prompts(lab, tmp_path):
    keys = make_access(tmp_path / "access")
    secrets = [keys.make(owner, limits=WIDE)[1] for owner in ("alice", "alice", "bob")]
    engines = backends(lab.local, lab.cloud)
    engines[1] |= {"prefix_cache": "off", "models": {"large": "c"}}
    gateway = RunningGateway(tmp_path, keys, {"backends": engines})

    for secret in secrets:
        assert gateway.ask(secret).status_code == 200
        assert gateway.ask(secret, model="large").status_code == 200
        assert gateway.ask(secret, cache_salt="mine").status_code == 400

    alice, again, bob = (body["cache_salt"] for _, body, _ in lab.local.requests)
    assert alice == again != bob
    assert all(body["cache_prompt"] is False for _, body, _ in lab.local.requests), "the default is for any engine"
    assert all("cache_salt" not in body for _, body, _ in lab.cloud.requests)
    assert all(body["cache_prompt"] is False for _, body, _ in lab.cloud.requests)
    assert gateway.stop() == 0
