"""Sites that own a verified pipeline, with real worker processes: killed and lying ones are no loss to the rounds."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch
from real_runs import Place, descendant, exists, local_workers
from test_federated_processes import tensors_of

from phalanx.data import Batch, BatchLoader
from phalanx.federated.algorithms import PlainRule
from phalanx.federated.site_trainer import SiteData, SiteSchedule
from phalanx.lab.attacks import attackers_of
from phalanx.models import open_model
from phalanx.optimizers import learning_rate
from phalanx.pipeline import AttackConfig, LocalWorkers
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.train import load_run
from phalanx.train.parties.site_process import DIRECTORY, staged_trainer
from phalanx.train.records.proof import verify_run
from phalanx.train.setup.process import deterministic_kernels
from tiny_run_file import tiny_run_file

pytestmark = pytest.mark.slow
SITES = """
[federated]
sites = ["north", "south"]
min_cohort = 2
local_steps = 4
deadline_s = 120.0

[checkpoint]
every = 2
"""
STAGES = """
[pipeline]
stages = 4
step_timeout_s = 60.0

[guard]
audit_rate = 1.0
keep_states = 0
step_audit_rate = 0.0
owner_audit_rate = 0.0
gradient_screen = false
"""
# AdamW's first steps turn rounding into signs where eps is small
PLAIN = ("optimizer.eps=1e-3",)


def pipeline_dir(place: Place, site: str):
    return place.path / "run" / "sites" / site / DIRECTORY


def workers_of(process, site: str) -> dict[str, int]:
    pid = descendant(process, "site_process", f"{site}.toml")
    return local_workers(SimpleNamespace(popen=SimpleNamespace(pid=pid)))


def test_sites_with_pipelines_one_of_which_loses_a_worker_come_to_the_weights_of_sites_of_one_process(tmp_path):
    one, staged = (tmp_path / name for name in ("one.toml", "staged.toml"))
    for path, text in ((one, SITES), (staged, SITES + STAGES)):
        path.write_text(tiny_run_file(text, steps=4, validate_every=4))
    alone = Place(tmp_path, one).finish(*PLAIN, run_dir="one", anew=True)

    place = Place(tmp_path, staged)
    process = place.train(*PLAIN, anew=True)
    log = "sites/north/pipeline/events.jsonl"
    place.wait_for(process, lambda: place.has_line(log, '"kind":"step"'))
    first = workers_of(process, "south")
    place.wait_for(process, lambda: place.has_line(log, '"kind":"step"', after='"round":2'))
    os.kill(workers_of(process, "north")["worker-1"], signal.SIGKILL)
    place.wait_for(process, lambda: place.has_line("sites/south/pipeline/events.jsonl", '"round":4'))
    last = workers_of(process, "south")
    assert process.wait() == 0, process.text
    summary = place.summary()

    # two workers each, which stay from round to round and end with their site
    assert first == last and len(last) == 2 and not any(exists(pid) for pid in last.values())
    assert (summary["world"]["processes"], alone["world"]["processes"]) == (7, 3)
    for name in ("loss_first", "loss_last", "validation_perplexity"):
        assert summary[name] == pytest.approx(alone[name], rel=1e-6)
    (plain,), (found,) = (sorted((tmp_path / run / "checkpoints").glob("*4")) for run in ("one", "run"))
    weights = [tensors_of(path) for path in (plain, found)]
    assert weights[0].keys() == weights[1].keys() and weights[0]
    for tensor, other in zip(weights[0].values(), weights[1].values(), strict=True):
        assert (tensor - other).abs().max() <= 1e-6
    assert place.has_line(log, '"kind":"lost"') and not place.has_line(log, '"kind":"verdict"')
    for site in ("north", "south"):
        proof = verify_run(pipeline_dir(place, site))
        assert (proof.steps, proof.proven, proof.unproven) == (16, 16, ())


class Rows:
    """Made sequences."""

    digest = "0" * 64
    num_train_sequences = 32

    def train_batch(self, indices):
        rows = torch.randint(0, 300, (32, 17), generator=torch.Generator().manual_seed(5))[list(indices)]
        return Batch(rows[:, :-1].clone(), rows[:, 1:].clone(), tuple(indices))


def trained(tmp_path, name, open_workers=LocalWorkers, *overrides):
    """The updates of three rounds of one site, with this process for its owner."""
    file = tmp_path / "site.toml"
    file.write_text(tiny_run_file(SITES + STAGES, steps=3))
    run = load_run(file, overrides)
    source, rows = open_model(run.model, tmp_path / "models", run.train.seed), Rows()
    data = SiteData("north", BatchLoader(rows, 8, 1), 32, lambda: [rows.train_batch(range(8))], rows.train_batch, "0")
    schedule = SiteSchedule(run.optimizer, 4, 8, 4, run.train.seed)
    with (
        deterministic_kernels(run.train.threads),
        staged_trainer(run, source, data, schedule, tmp_path / name, open_workers) as trainer,
    ):
        weights = {name: one.detach().clone() for name, one in trainer._modules.trained_parameters.items()}
        updates = []
        for number in (1, 2, 3):
            rate = learning_rate(run.optimizer, number - 1, run.train.steps)
            updates.append(trainer.train_round(number, weights, rate, PlainRule(None, weights)))
            weights = {name: one + updates[-1].delta[name] for name, one in weights.items()}
    return updates


def test_a_lying_worker_of_a_site_is_named_in_its_folder_and_changes_an_update_only_where_the_guard_is_off(tmp_path):
    attack = AttackConfig(kind="forward_sign_flip", stages=(1,), from_step=5)
    honest = trained(tmp_path, "honest")

    guarded = trained(tmp_path, "guarded", attackers_of(attack))
    off = trained(tmp_path, "off", attackers_of(attack), "guard.mode=off")

    def same(others):
        pairs = [(one.delta, other.delta) for one, other in zip(honest, others, strict=True)]
        return [all(torch.equal(one[name], other[name]) for name in one) for one, other in pairs]

    assert (same(guarded), same(off)) == ([True, True, True], [True, False, False])
    folder = tmp_path / "guarded" / DIRECTORY
    (evidence,) = (folder / "evidence").glob("*.json")
    assert "worker-1" in explain_evidence(evidence, folder / "pki" / "authority.pem")["conclusion"]
    proof = verify_run(folder)
    assert (proof.steps, proof.proven, proof.unproven) == (12, 12, ())
    assert '"kind":"evicted"' in (folder / "events.jsonl").read_text()
    # a site that begins again keeps it out
    trained(tmp_path, "guarded", attackers_of(attack))
    joined = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"kind":"party_joined"' in line]
    assert [sum(f'"{name}"' in line for line in joined) for name in ("worker-1", "worker-2")] == [1, 2]
