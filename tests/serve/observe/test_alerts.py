"""Rules of alerts: each calls where it must, is silent where it must, and says what to do."""

import asyncio
import json
import math
import random
from typing import ClassVar

import pytest
from collector import Collector
from watched_server import http_of, read_samples, watch_of

from phalanx.errors import ConfigError, InputError
from phalanx.serve.access import Caller, RequestNotes, sketch_prompt
from phalanx.serve.engine import EnginePool, EngineSettings
from phalanx.serve.marks import MarkKey, MarkPolicy, TokenMark
from phalanx.serve.observe import WatchConfig, load_watch_config, measure_models, read_texts
from phalanx.serve.observe.alerts import ACTIONS, AlertWatch
from phalanx.serve.observe.config import AlertRules
from phalanx.serve.observe.drift import Baselines, read_baselines, write_baselines
from phalanx.serve.observe.metrics import RequestOutcome
from tiny_served import add_key, running_server, serve_model

CHAT = "/v1/chat/completions"


class Traffic:
    """Requests at seconds that the test chooses."""

    def __init__(self, baselines=None, **rules):
        self.now = 1000.0
        self.watch = AlertWatch(AlertRules.model_validate_json(json.dumps(rules)), baselines or Baselines())

    def ask(self, key="a" * 12, *, prompt=(), logprobs=False, status=200, route=CHAT, **more):
        caller = None if key is None else Caller(key, "alice", "user", None, False)
        notes = RequestNotes(caller=caller, sketches=[sketch_prompt(prompt)] if prompt else [], has_logprobs=logprobs)
        self.watch.add_request(self.now, RequestOutcome(route, "tiny", status, 0.1, **more), notes)

    def begun(self):
        return [(alert.rule, alert.subject) for alert in self.watch.check_rules(self.now)[0]]


def words(seed, number):
    """Tokens that two seeds have not in common."""
    return [random.Random(f"{seed} {place}").getrandbits(16) for place in range(number)]


@pytest.mark.parametrize(("faults", "alerts"), [(1, []), (2, [("errors", "server")])])
def test_the_share_of_faults(faults, alerts):
    traffic = Traffic(errors={"min_requests": 20, "max_share": 0.05})
    for number in range(20):
        traffic.ask(status=500 if number < faults else 200)

    assert traffic.begun() == alerts


def test_faults_of_clients_and_of_other_routes_are_no_errors():
    traffic = Traffic(errors={"min_requests": 5})
    for _ in range(20):
        traffic.ask(status=400)
        traffic.ask(status=429)
        traffic.ask(status=503, route="/health/ready")

    assert traffic.begun() == []


def test_an_alert_begins_once_and_ends_with_its_window():
    traffic = Traffic(errors={"min_requests": 5, "window_s": 60})
    for _ in range(5):
        traffic.ask(status=502)

    assert traffic.begun() == [("errors", "server")]
    assert traffic.begun() == []
    traffic.now += 61
    begun, over = traffic.watch.check_rules(traffic.now)
    assert (begun, [alert.rule for alert in over]) == ([], ["errors"])


def test_refusals_by_filters_are_counted_by_key():
    traffic = Traffic(abuse={"max_refused": 3})
    for _ in range(3):
        traffic.ask("b" * 12, status=400, filter_name="special_tokens")
        traffic.ask("a" * 12, status=400, filter_name="special_tokens")
    traffic.ask("a" * 12, verdicts=("secrets: refused",))
    traffic.ask("b" * 12, status=400, verdicts=("invalid_request",))
    traffic.ask("b" * 12, verdicts=("secrets:key",))

    assert traffic.begun() == [("abuse", "a" * 12)]


def test_keys_that_are_guessed():
    traffic = Traffic(guessing={"max_refused": 10})
    for _ in range(10):
        traffic.ask(None, status=401)
    assert traffic.begun() == []
    traffic.ask(None, status=401, route="other")
    assert traffic.begun() == [("guessing", "server")]


