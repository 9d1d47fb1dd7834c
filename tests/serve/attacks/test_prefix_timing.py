"""Whether the time of an answer tells one owner of keys what another one has asked: two keys, two thousand pairs."""

import math
import random
import time

import numpy as np
import pytest
from running_gateway import WIDE, RunningGateway
from timed_engine import TimedEngine

from access_keys import make_access
from phalanx.serve.engine import EngineSettings
from tiny_served import add_key, running_server, serve_model, write_model

LETTERS = "abcdefghijklmnopqrstuvwxyz "
ROUNDS = 3
"""Of a difference at p < .01 in each of so many rounds, one in a million is chance."""


def p_value(differences: list[float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test, by its normal approximation."""
    values = np.array(differences)
    ranks = np.abs(values).argsort().argsort() + 1.0
    n = len(values)
    z = (ranks[values > 0].sum() - n * (n + 1) / 4) / math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    return math.erfc(abs(z) / math.sqrt(2))


def test_the_statistic_finds_a_shift_and_nothing_in_noise():
    rng = np.random.default_rng(1)

    assert p_value(list(rng.normal(0.2, 1, 2000))) < 1e-6
    assert sum(p_value(list(rng.normal(0, 1, 200))) < 0.01 for _ in range(1000)) < 30


def time_pairs(ask_victim, ask_attacker, count: int, seed: int) -> list[float]:
    """Return seconds of an answer to what the victim has just asked, less those to another prompt of its length."""
    rng = random.Random(seed)
    differences = []
    for _ in range(count):
        prompts = ["".join(rng.choices(LETTERS, k=420)).strip() or "a" for _ in range(2)]
        ask_victim(prompts[0])
        spent = {}
        for prompt in rng.sample(prompts, 2):
            start = time.perf_counter()
            ask_attacker(prompt)
            spent[prompt] = time.perf_counter() - start
        differences.append(spent[prompts[0]] - spent[prompts[1]])
    return differences


def find_difference(ask_victim, ask_attacker, count: int) -> list[float]:
    """Return the p-values of rounds, until one shows nothing."""
    values = []
    for seed in range(ROUNDS):
        values.append(p_value(time_pairs(ask_victim, ask_attacker, count, seed)))
        if values[-1] >= 0.01:
            break
    return values


def sees_difference(ask_victim, ask_attacker) -> bool:
    """Whether one of some rounds shows what would be chance once in two thousand runs; other work only adds noise."""
    return any(p_value(time_pairs(ask_victim, ask_attacker, 100, seed)) < 1e-4 for seed in range(5))


def make_asker(client, model: str):
    def ask(prompt: str, **fields):
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]

    return ask


@pytest.fixture(scope="module")
def own_askers(tmp_path_factory):
    import httpx2

    folder = tmp_path_factory.mktemp("timing")
    keys = {
        name: add_key(folder / "access", owner)[1]
        for name, owner in (("victim", "alice"), ("same owner", "alice"), ("other owner", "bob"))
    }
    model = write_model(folder / "models", hidden_size=64, intermediate_size=256, num_hidden_layers=4)
    settings = EngineSettings(max_cache_tokens=1 << 14)
    with running_server([serve_model(model)], folder / "access", engine=settings) as (url, _):
        clients = {
            name: httpx2.Client(base_url=url, headers={"x-api-key": secret}, trust_env=False, timeout=250)
            for name, secret in keys.items()
        }
        yield {name: make_asker(client, "tiny") for name, client in clients.items()}
        for client in clients.values():
            client.close()


def test_of_prompts_the_same_owner_reuses_what_it_has_asked_and_another_owner_nothing(own_askers):
    rng = random.Random(5)
    for _ in range(20):
        prompt = "".join(rng.choices(LETTERS, k=420))
        own_askers["victim"](prompt)
        assert own_askers["same owner"](prompt)["prompt_tokens_details"]["cached_tokens"] > 64
        fresh = "".join(rng.choices(LETTERS, k=420))
        own_askers["victim"](fresh)
        assert own_askers["other owner"](fresh)["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("fields", [{"cache_salt": "b"}, {"cache_prompt": False}, {}])
def test_clients_of_a_gateway_that_has_one_key_here_reuse_no_prompt_of_each_other(own_askers, fields):
    prompt = "".join(random.Random(repr(fields)).choices(LETTERS, k=420))
    asked = [own_askers["victim"](prompt, cache_salt="a") for _ in range(2)]

    other = own_askers["victim"](prompt, **fields)

    counts = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (*asked, other)]
    assert [count > 64 for count in counts] == [False, True, False]


@pytest.mark.slow
def test_an_attacker_with_a_key_of_the_same_owner_sees_the_reuse_by_the_clock(own_askers):
    """The measure works: where reuse is allowed, the clock tells."""
    assert sees_difference(own_askers["victim"], own_askers["same owner"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_clock_tells_another_owner_what_was_asked_in_two_thousand_pairs(own_askers, note_attack):
    values = find_difference(own_askers["victim"], own_askers["other owner"], 2000)

    note_attack("prefix timing", target="own", pairs=2000, p_values=values)

    assert values[-1] >= 0.01, values


@pytest.fixture(scope="module")
def gateway_askers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timing")
    keys = make_access(folder / "access")
    secrets = [keys.make(owner, limits=WIDE)[1] for owner in ("alice", "bob")]
    with TimedEngine() as engine:
        backend = {"url": engine.url, "local": True}
        names = ("salted", "off", "shared")
        engines = [{**backend, "name": name, "models": {name: "inner"}, "prefix_cache": name} for name in names]
        gateway = RunningGateway(folder, keys, {"backends": engines, "health_every_s": 3600})
        clients = [gateway.client(secret) for secret in secrets]
        yield {name: [make_asker(client, name) for client in clients] for name in names}
        for client in clients:
            client.close()
        assert gateway.stop() == 0


@pytest.mark.slow
def test_before_an_engine_with_one_cache_for_all_the_clock_tells_and_salted_or_off_it_does_not(gateway_askers):
    assert sees_difference(*gateway_askers["shared"])
    for name in ("salted", "off"):
        assert find_difference(*gateway_askers[name], 60)[-1] >= 0.01


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["salted", "off"])
def test_no_clock_tells_through_a_gateway_in_two_thousand_pairs(gateway_askers, note_attack, name):
    values = find_difference(*gateway_askers[name], 2000)

    note_attack("prefix timing", target=f"gateway, {name}", pairs=2000, p_values=values)

    assert values[-1] >= 0.01, values
