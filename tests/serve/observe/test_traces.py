"""Traces of requests, against a receiver that speaks OTLP over HTTP; one that is slow, dead or refuses harms nobody."""

import socket

import pytest
from collector import Collector
from watched_server import http_of, read_samples, watch_of

from phalanx.errors import ConfigError
from phalanx.serve.observe import WatchConfig, load_watch_config
from tiny_served import add_key, running_server, serve_model

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "a secret-word"}], "max_tokens": 5, "temperature": 0}


def traced(endpoint, **more):
    return WatchConfig.model_validate({"traces": {"endpoint": f"{endpoint}/v1/traces", "service": "test", **more}})


@pytest.fixture
def access(tmp_path):
    return tmp_path / "access"


def serve_traced(model_directory, access, config):
    return running_server([serve_model(model_directory)], access, make_watch=watch_of(access, config))


def test_a_span_has_names_sizes_and_times_and_no_text(model_directory, access):
    _, secret = add_key(access)
    with Collector() as collector, serve_traced(model_directory, access, traced(collector.url)) as (url, pool):
        with http_of(url, secret) as http:
            answer = http.post("/v1/chat/completions", json=ASK).json()
        [(span, attributes)] = collector.next_spans()

    assert span.name == "chat tiny"
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert attributes["http.response.status_code"] == 200
    assert attributes["phalanx.model.digest"] == pool.cards[0].digest
    assert span.start_time_unix_nano < span.events[0].time_unix_nano <= span.end_time_unix_nano
    raw = span.SerializeToString()
    for forbidden in ("secret-word", secret, "alice", answer["choices"][0]["message"]["content"]):
        assert forbidden.encode() not in raw


def test_refused_requests_have_a_span_and_strangers_none(model_directory, access):
    _, secret = add_key(access)
    with Collector() as collector, serve_traced(model_directory, access, traced(collector.url)) as (url, _):
        with http_of(url) as http:
            http.post("/v1/chat/completions", json=ASK)
        with http_of(url, secret) as http:
            http.post("/v1/chat/completions", json={**ASK, "model": "gone"})
        [(span, attributes)] = collector.next_spans()

    assert attributes["error.type"] == "404"
    assert span.name == "chat other"


def test_a_silent_collector_delays_no_request(model_directory, access):
    _, secret = add_key(access)
    operator = add_key(access, "ops", role="operator")[1]
    with Collector(status=400) as collector:
        collector.silent.set()
        config = traced(collector.url, max_waiting=4)
        with serve_traced(model_directory, access, config) as (url, _), http_of(url, secret) as http:
            assert http.post("/v1/chat/completions", json=ASK).status_code == 200
            # the first batch hangs in the collector, and every request behind it is answered meanwhile
            collector.bodies.get(timeout=120)
            for _ in range(20):
                assert http.post("/v1/chat/completions", json=ASK).status_code == 200
            assert not collector.may_end.is_set()
            collector.may_end.set()
            for _ in range(100_000):
                if read_samples(url, operator)["phalanx_lost_spans_total"] > 0:
                    break
            else:
                pytest.fail("refused spans were not counted")


def test_a_dead_collector_fails_no_request(model_directory, access):
    _, secret = add_key(access)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = traced(f"http://127.0.0.1:{port}")
    with serve_traced(model_directory, access, config) as (url, _), http_of(url, secret) as http:
        assert http.post("/v1/chat/completions", json=ASK).status_code == 200


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("traces.endpoint", "http://collector.example.org/v1/traces"),
        ("traces.endpoint", "file:///etc/passwd"),
        ("alerts.webhook", "http://hooks.example.org/x"),
        ("alerts.webhook", "https://user@hooks.example.org/x"),
        ("alerts.webhook", "https:\\\\hooks.example.org"),
    ],
)
def test_addresses_are_https_or_of_this_machine(tmp_path, key, url):
    file = tmp_path / "watch.toml"
    file.write_text("")

    with pytest.raises(ConfigError):
        load_watch_config(file, [f"{key}={url!r}"])
