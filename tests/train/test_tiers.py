"""The tier "auto": the best that there is, never a simulation that was not allowed."""

import pytest

from phalanx.errors import ConfigError
from phalanx.train import entry, load_run
from phalanx.train.entry import settle_tier

RUN = """
[model]
from_scratch = true
architecture = { model_type = "gpt2", n_layer = 2 }
adapter = { rank = 2 }
[data]
sources = [{ kind = "python_manual" }]
tokenizer = { kind = "bpe", vocab_size = 300 }
sequence_length = 16
[train]
steps = 2
batch_size = 8
[optimizer]
lr = 1e-2
[split]
cut = 1
"""
TPM = '[tpm]\nak_names = ["000b"]\n[tpm.measurements]\n"sha256.7" = ["00"]\n'


@pytest.fixture
def make(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    return lambda *more: settle_tier(load_run(tmp_path / "run.toml", [*more]))


def can(monkeypatch, lacking):
    monkeypatch.setattr(entry, "cannot_confine", lambda: lacking)


def test_a_process_where_one_can_be_confined_and_then_no_simulation_is_allowed(make, monkeypatch):
    can(monkeypatch, None)

    run = make("split.tier='auto'", "split.allow_insecure_sim=true")

    assert (run.split.tier, run.split.allow_insecure_sim) == ("process", False)
    assert run.name == "run"
    assert type(run).model_validate(run.model_dump()).model_dump() == run.model_dump()


def test_a_simulation_only_where_it_is_allowed(make, monkeypatch):
    can(monkeypatch, "landlock: not there")

    assert make("split.tier='auto'", "split.allow_insecure_sim=true").split.tier == "sim"
    with pytest.raises(ConfigError, match=r"landlock: not there.*enclave enrol"):
        make("split.tier='auto'")


def test_a_tpm_where_the_policy_has_one(make, monkeypatch, tmp_path):
    can(monkeypatch, "never asked")
    (tmp_path / "policy.toml").write_text(TPM)

    assert make("split.tier='auto'", f"split.policy='{tmp_path / 'policy.toml'}'").split.tier == "tpm"


def test_other_tiers_and_other_runs_stay_as_they_are(make, monkeypatch):
    can(monkeypatch, "never asked")
    plain = ("split.tier='auto'", "split.mode='plaintext'", "split.insecure=true")

    assert make("split.allow_insecure_sim=true").split.tier == "sim"
    assert make(*plain).split.tier == "sim"


def test_a_simulation_listens_on_this_machine_only_whatever_it_is_called(make):
    with pytest.raises(ConfigError, match="this machine only"):
        make("split.tier='auto'", "split.transport.bind='0.0.0.0'")
