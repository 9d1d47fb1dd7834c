"""A run with code of the user's own: it is in the config, the log and the directory, and does not change in between."""

import json

import pytest

from phalanx.cli import run_command as command_line
from phalanx.errors import ConfigError, TrainingError
from phalanx.models import FAMILIES
from phalanx.models.families import ADOPTED
from phalanx.pipeline.worker.worker_file import load_worker
from phalanx.planner.model.families import FAMILIES as FACTS
from phalanx.train import load_run
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions import hooks

CODE = """
from phalanx.objectives import causal_lm_loss


class Numbers:
    def __init__(self, count):
        self.count = count

    def fingerprint(self):
        return "numbers"

    def documents(self):
        for first in range(self.count):
            yield " ".join(str(first * second) for second in range(60))


def half(logits, labels):
    loss, targets = causal_lm_loss(logits, labels)
    return loss / 2, targets
"""


@pytest.fixture
def own_run(run_file):
    """Reads the run file with a source and an objective of its own."""
    run_file.with_name("mine.py").write_text(CODE)
    overrides = ['data.sources=[{kind="mine.py:Numbers",options={count=40}}]', 'train.objective="mine.py:half"']
    return lambda *more: load_run(run_file, [*overrides, *more])


def test_a_run_is_trained_on_it_and_says_so_in_config_log_and_directory(own_run, quietly, tmp_path, run_file):
    summary = quietly(own_run("train.steps=2"), tmp_path / "run")

    usual = quietly(own_run("train.steps=2", 'train.objective="causal_lm"'), tmp_path / "usual")
    assert summary["loss_first"] == pytest.approx(usual["loss_first"] / 2, rel=1e-6)
    references = own_run().own_code
    assert [one.partition("@")[0] for one in references] == ["mine.py:Numbers", "mine.py:half"]
    assert load_run(tmp_path / "run" / "config.toml").own_code == references
    opening = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert (opening["kind"], opening["body"]["own_code"]) == ("run_started", references)
    (kept,) = (tmp_path / "run" / "code").iterdir()
    assert (kept.stem, kept.read_text()) == (references[0].partition("@")[2], CODE)


def test_a_resumed_run_has_the_code_that_it_began_with(own_run, quietly, tmp_path, run_file, monkeypatch):
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == 3:
            raise KeyboardInterrupt
        save(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        assert quietly(own_run(), tmp_path / "run")["status"] == "interrupted"
    run_file.with_name("mine.py").write_text(CODE.replace("/ 2", "/ 3"))

    with pytest.raises(ConfigError, match=r"mine\.py has changed: found SHA-256 .*, expected .*; restore it .*--from"):
        quietly(own_run(), tmp_path / "run", resume=True)

    # the resolved run file names the code by digest, and its directory has a copy
    summary = quietly(load_run(tmp_path / "run" / "config.toml"), tmp_path / "run", resume=True)
    assert (summary["status"], summary["steps"], summary["resumed_from"]) == ("completed", 6, 2)


def test_a_run_file_that_pins_its_code_refuses_any_other(own_run, quietly, tmp_path):
    pinned = own_run().train.objective
    other = f"{pinned.partition('@')[0]}@{'0' * 64}"

    with pytest.raises(ConfigError, match=r"mine\.py: found SHA-256 .*, expected 0{12}\.\.\.; put the"):
        quietly(own_run(f'train.objective="{other}"'), tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_an_objective_that_fails_ends_the_run_with_the_users_lines(own_run, quietly, tmp_path, run_file):
    run_file.with_name("mine.py").write_text(CODE.replace("return loss / 2", "return loss / nothing"))

    with pytest.raises(TrainingError, match=r"(?s)objective, mine\.py:half: failed:.*line 19, in half.*NameError"):
        quietly(own_run(), tmp_path / "run")

    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_resume_that_cannot_read_what_is_there_says_no_more_than_that(make_run, tmp_path):
    RunDirectory(tmp_path / "run", make_run(), resume=False).close()
    (tmp_path / "run" / "config.toml").write_text("[broken")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n')

    with pytest.raises(ConfigError, match="holds another run"):
        RunDirectory(tmp_path / "run", make_run("train.steps=9"), resume=True)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("parallel={dp=2}", None),
        ("deepspeed={}", r"\[deepspeed\] excludes train\.objective"),
    ],
)
def test_engines_that_cannot_learn_it_refuse_it_by_name(run_file, section, said):
    run_file.with_name("mine.py").write_text(CODE)
    settings = ["pipeline-", "checkpoint-", "parallel={dp=2}", section, 'train.objective="mine.py:half"']

    if said is None:
        assert load_run(run_file, settings).train.objective.startswith("mine.py:half@")
        return
    with pytest.raises(ConfigError, match=said):
        load_run(run_file, settings)


SINK = """
import json


class Notes:
    def __init__(self, path):
        self.path = path

    def begin(self, run):
        self.said = [run.config["train.steps"]]

    def scalars(self, values, step):
        self.said.append([step, sorted(values)])

    def end(self, status):
        with open(self.path, "w") as file:
            json.dump([*self.said, status], file)
"""


