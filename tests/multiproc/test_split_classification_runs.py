"""A classification as users start it, on every carrier and after every kill, exported; masked workers in sandboxes."""

import gzip
import json

import pytest
from real_runs import TINY, descendant, exists
from safetensors.torch import load_file, save_file

from phalanx.cli.outcome import run_command
from phalanx.data.tasks import share_out
from phalanx.data.tasks.medquad import CLASSES, MEDQUAD
from phalanx.errors import CheckpointError, ConfigError, ModelError, VerificationError
from phalanx.serve import open_classifier
from phalanx.train import PastRun, export_run, verify_run_export

pytestmark = pytest.mark.slow
SPLIT = """
[model.adapter]
rank = 2

[split]
cut = 1
clients = 2
allow_insecure_sim = true

[checkpoint]
every = 3

[data]
labelled = {{ task = "medquad", home = "{home}", texts_per_client = 32, test_texts = 40 }}
"""
CONFINED = ("split.tier='process'", "split.allow_insecure_sim=false")


def write_texts(home):
    with gzip.open(home / "medquad.jsonl.gz", "wt", encoding="utf-8") as file:
        for number in range(480):
            kind = CLASSES[number % len(CLASSES)]
            text = f"{kind} {kind} {number}"
            file.write(json.dumps({"q": "", "a": text, "qtype": kind, "source": f"site-{number % 6}"}) + "\n")


def classifying_text(section, home):
    """The run file of a tiny scratch model that learns classes."""
    text = TINY[: TINY.index("[pipeline]")].replace("[data]", section.format(home=home))
    lines = [line for line in text.splitlines() if not line.startswith(("sources", "validation_share", "max_"))]
    return (
        "\n".join(lines).replace("[train]", '[train]\nobjective = "classification"').replace("steps = 8", "steps = 12")
    )


@pytest.fixture
def medical(place):
    write_texts(place.path)
    place.run_file.write_text(classifying_text(SPLIT, place.path))
    return place