class TestExtraction:
    """One key that walks the model, and others that only look like it."""

    RULE: ClassVar = {"min_scored_prompts": 50, "min_prompts": 50, "min_output_tokens": 5000, "exempt_keys": ["e" * 12]}

    def test_many_unlike_prompts_with_scores(self):
        traffic = Traffic(extraction=self.RULE)
        for number in range(50):
            traffic.ask(prompt=words(number, 20), logprobs=True)
        assert traffic.begun() == [("extraction", "a" * 12)]

    def test_many_unlike_prompts_with_much_text(self):
        traffic = Traffic(extraction=self.RULE)
        for number in range(50):
            traffic.ask(prompt=words(number, 20), completion_tokens=100)
        assert traffic.begun() == [("extraction", "a" * 12)]

    def test_a_fixed_beginning_hides_nothing(self):
        traffic = Traffic(extraction=self.RULE)
        for number in range(70):
            traffic.ask(prompt=[*words("fixed", 300), *words(number, 5)], completion_tokens=100)
        assert traffic.begun() == [("extraction", "a" * 12)]

    def test_single_tokens_as_prompts_are_a_walk(self):
        traffic = Traffic(extraction=self.RULE)
        for number in range(60):
            traffic.ask(prompt=[number], logprobs=True)
        assert traffic.begun() == [("extraction", "a" * 12)]

    def test_the_same_prompts_again_are_none(self):
        traffic = Traffic(extraction=self.RULE)
        for number in range(500):
            traffic.ask(prompt=words(number % 40, 20), logprobs=True, completion_tokens=100)
        assert traffic.begun() == []

    def test_long_chats_are_none(self):
        traffic = Traffic(extraction=self.RULE)
        for chat in range(30):
            turns = words("instruction", 50)
            for turn in range(12):
                turns = [*turns, *words((chat, turn), 30)]
                traffic.ask(prompt=turns, completion_tokens=100)
        assert traffic.begun() == []

    def test_few_prompts_below_the_bounds_are_none(self):
        traffic = Traffic(extraction=self.RULE)
        for number in range(49):
            traffic.ask(prompt=words(number, 20), logprobs=True, completion_tokens=100)
        for number in range(200):
            traffic.ask("b" * 12, prompt=words(number, 20), completion_tokens=10)
        assert traffic.begun() == []

    def test_an_exempt_key_is_none(self):
        traffic = Traffic(extraction=self.RULE)
        for number in range(100):
            traffic.ask("e" * 12, prompt=words(number, 20), logprobs=True)
        assert traffic.begun() == []

    def test_a_slow_walk_is_none(self):
        traffic = Traffic(extraction=self.RULE)
        for number in range(200):
            traffic.ask(prompt=words(number, 20), logprobs=True)
            traffic.now += 100
        assert traffic.begun() == []