def test_a_metrics_sink_hears_of_a_run_and_changes_no_bit_of_it(run_file, quietly, tmp_path, trained_once):
    run_file.with_name("mine.py").write_text(SINK)
    heard = tmp_path / "heard.json"
    section = f'tracking=[{{kind="mine.py:Notes",options={{path="{heard}"}}}}]'

    summary = quietly(load_run(run_file, [section]), tmp_path / "run")

    assert summary["tracking"] == [{"kind": "mine.py:Notes", "taken": 9, "dropped": 0, "error": None}]
    assert summary["final_weights_digest"] == trained_once[0]["final_weights_digest"]
    assert "tracking" not in trained_once[0]
    steps, *points, status = json.loads(heard.read_text())
    assert (steps, status) == (6, "completed")
    assert [step for step, names in points if "train/loss" in names] == [0, 1, 2, 3, 4, 5]
    assert [step for step, names in points if "validation/perplexity" in names] == [0, 3, 6]
    assert (tmp_path / "run" / "tracking" / "0-own" / "sink.log").exists()


FAMILY = """
from phalanx.planner.model.families import SlicingRule
from phalanx.planner.model.families.planned import PlannedFamily

cwm = PlannedFamily(SlicingRule(windows="layers"), defaults={"head_dim": 128})
"""
CWM = (
    '{model_type="cwm",hidden_size=16,intermediate_size=24,num_hidden_layers=4,num_attention_heads=4,head_dim=4,'
    "num_key_value_heads=2,vocab_size=300,max_position_embeddings=32,sliding_window=4,bos_token_id=0,eos_token_id=0,"
    "tie_word_embeddings=false}"
)


@pytest.fixture
def cwm(run_file):
    """Reads a run file of a model of no family of the package."""
    run_file.with_name("mine.py").write_text(FAMILY)
    overrides = [f"model={{from_scratch=true,family='mine.py:cwm',architecture={CWM}}}", "train.steps=2"]
    yield lambda *more: load_run(run_file, [*overrides, *more])
    for name in ADOPTED:
        del FAMILIES[name], FACTS[name]
    ADOPTED.clear()


def test_workers_of_this_machine_run_a_family_of_the_users_own_under_the_guard(cwm, quietly, tmp_path):
    guard = ["guard.audit_rate=1.0", "guard.owner_audit_rate=0.0", "pipeline.spares=1"]
    summary = quietly(cwm("pipeline.stages=3", *guard), tmp_path / "run")

    alone = quietly(cwm(), tmp_path / "alone")
    assert (summary["status"], summary["evicted"]) == ("completed", [])
    assert summary["audits"] > 0
    assert summary["final_weights_digest"] == alone["final_weights_digest"]
    worker = load_worker(tmp_path / "run" / "workers" / "worker-1.toml")
    assert ([one.kind for one in worker.code], worker.code_home) == (cwm().own_code, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp=2"])
def test_trusted_ranks_run_a_family_of_the_users_own(cwm, quietly, run_file, tmp_path, layout):
    # by matrices only where the family says so
    shared = FAMILY.replace("PlannedFamily(", 'PlannedFamily(shared_axes=frozenset({"tp"}), slicing=')
    run_file.with_name("mine.py").write_text(shared)
    alone = quietly(cwm("pipeline-"), tmp_path / "alone")

    summary = quietly(cwm("pipeline-", f"parallel={{{layout}}}"), tmp_path / "run")

    assert summary["loss_last"] == pytest.approx(alone["loss_last"], rel=1e-6)


SITES = ["{simulated=2}", pytest.param("{sites=['site-1','site-2']}", marks=pytest.mark.slow)]


@pytest.mark.parametrize("sites", SITES)
def test_sites_learn_an_objective_of_the_users_own(own_run, quietly, tmp_path, sites):
    of_sites = ("pipeline-", "train.steps=2", f"federated={sites}")

    summary = quietly(own_run(*of_sites), tmp_path / "run")

    usual = quietly(own_run(*of_sites, 'train.objective="causal_lm"'), tmp_path / "usual")
    assert summary["loss_first"] == pytest.approx(usual["loss_first"] / 2, rel=1e-6)
    assert summary["final_weights_digest"] != usual["final_weights_digest"]


@pytest.mark.parametrize("sites", SITES)
def test_sites_train_a_family_of_the_users_own(cwm, quietly, tmp_path, sites):
    summary = quietly(cwm("pipeline-", f"federated={sites}"), tmp_path / "run")

    assert summary["status"] == "completed" and summary["loss_last"] < summary["loss_first"]


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_layout_that_an_own_family_does_not_name_is_refused_by_name(cwm, quietly, tmp_path, axis):
    run = cwm("pipeline-", f"parallel={{{axis}=2}}")

    with pytest.raises(ConfigError, match=f"{axis}=2: ranks cannot share a block of cwm yet; set {axis} to 1"):
        quietly(run, tmp_path / "run")


def test_a_family_for_another_model_is_refused(cwm, quietly, tmp_path):
    run = cwm("model.architecture.model_type='llama'")

    with pytest.raises(ConfigError, match=r"model\.family supports model_type 'cwm', but the model has 'llama'"):
        quietly(run, tmp_path / "run")


def test_an_export_runs_the_runs_own_code_only_when_it_is_told_to(cwm, quietly, tmp_path):
    quietly(cwm(), tmp_path / "run")
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out")]

    assert command_line(command) == 2
    assert not (tmp_path / "out").exists()
    assert command_line([*command, "--own-code"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "cwm"
