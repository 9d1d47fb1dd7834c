"""The SLURM and Kubernetes examples of ranks with GPUs on several nodes hold together, and the SLURM one runs."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from phalanx.train import load_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT, PODS = EXAMPLES / "slurm" / "parallel.sbatch", EXAMPLES / "kubernetes" / "parallel"
RUN_FILES = (EXAMPLES / "slurm" / "parallel.toml", PODS / "run.toml")


@pytest.fixture(scope="module")
def documents():
    return {found["kind"]: found for found in yaml.safe_load_all((PODS / "jobset.yaml").read_text())}


@pytest.fixture(scope="module")
def job(documents):
    (replicated,) = documents["JobSet"]["spec"]["replicatedJobs"]
    return replicated


@pytest.fixture(scope="module")
def pod(job):
    return job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("path", RUN_FILES, ids=["slurm", "kubernetes"])
def test_the_run_file_has_a_rank_for_each_gpu_of_two_nodes(path):
    run = load_run(path)

    assert (run.train.device, run.parallel.num_ranks, run.parallel.min_dp_copies) == ("cuda", 16, 8)
    # both differ in their heads alone
    assert path.read_text().partition("[model]")[2] == RUN_FILES[0].read_text().partition("[model]")[2]


def test_the_scripts_head_asks_for_the_gpus_of_the_run_file():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SCRIPT.read_text(), re.MULTILINE))

    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == load_run(RUN_FILES[0]).parallel.num_ranks
    assert asked["ntasks-per-node"] == "1"


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_has_nothing_to_say():
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def called(tmp_path, code=0):
    """Run the script with tools that write down how they are called; the calls, and the script's exit code."""
    tools, calls = tmp_path / "bin", tmp_path / "calls"
    tools.mkdir()
    note = f'#!/usr/bin/env bash\necho "$(basename "$0") $*" >>{shlex.quote(str(calls))}\n'
    texts = {
        "scontrol": f"{note}[[ $1 == requeue ]] || printf 'node-a\\nnode-b\\n'\n",
        "srun": f'{note}while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
        "phalanx": f"{note}exit {code}\n",
    }
    for name, text in texts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "7"}
    words = ["bash", str(SCRIPT), "run.toml", "/shared/my run"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return calls.read_text().splitlines(), done.returncode


def test_every_node_starts_its_ranks_at_the_first_nodes_rendezvous(tmp_path):
    calls, code = called(tmp_path)

    launch = "launch run.toml --nnodes 2 --rdzv-endpoint node-a:29400 --run-dir /shared/my run --resume"
    assert code == 0
    assert calls[1:] == [f"srun --ntasks-per-node=1 --kill-on-bad-exit=1 phalanx {launch}", f"phalanx {launch}"]


@pytest.mark.parametrize(("code", "is_requeued"), [(130, True), (4, False)])
def test_the_job_is_queued_again_when_its_time_was_up(tmp_path, code, is_requeued):
    calls, ended = called(tmp_path, code)

    assert ended == code
    assert ("scontrol requeue 7" in calls) == is_requeued


def test_pods_are_as_many_and_have_the_gpus_that_the_run_file_asks_for(job, pod):
    spec, (container,) = job["template"]["spec"], pod["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    words = container["args"]

    assert spec["parallelism"] == spec["completions"] == int(words[words.index("--nnodes") + 1])
    assert spec["parallelism"] * gpus == load_run(PODS / "run.toml").parallel.num_ranks


def test_ranks_meet_at_the_first_pod_and_nobody_else_is_let_in(documents, job, pod):
    name, network = documents["JobSet"]["metadata"]["name"], documents["JobSet"]["spec"]["network"]
    words, policy = pod["containers"][0]["args"], documents["NetworkPolicy"]["spec"]
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}

    endpoint = words[words.index("--rdzv-endpoint") + 1]
    assert endpoint == f"{name}-{job['name']}-0-0.{network['subdomain']}:29400"
    assert policy["podSelector"] == own
    assert policy["ingress"] == [{"from": [{"podSelector": own}]}]


def test_what_a_pod_mounts_is_there_and_the_run_directory_is_shared(documents, pod):
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    words = container["args"]

    assert mounts.keys() == volumes.keys()
    assert words[words.index("--run-dir") + 1].startswith(f"{mounts['runs']}/")
    claim = documents["PersistentVolumeClaim"]
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    kustomization = yaml.safe_load((PODS / "kustomization.yaml").read_text())
    assert volumes["config"]["configMap"]["name"] == kustomization["configMapGenerator"][0]["name"]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
