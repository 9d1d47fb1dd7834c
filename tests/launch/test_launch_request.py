"""The parties with keys on a machine run there; a launch that could not come about is refused before it starts."""

from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.launch import Launch, Nodes, describe_ray, describe_torchrun
from phalanx.launch.request import ProcessSlot

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "examples" / "slurm" / "run.toml"
EVERYBODY = ("owner", "alice", "bob", "alice-2", "bob-2")


@pytest.fixture
def keys(tmp_path):
    """A directory with the keys of the parties that are asked for."""

    def make(*names):
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "signing.key").touch()
        return tmp_path

    return make


def launch(directory, *overrides, run_file=RUN_FILE, **options):
    settings = (f"pipeline.pki='{directory}'", "pipeline.transport.bind='127.0.0.1'", *overrides)
    return Launch(run_file, settings, directory / "run", **options)


def test_a_machine_with_all_keys_plays_everybody_and_substitutes_wait(keys):
    assert launch(keys(*EVERYBODY)).process_slots == (
        ProcessSlot("owner"),
        ProcessSlot("alice", ("alice-2",)),
        ProcessSlot("bob", ("bob-2",)),
    )


def test_a_machine_plays_the_parties_whose_keys_it_has(keys):
    one = launch(keys("alice", "alice-2"), owner="head:7070")

    assert one.process_slots == (ProcessSlot("alice", ("alice-2",)),)
    assert not one.has_owner


def test_whoever_has_only_the_keys_of_a_late_party_joins_as_a_worker(keys):
    assert launch(keys("bob-2"), owner="head:7070").process_slots == (ProcessSlot("bob-2"),)


def test_on_a_shared_disk_the_parties_are_chosen_by_name(keys):
    one = launch(keys(*EVERYBODY), chosen=("bob-2", "bob"), owner="head:7070")

    assert one.process_slots == (ProcessSlot("bob", ("bob-2",)),)


@pytest.mark.parametrize(
    ("have", "options", "words"),
    [
        ((), {}, "lacks the keys of owner, alice, bob, alice-2, bob-2"),
        (("owner",), {"chosen": ("alice",)}, "lacks the keys of alice"),
        (("owner",), {"chosen": ("carol",)}, "--party carol: choices of .*: owner, alice, bob, alice-2, bob-2"),
    ],
)
def test_parties_without_keys_are_refused(keys, have, options, words):
    with pytest.raises(ConfigError, match=words):
        _ = launch(keys(*have), **options).process_slots


def test_a_run_without_keys_is_told_how_to_make_them():
    with pytest.raises(ConfigError, match="phalanx pki issue keys NAME` for each of owner worker-1 worker-2"):
        _ = Launch(ROOT / "examples" / "smollm2.toml").run_config


def test_local_workers_become_parties_with_certificates_of_their_own(keys):
    directory = keys("owner", "worker-1", "worker-2", "worker-3")

    one = launch(directory, "pipeline.respawns=1", run_file=ROOT / "examples" / "smollm2.toml")

    assert one.run_config.pipeline.remote_workers == ("worker-1", "worker-2")
    assert one.run_config.pipeline.may_join == ("worker-3",)
    assert one.process_slots == (ProcessSlot("owner"), ProcessSlot("worker-1", ("worker-3",)), ProcessSlot("worker-2"))


def test_a_run_that_is_there_already_is_not_begun_again(keys):
    directory = keys(*EVERYBODY)
    (directory / "run").mkdir()
    (directory / "run" / "run.json").touch()
    (directory / "run" / "metrics.jsonl").write_text('{"step": 0}\n')

    launch(directory, resume=True).check_request()
    with pytest.raises(ConfigError, match="already has a run; add --resume"):
        launch(directory).check_request()


def test_the_address_of_another_owner_is_refused_where_the_owner_runs(keys):
    with pytest.raises(ConfigError, match="--owner head:7070: the owner runs here"):
        launch(keys(*EVERYBODY), owner="head:7070").check_request()


def test_a_worker_will_serve_the_run_of_its_own_run_file_only(keys):
    directory = keys(*EVERYBODY)

    one = launch(directory).worker_config("alice", "127.0.0.1:7070")
    other = launch(directory, "train.seed=7").worker_config("alice", "127.0.0.1:7070")

    assert one.run_digest != other.run_digest
    assert one.identity == str(directory / "alice")
    # the owner's port is in the run file, a worker's is chosen by the system
    assert one.transport.port == 0


def test_on_one_machine_torchrun_opens_no_port(keys):
    *parties, command = describe_torchrun(launch(keys(*EVERYBODY)), Nodes())

    assert parties[1].startswith("alice, then alice-2: keys in ")
    assert "--nproc-per-node 3" in command
    assert "--rdzv-conf store_type=file" in command
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in command
    assert command.endswith("--resume")


@pytest.mark.parametrize(
    ("nodes", "overrides", "words"),
    [
        (Nodes("2"), (), "add --rdzv-endpoint"),
        (Nodes("2", "head:29400"), (), "reachable from its own machine only"),
        (
            Nodes("2", "head:29400"),
            ("pipeline.transport.bind='0.0.0.0'",),
            "name the parties of this machine with --party",
        ),
    ],
)
def test_several_machines_must_be_able_to_meet(keys, nodes, overrides, words):
    with pytest.raises(ConfigError, match=words):
        nodes.check_launch(launch(keys(*EVERYBODY), *overrides))


def test_several_machines_meet_where_they_are_told(keys):
    one = launch(keys("alice"), "pipeline.transport.bind='0.0.0.0'")
    nodes = Nodes("1:3", "head:29400")

    nodes.check_launch(one)

    assert "--nnodes 1:3" in describe_torchrun(one, nodes)[-1]
    assert "--rdzv-endpoint head:29400" in describe_torchrun(one, nodes)[-1]


def test_ray_is_asked_for_what_each_worker_needs(keys):
    directory = keys(*EVERYBODY)

    here = describe_ray(launch(directory, "train.threads=3"), None)
    there = describe_ray(launch(directory, "train.device='cuda:1'"), "auto")

    assert here[0] == ("ray: a new cluster on this machine; placement group SPREAD of [{'CPU': 3.0}, {'CPU': 3.0}]")
    assert here[1] == f"actor: alice: keys in {directory / 'alice'}, wherever it is placed"
    assert here[3] == "replacements: alice-2, bob-2"
    assert "the cluster at auto" in there[0]
    assert "{'CPU': 1.0, 'GPU': 1.0}" in there[0]


def test_no_secret_is_on_a_command_line(keys):
    directory = keys(*EVERYBODY)
    (directory / "alice" / "signing.key").write_text("SECRET")

    lines = [*describe_torchrun(launch(directory), Nodes()), *describe_ray(launch(directory), None)]

    assert "SECRET" not in "\n".join(lines)
