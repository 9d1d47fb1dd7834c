"""Split runs as users start them: the enclave is a process of its own, and any party may be killed at any moment."""

import json
import os
import signal

import pytest
from real_runs import TINY, descendant, events, exists

from phalanx.config.extras import has_bitsandbytes

pytestmark = pytest.mark.slow
NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")
SPLIT = """
[model.adapter]
rank = 2

[split]
cut = 2
clients = 2
allow_insecure_sim = true
reattest_every = 3

[split.release]
min_clients = 2
clip_norm = 100.0

[checkpoint]
every = 3
"""
PLAINTEXT = ("split.mode='plaintext'", "split.insecure=true", "split.allow_insecure_sim=false")


@pytest.fixture
def split(place):
    """A place with a run file that has a split in the place of a pipeline."""
    text = TINY[: TINY.index("[pipeline]")].replace("[data]", f"{SPLIT}\n[data]")
    place.run_file.write_text(text)
    return place


def lines_of(place, run_dir):
    lines = [json.loads(line) for line in (place.path / run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line["batch"]) for line in lines]


def test_a_sealed_run_has_the_losses_and_weights_of_a_plaintext_one_and_says_what_it_is_worth(split):
    sealed = split.finish(run_dir="run")
    plain = split.finish(*PLAINTEXT, run_dir="plain")

    assert lines_of(split, "run") == lines_of(split, "plain")
    assert sealed["final_weights_digest"] == plain["final_weights_digest"]
    assert sealed["validation_perplexity"] == plain["validation_perplexity"] < sealed["validation_perplexity_first"]
    assert (sealed["guard"], plain["guard"]) == ("sealed", "plaintext")
    assert "NOT SECURE" in sealed["split"]["worth"] and "NOT SECURE" in split.processes[0].text
    assert "NOT SECURE" in (split.path / "run" / "report.html").read_text()
    assert sealed["split"]["released"] is True
    assert (split.path / "run" / "adapters.safetensors").stat().st_mode & 0o077 == 0
    statements = json.loads((split.path / "run" / "transcript.json").read_text())
    assert set(statements) == {"owner", "client-0", "client-1"}
    assert not (split.path / "plain" / "transcript.json").exists()
    kinds = [kind for kind, _ in events(split, "enclave_appraised", "released", "run_completed")]
    assert kinds == ["enclave_appraised"] * 3 + ["released", "run_completed"]


@pytest.mark.parametrize("victim", ["enclave", "everybody"])
def test_whoever_is_killed_the_run_goes_on_from_the_last_kept_step_with_the_same_bits(split, victim):
    clean = split.finish("train.steps=40", run_dir="clean")
    process = split.train("train.steps=40")
    split.wait_for(process, lambda: split.has_line("metrics.jsonl", '"step": 4,'))
    enclave = descendant(process, "enclave local")

    if victim == "enclave":
        os.kill(enclave, signal.SIGKILL)
        assert process.wait() == 4, process.text
        assert "the enclave ended with signal 9" in process.text
    else:
        process.kill()
        split.wait_until(lambda: not exists(enclave))
    summary = split.finish("train.steps=40", resume=True)

    assert summary["resumed_from"] % 3 == 0 and summary["resumed_from"] >= 3
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert lines_of(split, "run") == lines_of(split, "clean")


def test_a_checkpoint_that_was_put_back_is_refused(split):
    process = split.train("train.steps=40", "checkpoint.keep=9")
    split.wait_for(process, lambda: split.has_line("events.jsonl", '"step":9', after='"checkpoint_saved"'))
    process.kill()
    directory = split.path / "run" / "checkpoints"
    newest = sorted(directory.iterdir())[-1]
    newest.rename(split.path / "hidden")

    process = split.train("train.steps=40", "checkpoint.keep=9", resume=True)

    assert process.wait() in (3, 5), process.text


