"""The SLURM example runs: with an srun that starts its steps here, the script brings a run to its end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from machine_patience import patience_s
from phalanx.train import load_run

HERE = Path(__file__).resolve().parents[2] / "examples" / "slurm"
SCRIPT = HERE / "train.sbatch"
# what the example asks of srun and scontrol, done on this machine
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$CALLS"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$CALLS"
[[ $1 == requeue ]] || printf '127.0.0.1\\n%.0s' $(seq "$NODES")
"""


@pytest.fixture
def cluster(tmp_path):
    """Run the script where `srun`, `scontrol` and `phalanx` are what a test says."""
    tools = tmp_path / "bin"
    tools.mkdir()

    def run(*arguments, phalanx, nodes=3, **environment):
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "phalanx": f"#!/usr/bin/env bash\n{phalanx}\n"}.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            env={
                **os.environ,
                "PATH": f"{tools}:{os.environ['PATH']}",
                "CALLS": str(tmp_path / "calls"),
                "NODES": str(nodes),
                "SLURM_JOB_NODELIST": "node[1-3]",
                "SLURM_JOB_ID": "7",
                **environment,
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=patience_s(240.0),
            check=False,
        )
        calls = tmp_path / "calls"
        return done, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_the_script_is_good_bash():
    subprocess.run(["bash", "-n", str(SCRIPT)], timeout=30, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_has_nothing_to_say():
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout


def test_the_command_in_its_head_names_the_parties_of_the_run_file():
    pipeline = load_run(HERE / "run.toml").pipeline
    (line,) = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#   sbatch ")]

    *_, nodes, script, run_file, owner, alice, bob = line.removeprefix("#").split()

    assert (script, run_file) == ("examples/slurm/train.sbatch", "examples/slurm/run.toml")
    assert nodes == f"--nodes={len((owner, alice, bob))}"
    assert owner == "owner"
    named = [*alice.split(","), *bob.split(",")]
    assert sorted(named) == sorted((*pipeline.remote_workers, *pipeline.may_join))


def test_every_party_gets_a_step_on_a_node_of_its_own(cluster):
    # an owner that ends at once has the others ended before they are noted down
    phalanx = 'case $* in *=owner*) until (($(grep -c ^srun "$CALLS") == 3)); do sleep 0.05; done;; esac'

    done, calls = cluster("run.toml", "owner", "alice,alice-2", "bob", phalanx=phalanx, PHALANX_PORT="7171")

    assert done.returncode == 0, done.stderr
    steps = [call.partition(" phalanx ")[2] for call in calls if call.startswith("srun")]
    assert sorted(steps) == [
        "launch run.toml --party=alice --party=alice-2 --advertise 127.0.0.1 --owner 127.0.0.1:7171 --max-restarts 20",
        "launch run.toml --party=bob --advertise 127.0.0.1 --owner 127.0.0.1:7171 --max-restarts 20",
        "launch run.toml --party=owner --advertise 127.0.0.1 --resume",
    ]


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (6, False), (130, True)])
def test_the_job_ends_as_its_owner_does_and_is_queued_again_when_time_was_up(cluster, code, requeued):
    # a worker's failure is not the job's, and one that waits for ever is ended
    phalanx = f"case $* in *=owner*) exit {code};; *=alice*) exit 4;; *) exec sleep 200;; esac"

    done, calls = cluster("run.toml", "owner", "alice", "bob", phalanx=phalanx)

    assert done.returncode == code, done.stderr
    assert ("scontrol requeue 7" in calls) is requeued


@pytest.mark.parametrize(
    ("arguments", "nodes"), [(("run.toml", "owner", "alice", "bob"), 2), (("run.toml", "owner"), 3)]
)
def test_too_few_nodes_or_parties_are_refused(cluster, arguments, nodes):
    done, calls = cluster(*arguments, phalanx="exit 0", nodes=nodes)

    assert done.returncode == 2
    assert "give each a node, the owner first" in done.stderr
    assert not [call for call in calls if call.startswith("srun")]


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_the_script_trains(cluster, tmp_path):
    phalanx = f'exec "{sys.executable}" -m phalanx "$@"'
    for words in (("init", "keys"), *(("issue", "keys", name) for name in ("owner", "alice", "bob"))):
        subprocess.run(
            [sys.executable, "-m", "phalanx", "pki", *words], cwd=tmp_path, timeout=patience_s(60.0), check=True
        )
    port = free_port()
    text = (HERE / "run.toml").read_text()
    for old, new in {
        "n_layer = 6": "n_layer = 4",
        "n_embd = 256": "n_embd = 32",
        "steps = 320": "steps = 10",
        "validate_every = 40": "validate_every = 0",
        'kind = "bpe", vocab_size = 2048': 'kind = "bpe", vocab_size = 1024',
        "sequence_length = 128": "sequence_length = 16\nmax_documents = 12\nvalidation_share = 0.3",
        'may_join = ["alice-2", "bob-2"]': "",
        'bind = "0.0.0.0"\nport = 7070': f"port = {port}",
    }.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "run.toml").write_text(text)

    done, _ = cluster("run.toml", "owner", "alice", "bob", phalanx=phalanx, PHALANX_PORT=str(port))

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["world"]["processes"]) == ("completed", 10, 3)