def lines_of(place, run_dir):
    lines = [json.loads(line) for line in (place.path / run_dir / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "batch", "validation_accuracy", "validation_macro_f1")
    return [tuple(line.get(key) for key in keys) for line in lines]


FEDERATED = """
[model.adapter]
rank = 2

[federated]
sites = ["north", "south"]
local_steps = 2

[data]
labelled = {{ task = "medquad", home = "{home}", texts_per_client = 32, test_texts = 40 }}
"""


LLAMA = """model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 4
num_attention_heads = 4
max_position_embeddings = 16
tie_word_embeddings = false

"""


def accuracy_of(model, run, parties):
    """The share of held-out texts that an exported classifier puts into their class."""
    labelled = run.data.labelled
    sizes = (len(parties), labelled.texts_per_client, labelled.test_texts, labelled.alpha, run.train.seed)
    texts = share_out(MEDQUAD.load(labelled.home), *sizes).test
    results = model.classify_texts([example.text for example in texts])
    return sum(result.label == CLASSES[example.label] for result, example in zip(results, texts, strict=True)) / 40


def or_skip(place, process):
    if process.wait() != 0 and "isolation" in process.text:
        pytest.skip(process.text.strip().splitlines()[-1])
    assert process.wait() == 0, process.text


def test_a_classification_beats_the_largest_class_in_all_records_and_is_the_same_bits_in_plaintext(medical):
    sealed = medical.finish(run_dir="run")
    plain = medical.finish(
        "split.mode='plaintext'", "split.insecure=true", "split.allow_insecure_sim=false", run_dir="plain"
    )

    found = sealed["classification"]
    assert found["accuracy"] > 2 * found["majority_accuracy"] > 0
    assert found["macro_f1"] > found["macro_f1_first"]
    assert (found["classes"], found["test_texts"], found["task"]) == (8, 40, "medquad")
    assert sealed["final_weights_digest"] == plain["final_weights_digest"]
    assert lines_of(medical, "run") == lines_of(medical, "plain")
    assert sealed["validation_perplexity"] is None
    text = medical.processes[0].text
    assert "validation accuracy" in text and "NOT SECURE" in text
    assert "Accuracy" in (medical.path / "run" / "report.html").read_text()


def test_whoever_is_killed_a_classification_goes_on_with_the_same_bits(medical):
    clean = medical.finish(run_dir="clean")
    process = medical.train()
    medical.wait_for(process, lambda: medical.has_line("metrics.jsonl", '"step": 4,'))
    enclave = descendant(process, "enclave local")
    process.kill()
    medical.wait_until(lambda: not exists(enclave))

    summary = medical.finish(resume=True)

    assert summary["resumed_from"] >= 3
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert summary["classification"] == clean["classification"]
    assert lines_of(medical, "run") == lines_of(medical, "clean")


def test_what_an_enclave_lets_out_classifies_held_out_texts_as_the_run_did(medical, tmp_path):
    released = "split.release={min_clients=2, clip_norm=100.0}"
    summary = medical.finish(released)
    past = PastRun(medical.path / "run")

    found = accuracy_of(open_classifier(past.path), past.config, past.config.split.client_names)
    assert found == summary["classification"]["accuracy"]
    export_run(past, tmp_path / "peft")
    assert verify_run_export(past, tmp_path / "peft") == summary["final_weights_digest"]

    adapters = past.path / "adapters.safetensors"
    tensors = load_file(adapters)
    tensors["lm_head.bias"][0] += 1
    save_file(tensors, adapters)
    with pytest.raises(CheckpointError, match="left the enclave; restore the file"):
        export_run(past, tmp_path / "altered")
    with pytest.raises(ConfigError, match="checkpoints are sealed"):
        export_run(past, tmp_path / "step", step=3)


def test_a_split_that_let_nothing_out_is_not_exported(medical, tmp_path):
    medical.finish("train.steps=2")

    with pytest.raises(CheckpointError, match=r"adapters\.safetensors: missing: adapters leave the enclave at the end"):
        export_run(PastRun(medical.path / "run"), tmp_path / "out")


@pytest.mark.parametrize("adapter", [True, False])
def test_a_federated_classifier_classifies_held_out_texts_as_the_run_did(place, tmp_path, adapter):
    write_texts(place.path)
    section = FEDERATED if adapter else FEDERATED.replace("[model.adapter]\nrank = 2\n", "")
    place.run_file.write_text(classifying_text(section, place.path))
    summary = place.finish()
    past = PastRun(place.path / "run")

    model = open_classifier(past.path)
    assert accuracy_of(model, past.config, past.config.federated.sites) == summary["classification"]["accuracy"]
    out = tmp_path / "out"
    export_run(past, out)
    assert verify_run_export(past, out) == summary["final_weights_digest"]
    assert run_command(["passport", str(past.path), "--out", str(tmp_path / "one.passport")]) == 7
    assert run_command(["verify", str(tmp_path / "one.passport"), "--model", str(out)]) == 7
    if adapter:
        with pytest.raises(ModelError, match="is an adapter without its model"):
            open_classifier(out)
        return
    config = (out / "config.json").read_text()
    (out / "config.json").write_text(config.replace(CLASSES[0], "changed"))
    with pytest.raises(VerificationError, match="id2label"):
        verify_run_export(past, out)
    (out / "config.json").write_text(config)
    tensors = load_file(out / "model.safetensors")
    tensors["classifier.weight"][0] += 1
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(VerificationError, match="they were changed"):
        verify_run_export(past, out)


def test_a_classifier_whose_run_has_not_ended_has_a_passport(place, tmp_path):
    write_texts(place.path)
    text = classifying_text(FEDERATED.replace("[model.adapter]\nrank = 2\n", ""), place.path)
    begin, end = text.index('model_type = "gpt2"'), text.index("[federated]")
    place.run_file.write_text(text[:begin] + LLAMA + text[end:])
    process = place.train("train.steps=2000", "checkpoint.every=2")
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 6,'))
    process.kill()

    assert run_command(["passport", str(place.path / "run"), "--out", str(tmp_path / "one.passport")]) == 7


@pytest.mark.parametrize("second", ["false", "true"])
def test_masked_workers_behind_sandboxes_compute_what_they_do_elsewhere(medical, second):
    masked = ("split.mode='masked'", f"split.masked={{second_worker={second}}}", "train.steps=3")
    process = medical.train(*masked, *CONFINED, run_dir="confined")
    or_skip(medical, process)
    elsewhere = medical.finish(*masked, run_dir="run")

    confined = medical.summary("confined")
    assert confined["final_weights_digest"] == elsewhere["final_weights_digest"]
    assert confined["world"]["processes"] == (4 if second == "true" else 3)
    assert confined["split"]["tier"] == "process"


def test_the_best_tier_is_taken_and_said_and_kept_in_the_config(medical):
    process = medical.train("split.tier='auto'", "train.steps=2")
    assert process.wait() == 0, process.text

    summary = medical.summary()

    assert summary["split"]["tier"] in ("process", "sim")
    assert f'tier = "{summary["split"]["tier"]}"' in (medical.path / "run" / "config.toml").read_text()
    assert summary["split"]["worth"].split(":")[0] == summary["split"]["tier"]
    assert medical.train("split.tier='auto'", "train.steps=2", resume=True).wait() == 0