def test_a_measurement_that_is_revoked_stops_a_run_within_a_step(split):
    from phalanx.split.hardware.measure import measure_code

    code, policy = measure_code().hex(), split.path / "policy.toml"
    text = f'allow_insecure_sim = true\nrevoked_measurements = []\n[sim]\nmeasurements.code = ["{code}"]\n'
    policy.write_text(text)
    process = split.train(f"split.policy='{policy}'", "train.steps=4000")
    split.wait_for(process, lambda: split.has_line("metrics.jsonl", '"step": 2,'))

    policy.write_text(text.replace("[]", f'["{code}"]', 1))
    at_most = len(lines_of(split, "run")) + 2

    assert process.wait() == 5, process.text
    assert "revoked" in process.text
    assert len(lines_of(split, "run")) <= at_most
    assert split.summary()["status"] == "failed"


def test_a_dry_run_shows_both_parts_and_starts_nothing(split):
    process = split.start("train", str(split.run_file), "--dry-run", "--run-dir", str(split.path / "run"))

    assert process.wait() == 0, process.text
    assert "sealed split, 2 clients" in process.text and "NOT SECURE" in process.text
    assert not (split.path / "run").exists()


def test_what_cannot_work_is_said_before_anything_is_started(split):
    process = split.train("split.cut=4")

    assert process.wait() == 2
    assert "split.cut = 4" in process.text
    assert not (split.path / "run" / "workers").exists()


def test_an_enclave_behind_a_sandbox_computes_the_same_and_is_ended_with_its_run(split):
    confined = ("split.tier='process'", "split.allow_insecure_sim=false")
    process = split.train(*confined, run_dir="confined")
    if process.wait() != 0 and "isolation" in process.text:
        pytest.skip(process.text.strip().splitlines()[-1])
    sealed = split.finish(run_dir="run")

    summary = split.summary("confined")
    assert process.wait() == 0, process.text
    assert summary["final_weights_digest"] == sealed["final_weights_digest"]
    assert "not secret from root" in summary["split"]["worth"]
    assert lines_of(split, "confined") == lines_of(split, "run")


@pytest.mark.parametrize(
    "few_bits", ["train.precision=bf16", pytest.param("model.adapter.quantize=nf4", marks=NEEDS_QUANT)]
)
def test_parts_in_few_bits_compute_the_same_in_the_clear_sealed_and_behind_a_sandbox(split, few_bits):
    confined = ("split.tier='process'", "split.allow_insecure_sim=false", few_bits)
    process = split.train(*confined, run_dir="confined")
    sealed = split.finish(few_bits, run_dir="run")
    plain = split.finish(*PLAINTEXT, few_bits, run_dir="plain")
    whole = split.finish(run_dir="whole")

    assert lines_of(split, "run") == lines_of(split, "plain") != lines_of(split, "whole")
    assert sealed["final_weights_digest"] == plain["final_weights_digest"] != whole["final_weights_digest"]
    if process.wait() != 0 and "isolation" in process.text:
        pytest.skip(process.text.strip().splitlines()[-1])
    assert process.wait() == 0, process.text
    assert lines_of(split, "confined") == lines_of(split, "run")


@pytest.mark.parametrize("second", ["false", "true"])
def test_a_masked_run_trains_with_its_workers_in_processes_of_their_own(split, second):
    sealed = split.finish(run_dir="sealed")
    masked = split.finish("split.mode='masked'", f"split.masked={{second_worker={second}}}", run_dir="masked")

    assert masked["guard"] == "masked"
    assert masked["world"]["processes"] == (4 if second == "true" else 3)
    assert masked["loss_last"] == pytest.approx(sealed["loss_last"], rel=1e-2)


def test_a_split_that_ends_early_measures_further_sets_and_releases_what_it_has_then(split):
    (split.path / "plain.txt").write_text("The argument is evaluated and the result is returned. " * 60)
    rules = (
        "train.validate_every=1",
        "train.early_stopping={patience=2,min_improvement=9.0,on='plain'}",
        f'data.validation=[{{name="plain",sources=[{{kind="text",path="{split.path}/plain.txt"}}]}}]',
    )

    summary = split.finish(*rules)

    assert (summary["status"], summary["steps"], summary["stopped_early"]["on"]) == ("completed", 3, "plain")
    assert summary["validation_sets"]["plain"]["perplexity"] > 1
    # the adapters are packed for the step that the enclave is at
    assert summary["split"]["released"] is True
    assert [kind for kind, _ in events(split, "stopped_early", "run_completed")] == ["stopped_early", "run_completed"]
