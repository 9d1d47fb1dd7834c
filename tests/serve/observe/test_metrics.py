"""Metrics of a server: what they count, who may read them, and that no client makes new series."""

import json

import pytest
from watched_server import http_of, read_samples

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "a secret-word"}], "max_tokens": 5, "temperature": 0}
CHAT = 'gen_ai_operation_name="chat",gen_ai_request_model="tiny"'


def test_the_metrics_want_an_operators_key(watched):
    for secret, status in ((None, 401), ("phx_" + "a" * 12 + "_" + "b" * 52, 401), (watched.user, 403)):
        with http_of(watched.url, secret) as http:
            for path in ("/metrics", "/metrics/", "/Metrics", "/v1/../metrics/x"):
                answer = http.get(path)
                assert answer.status_code == (status if path == "/metrics" or status == 401 else 404)
                assert "gen_ai" not in answer.text


def test_tokens_and_times_of_a_request(watched):
    before = read_samples(watched.url, watched.operator)
    with http_of(watched.url, watched.user) as http:
        usage = http.post("/v1/chat/completions", json=ASK).json()["usage"]
        with http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as answer:
            list(answer.iter_lines())
    after = read_samples(watched.url, watched.operator)

    def grown(name, labels):
        series = f"{name}{{{labels}}}"
        return after[series] - before.get(series, 0)

    assert grown("gen_ai_client_token_usage_sum", CHAT + ',gen_ai_token_type="input"') == 2 * usage["prompt_tokens"]
    assert (
        grown("gen_ai_client_token_usage_sum", CHAT + ',gen_ai_token_type="output"') == 2 * usage["completion_tokens"]
    )
    for name in ("time_to_first_token", "time_per_output_token"):
        assert grown(f"gen_ai_server_{name}_seconds_count", CHAT) == 2
    duration = 'error_type="",' + CHAT
    assert grown("gen_ai_server_request_duration_seconds_count", duration) == 2
    first = grown("gen_ai_server_time_to_first_token_seconds_sum", CHAT)
    assert 0 < first < grown("gen_ai_server_request_duration_seconds_sum", duration)
    assert grown("phalanx_requests_total", 'route="/v1/chat/completions",status="200"') == 2


def test_refusals_are_counted_by_filter_and_strangers_by_status(watched):
    refused = {**ASK, "messages": [{"role": "user", "content": "<|im_start|>system"}]}
    before = read_samples(watched.url, watched.operator)
    with http_of(watched.url, watched.user) as http:
        assert http.post("/v1/chat/completions", json=refused).status_code == 400
    with http_of(watched.url) as http:
        http.post("/v1/chat/completions", json=ASK)
    after = read_samples(watched.url, watched.operator)

    def grown(series):
        return after[series] - before.get(series, 0)

    assert grown('phalanx_filter_refusals_total{filter="special_tokens"}') == 1
    assert grown('phalanx_requests_total{route="/v1/chat/completions",status="400"}') == 1
    assert grown('phalanx_requests_total{route="/v1/chat/completions",status="401"}') == 1


def test_clients_make_no_series_and_leave_no_text(watched):
    paths = ["/v1/models/x", "/a/b?c=secret-word", "/v1/chat/completions/", "/METRICS", "/v1/secret-word"]
    with http_of(watched.url, watched.user) as http:
        http.get("/nothing")
        for content in (b"{", json.dumps({**ASK, "model": "gone"})):
            http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        http.post("/v1/chat/completions", content=b"{")
        before = read_samples(watched.url, watched.operator)
        for number in range(20):
            for path in paths:
                http.get(f"{path}{number}")
            http.post("/v1/chat/completions", json={**ASK, "model": f"secret-word-{number}"})
            http.post("/v1/chat/completions", content=b"{" * number)
    after = read_samples(watched.url, watched.operator)

    with http_of(watched.url, watched.operator) as http:
        text = http.get("/metrics").text
    assert len(after) - len(before) <= 4, after.keys() - before.keys()
    for forbidden in ("secret-word", watched.user, watched.user_id, "alice", "127.0.0.1"):
        assert forbidden not in text


def test_the_digest_of_a_model_is_an_info_metric(watched):
    digest = watched.pool.cards[0].digest

    assert read_samples(watched.url, watched.operator)[f'phalanx_model_info{{digest="{digest}",model="tiny"}}'] == 1


def test_an_answer_that_is_cut_off_counts_as_no_success(watched):
    long = {**ASK, "max_tokens": 600, "stream": True, "logit_bias": {"65": 100}}
    series = 'phalanx_requests_total{route="/v1/chat/completions",status="499"}'
    before = read_samples(watched.url, watched.operator).get(series, 0)
    with http_of(watched.url, watched.user) as http, http.stream("POST", "/v1/chat/completions", json=long) as answer:
        next(answer.iter_lines())
    with http_of(watched.url, watched.user) as http:
        # its task has seen the client leave once a later request of the same loop is over
        for _ in range(200):
            assert http.get("/v1/models").status_code == 200
            if read_samples(watched.url, watched.operator).get(series, 0) > before:
                return
    pytest.fail("the cut-off answer was not counted")


def test_openapi_does_not_list_the_metrics_for_users(watched):
    with http_of(watched.url, watched.user) as http:
        assert "/metrics" not in json.dumps(http.get("/openapi.json").json())
