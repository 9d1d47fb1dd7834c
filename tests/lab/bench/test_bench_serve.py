"""The bench of serving: arms write what they are told to, ratios compare like with like, real servers are loaded."""

import io
import json

import pytest

from phalanx.errors import ConfigError
from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.serving import service_load
from phalanx.lab.bench.serving.serve import QUICK, ServePlan, make_ratios, make_row
from phalanx.lab.bench.serving.text_arms import LoadReport, TextArmSpec, make_prompts, serve_arm
from phalanx.models import parse_hub_config
from phalanx.models.source import write_random_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = {
        "model_type": "llama",
        "vocab_size": 20_000,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
    }
    return write_random_model(parse_hub_config(config, "tiny"), 1, tmp_path_factory.mktemp("models"), None)


def say_orders(directory, arm, *orders, precision="float32"):
    sizes = {"max_streams": 4, "prompt_tokens": 5, "new_tokens": 6}
    spec = TextArmSpec(arm=arm, precision=precision, model=str(directory), gguf="", **sizes)
    answers = io.StringIO()
    serve_arm(spec, [json.dumps(order) for order in orders], answers)
    return [LoadReport.model_validate_json(line) for line in answers.getvalue().splitlines()]


def test_an_order_that_is_none_is_refused(directory):
    with pytest.raises(ConfigError, match="LoadOrder"):
        say_orders(directory, "transformers", {"streams": 3})


def test_prompts_of_a_turn_begin_differently_and_those_of_other_turns_too():
    firsts = [tuple(prompt[:4]) for turn in (1, 2) for prompt in make_prompts(8, 64, turn)]

    assert len(set(firsts)) == 16
    assert make_prompts(8, 64, 1) == make_prompts(8, 64, 1)


def test_a_row_counts_by_wall_and_processor_and_takes_medians():
    report = LoadReport(tokens=30, wall_s=3.0, cpu_s=2.0, first_s=(0.1, 0.2, 0.9), token_s=(0.01, 0.03, 0.02))

    row = make_row("phalanx", 3, 0, report)

    assert (row["tokens_per_s"], row["tokens_per_cpu_s"]) == (10.0, 15.0)
    assert (row["first_ms"], row["token_ms"]) == (200.0, 20.0)


def test_the_ratio_is_to_the_fastest_peer_at_the_same_number_of_streams():
    rates = {"phalanx": (80.0, 90.0, 10.0), "transformers": (20.0, 20.0, 20.0), "llama.cpp": (100.0, 101.0, 99.0)}
    rows = [
        {"arm": arm, "precision": "float32", "streams": 8, "turn": turn, "tokens_per_s": 1.0, "tokens_per_cpu_s": rate}
        for arm, turns in rates.items()
        for turn, rate in enumerate(turns)
    ]
    # 8 bits are compared with 8 bits alone
    others = [row | {"precision": "8 bits", "tokens_per_cpu_s": 1e3} for row in rows if row["arm"] != "transformers"]

    by_cpu, by_wall, coarse, _ = make_ratios([*rows, *others])

    assert (by_cpu["streams"], by_cpu["unit"], by_wall["unit"]) == (8, "tokens_per_cpu_s", "tokens_per_s")
    assert (by_cpu["best_peer"], by_cpu["llama.cpp"], by_cpu["transformers"]) == (0.8, 0.8, 4.0)
    assert by_wall["best_peer"] == 1.0
    assert (coarse["precision"], coarse["best_peer"]) == ("8 bits", 1.0)


def test_the_bench_has_a_short_form_and_asks_at_the_numbers_of_the_claim():
    assert "serve" in BENCHES
    assert {1, 8, 32} == set(ServePlan().streams) and ServePlan().crowd == 1000
    assert QUICK.kills >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "precision"), [("phalanx", "float32"), ("phalanx", "8 bits"), ("transformers", "float32")]
)
def test_an_arm_writes_all_tokens_of_all_streams(directory, arm, precision, tmp_path):
    tokenizer_files = pytest.importorskip("tiny_served")
    model = tokenizer_files.write_model(tmp_path, vocab_size=20_000)

    ready, report, again = say_orders(
        model, arm, {"streams": 3, "turn": 1}, {"streams": 1, "turn": 2}, precision=precision
    )

    assert ready.version
    assert (report.tokens, again.tokens) == (18, 6)
    assert len(report.first_s) == len(report.token_s) == 3
    assert 0 < report.first_s[0] < report.wall_s and report.cpu_s > 0


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return pytest.importorskip("tiny_served").write_model(tmp_path_factory.mktemp("chat"))


@pytest.mark.slow
def test_no_count_is_lost_by_kills_and_a_crowd_is_answered_whole(chat_model, tmp_path):
    kills = service_load.measure_kills(chat_model, tmp_path, 2)

    assert (kills["lost_requests"], kills["lost_tokens"]) == (0, 0)
    assert kills["received_tokens"] >= 8
    # the first crash cut answers off, or nothing was shown
    assert kills["whole_answers"] < kills["answered_requests"]
    for row in service_load.measure_crowd(chat_model, tmp_path, 12):
        assert row["whole"] == 12


@pytest.mark.slow
def test_the_gateways_cost_is_measured_before_the_stub_and_before_the_engine(chat_model, tmp_path):
    latency = service_load.measure_added_latency(30, tmp_path)
    share = service_load.measure_gateway_share(chat_model, tmp_path, 1, 2)

    assert latency["direct_p50_ms"] < latency["gateway_p50_ms"]
    assert latency["gateway_cpu_ms"] > 0
    assert share["cpu_share"] > 0 and share["lost_share"] < 1
