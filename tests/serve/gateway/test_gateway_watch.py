"""A gateway's metrics, its alerts' file, and models and keys that its operator takes out of service."""

import pytest
from running_gateway import WIDE, RunningGateway, backends
from stub_engine import Stub

from access_keys import make_access
from phalanx.errors import ConfigError
from phalanx.security.crypto import read_public_signer
from phalanx.serve.access import LOG_FOLDER, SERVER_FILE, make_reader_key, open_texts, verify_request_log
from phalanx.serve.gateway import load_gateway_config
from phalanx.serve.incident import IncidentCase


def read_metrics(lab, secret):
    with lab.gateway.client(secret) as http:
        answer = http.get("/metrics")
    return answer.status_code, answer.text


def value_of(text, series):
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(f"{series} ")]
    return float(values[0]) if values else 0.0


@pytest.fixture(scope="module")
def operator(shared_lab):
    return shared_lab.keys.make("ops", role="operator")[1]


def test_its_metrics_want_an_operators_key(lab, operator):
    assert read_metrics(lab, None)[0] == 401
    assert read_metrics(lab, lab.secret)[0] == 403
    assert read_metrics(lab, operator)[0] == 200


def test_it_counts_tokens_refusals_and_engines(lab, operator):
    series = (
        'gen_ai_client_token_usage_sum{gen_ai_operation_name="chat",gen_ai_request_model="small",gen_ai_token_type='
    )
    before = read_metrics(lab, operator)[1]
    lab.gateway.ask(lab.secret)
    lab.gateway.ask(lab.secret, "<|im_start|>secret-word")
    with lab.gateway.client(lab.secret) as http:
        http.post("/v1/chat/completions", json={"model": "secret-word", "messages": [{"role": "user", "content": "a"}]})
    after = read_metrics(lab, operator)[1]

    def grown(name):
        return value_of(after, name) - value_of(before, name)

    assert grown(series + '"input"}') == 7
    assert grown(series + '"output"}') == 3
    assert grown('phalanx_filter_refusals_total{filter="special_tokens"}') == 1
    assert grown('phalanx_requests_total{route="/v1/chat/completions",status="404"}') == 1
    assert value_of(after, 'phalanx_engine_up{engine="site"}') == 1
    assert "secret-word" not in after
    assert lab.key_id not in after


@pytest.mark.parametrize(("text", "status"), [("break", 502), ("error inside", 502), ("say so", 200)])
def test_a_stream_that_its_engine_breaks_off_counts_as_a_fault(lab, operator, text, status):
    series = f'phalanx_requests_total{{route="/v1/chat/completions",status="{status}"}}'
    before = value_of(read_metrics(lab, operator)[1], series)
    lab.gateway.ask(lab.secret, text, stream=True)

    assert value_of(read_metrics(lab, operator)[1], series) == before + 1


def test_texts_are_sealed_in_the_log_whole_and_streamed(tmp_path):
    make_reader_key(tmp_path / "reader.key")
    keys = make_access(tmp_path / "access")
    _, secret = keys.make("alice", limits=WIDE)
    with Stub() as local, Stub() as cloud:
        config = {"backends": backends(local, cloud), "health_every_s": 3600, "seal_texts": "reader.key.pub"}
        gateway = RunningGateway(tmp_path, keys, config)
        whole = gateway.ask(secret, "say heron").json()["choices"][0]["message"]["content"]
        gateway.ask(secret, "say heron", stream=True)
        assert gateway.stop() == 0

    lines, access = [], tmp_path / "access"
    verify_request_log(access / LOG_FOLDER, read_public_signer(access / SERVER_FILE), lines.append)
    rows = [texts for _, texts in open_texts(lines, tmp_path / "reader.key", access)]
    assert [row["prompts"][0]["messages"][0]["content"] for row in rows] == ["say heron", "say heron"]
    assert [[text for text in row["answers"] if text] for row in rows] == [[whole], [whole]]
    assert not any(b"heron" in path.read_bytes() for path in (access / LOG_FOLDER).glob("*.jsonl"))


def test_budgets_are_counted_by_name(lab, operator):
    _, poor = lab.keys.make("poor", limits={"requests_per_minute": 1})
    series = 'phalanx_budget_refusals_total{budget="requests_per_minute"}'
    before = value_of(read_metrics(lab, operator)[1], series)

    assert [lab.gateway.ask(poor).status_code for _ in range(2)] == [200, 429]
    assert value_of(read_metrics(lab, operator)[1], series) == before + 1


def test_a_quarantined_model_and_key_are_refused_until_they_are_released(lab):
    case = IncidentCase.begin(lab.gateway.folder / "access", "a test")
    key, secret = lab.keys.make("suspect")
    lab.reset()

    case.quarantine_model("small")
    refused = lab.gateway.ask(lab.secret)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_quarantined")
    assert lab.local.requests == lab.cloud.requests == []
    case.release_model("small")
    case.quarantine_key(key)
    assert lab.gateway.ask(secret).status_code == 401
    assert lab.gateway.ask(lab.secret).status_code == 200
    case.release_key(key)
    assert lab.gateway.ask(secret).status_code == 200


def test_its_file_has_rules_with_paths_beside_it(tmp_path):
    file = tmp_path / "gateway.toml"
    engine = '[[backends]]\nname = "a"\nurl = "http://127.0.0.1:1"\nmodels = { m = "m" }\n'
    rules = '[watch.alerts]\nwebhook = "https://hooks.example.org/x"\nwebhook_secret_file = "hook"\n'
    file.write_text(engine + rules)
    assert load_gateway_config(file).watch.alerts.webhook_secret_file == tmp_path / "hook"
    file.write_text(engine + '[watch.alerts]\nwebhook = "http://hooks.example.org/x"\n')
    with pytest.raises(ConfigError):
        load_gateway_config(file)


def test_a_gateway_measures_no_perplexity(tmp_path):
    from phalanx.serve.access import Access
    from phalanx.serve.gateway import make_gateway

    file = tmp_path / "gateway.toml"
    engine = '[[backends]]\nname = "a"\nurl = "http://127.0.0.1:1"\nmodels = { m = "m" }\n'
    file.write_text(engine + '[watch.alerts.reference]\ntexts = "texts.txt"\n')
    from access_keys import make_access

    make_access(tmp_path / "access")
    with Access.open(tmp_path / "access") as access, pytest.raises(ConfigError, match="measures no perplexity"):
        make_gateway(load_gateway_config(file), access)