def steady(traffic, number, scale=1, seed=0, refused=0.0):
    draw = random.Random(seed)
    for _ in range(number):
        tokens = int(scale * draw.lognormvariate(4, 0.7))
        if draw.random() < refused:
            traffic.ask(status=400, filter_name="secrets")
        else:
            traffic.ask(prompt_tokens=tokens, completion_tokens=tokens // 2)


def test_other_lengths_than_at_first_are_drift():
    traffic = Traffic(drift={"num_requests": 200})
    steady(traffic, 400)
    assert traffic.begun() == []
    steady(traffic, 200, scale=3, seed=1)
    assert traffic.begun() == [("drift_prompts", "tiny"), ("drift_completions", "tiny")]


def test_another_share_of_refusals_is_drift():
    traffic = Traffic(drift={"num_requests": 200}, abuse={"on": False})
    steady(traffic, 420, refused=0.01)
    assert traffic.begun() == []
    steady(traffic, 250, seed=1, refused=0.3)
    assert traffic.begun() == [("drift_refusals", "server")]


def test_a_baseline_outlives_the_process(tmp_path):
    traffic = Traffic(drift={"num_requests": 200})
    steady(traffic, 200)
    traffic.watch.set_perplexity("tiny", 10.0, "d")
    write_baselines(tmp_path, traffic.watch.read_baselines())

    later = Traffic(read_baselines(tmp_path), drift={"num_requests": 200})
    steady(later, 200, scale=3)
    later.watch.set_perplexity("tiny", 10.3, "d")

    assert set(later.begun()) == {("drift_prompts", "tiny"), ("drift_completions", "tiny"), ("reference", "tiny")}


@pytest.mark.parametrize(("perplexity", "alerts"), [(10.1, 0), (9.9, 0), (10.21, 1), (9.7, 1), (float("nan"), 1)])
def test_the_perplexity_of_the_reference_texts(perplexity, alerts):
    traffic = Traffic(reference={"max_change": 0.02})
    traffic.watch.set_perplexity("tiny", 10.0, "d")
    traffic.watch.set_perplexity("tiny", perplexity, "d")

    assert len(traffic.begun()) == alerts


def test_other_reference_texts_are_a_new_baseline():
    traffic = Traffic()
    traffic.watch.set_perplexity("tiny", 10.0, "d")
    traffic.watch.set_perplexity("tiny", 50.0, "e")

    assert traffic.begun() == []


def test_a_malformed_baseline_is_refused(tmp_path):
    (tmp_path / "watch.json").write_text('{"models": {"tiny": {"perplexity": -1}}}')

    with pytest.raises(InputError, match=r"watch\.json"):
        read_baselines(tmp_path)


def test_every_rule_says_what_to_do():
    for rule, action in ACTIONS.items():
        assert action.endswith("."), rule
        assert len(action) > 40


def test_the_file_is_strict(tmp_path):
    file = tmp_path / "watch.toml"
    file.write_text('[alerts.extraction]\nmin_prompts = 10\nexempt_keys = ["k7x2mq3zt5ab"]\n')
    assert load_watch_config(file).alerts.extraction.min_prompts == 10
    for text in ("[alerts]\nwebhok = 'x'\n", "[alerts.errors]\nmax_share = 0\n", "[alerts.drift]\nnum_requests = 1\n"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            load_watch_config(file)


def test_a_server_calls_the_webhook_and_logs_the_alert(model_directory, tmp_path):
    access = tmp_path / "access"
    key, secret = add_key(access)
    secret_file = tmp_path / "hook"
    secret_file.write_text("hook-secret\n")
    secret_file.chmod(0o600)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "<|im_start|>secret-word"}]}
    with Collector(status=302) as hook:
        rules = {"check_every_s": 0.02, "webhook": f"{hook.url}/alert", "abuse": {"max_refused": 2}}
        config = WatchConfig.model_validate({"alerts": rules}, strict=False)
        config = config.model_copy(
            update={"alerts": config.alerts.model_copy(update={"webhook_secret_file": secret_file})}
        )
        make = watch_of(access, config)
        with (
            running_server([serve_model(model_directory)], access, make_watch=make) as (url, _),
            http_of(url, secret) as http,
        ):
            for _ in range(3):
                assert http.post(CHAT, json={**body, "callback_url": "http://evil"}).status_code == 400
                assert http.post(CHAT, json=body).status_code == 400
            path, headers, data = hook.bodies.get(timeout=120)
    alert = json.loads(data)
    assert (path, headers["authorization"]) == ("/alert", "Bearer hook-secret")
    assert (alert["rule"], alert["subject"], alert["state"]) == ("abuse", key, "begun")
    assert "phalanx incident quarantine" in alert["text"]
    assert b"secret-word" not in data
    log = (access / "log" / "requests-000001.jsonl").read_text()
    assert '"kind":"alert"' in log
    assert "secret-word" not in log


def test_a_server_that_marks_every_text_measures_perplexity(model_directory):
    mark = TokenMark(MarkPolicy(mark="required"), MarkKey(1, b"a" * 32))

    with EnginePool([serve_model(model_directory)], EngineSettings(), mark) as pool:
        assert asyncio.run(measure_models(pool, ["the man and the inn"])).keys() == {"tiny"}


def test_a_server_measures_perplexity_by_its_own_engine(model_directory, tmp_path):

    access = tmp_path / "access"
    operator = add_key(access, "ops", role="operator")[1]
    file = tmp_path / "texts.txt"
    file.write_text("the man and\u2028the inn\n\nan inn\n", encoding="utf-8")
    texts, digest = read_texts(file)
    assert texts == ["the man and\u2028the inn", "an inn"]
    measured = []

    def make(request_log, pool):
        async def measure():
            measured.append(await measure_models(pool, texts))
            return measured[-1]

        return watch_of(access, WatchConfig(), measure=measure, texts_digest=digest)(request_log, pool)

    with running_server([serve_model(model_directory)], access, make_watch=make) as (url, _):
        for _ in range(100_000):
            samples = read_samples(url, operator)
            if 'phalanx_reference_perplexity{model="tiny"}' in samples:
                break
        with http_of(url, operator) as http:
            scored = [
                http.post(
                    "/v1/completions",
                    json={"model": "tiny", "prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0},
                ).json()["choices"][0]["logprobs"]["token_logprobs"][1:]
                for text in texts
            ]
    logprobs = [value for scores in scored for value in scores]

    assert len(texts) == 2
    assert samples['phalanx_reference_perplexity{model="tiny"}'] == pytest.approx(
        math.exp(-sum(logprobs) / len(logprobs)), rel=1e-4
    )
