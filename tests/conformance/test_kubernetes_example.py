"""The JobSet example holds together: what it mounts exists, and each pod has the keys of its own parties only.

kubectl without a server checks no schema, so fields are compared with those that the JobSet API (v1alpha2) and the pod
API have; with the package kubernetes-validate at hand, the pods are checked against the published schema as well.
"""

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from phalanx.train import load_run

HERE = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
JOB_SET = {"apiVersion", "kind", "metadata", "spec"}
SPEC = {
    "replicatedJobs",
    "network",
    "successPolicy",
    "failurePolicy",
    "startupPolicy",
    "suspend",
    "coordinator",
    "managedBy",
    "ttlSecondsAfterFinished",
    "volumeClaimPolicies",
}
NETWORK = {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
REPLICATED_JOB = {"name", "groupName", "template", "replicas", "dependsOn"}


@pytest.fixture(scope="module")
def documents():
    return {found["kind"]: found for found in yaml.safe_load_all((HERE / "jobset.yaml").read_text())}


@pytest.fixture(scope="module")
def spec(documents):
    return documents["JobSet"]["spec"]


@pytest.fixture(scope="module")
def pods(spec):
    return {job["name"]: job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"]}


@pytest.fixture(scope="module")
def run():
    return load_run(HERE / "run.toml")


def kubectl(*arguments):
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def options(pod):
    """Options of the pod's command and their values."""
    words = pod["containers"][0]["args"]
    pairs = [(word, words[n + 1] if n + 1 < len(words) else "") for n, word in enumerate(words)]
    return [(word, value) for word, value in pairs if word.startswith("--")]


def parties(pod):
    return [value for word, value in options(pod) if word == "--party"]


def test_only_fields_of_the_api_are_used(documents, spec):
    job_set = documents["JobSet"]

    assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert job_set.keys() <= JOB_SET
    assert spec.keys() <= SPEC
    assert spec["network"].keys() <= NETWORK
    assert spec["successPolicy"].keys() <= {"operator", "targetReplicatedJobs"}
    for job in spec["replicatedJobs"]:
        assert job.keys() <= REPLICATED_JOB
        assert job["template"].keys() <= {"metadata", "spec"}


def test_every_party_of_the_run_file_has_one_pod(pods, run):
    assert parties(pods["owner"]) == ["owner"]

    workers = [name for pod in pods.values() for name in parties(pod) if name != "owner"]

    assert sorted(workers) == sorted((*run.pipeline.remote_workers, *run.pipeline.may_join))


def test_a_pod_has_the_keys_of_its_own_parties_only(pods):
    for pod in pods.values():
        secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]

        assert secrets == [f"phalanx-{name}" for name in parties(pod)]


def test_what_is_mounted_is_a_volume_and_every_volume_is_mounted(pods):
    for pod in pods.values():
        containers = (*pod["initContainers"], *pod["containers"])
        mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}

        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_workers_look_for_the_owner_where_the_headless_service_puts_it(documents, spec, pods, run):
    name, subdomain = documents["JobSet"]["metadata"]["name"], spec["network"]["subdomain"]

    for job in ("alice", "bob"):
        assert dict(options(pods[job]))["--owner"] == f"{name}-owner-0-0.{subdomain}:{run.pipeline.transport.port}"
    assert run.pipeline.transport.bind == "0.0.0.0"
    assert run.pipeline.pki == "/keys"


def test_only_the_owner_decides_when_the_run_has_ended(spec):
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["owner"]}
    # a failed Job would fail the whole set
    assert all(job["template"]["spec"]["backoffLimit"] >= 1000 for job in spec["replicatedJobs"])


def test_no_pod_has_more_rights_than_it_needs(pods):
    for pod in pods.values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("job", ["owner", "alice", "bob"])
def test_the_first_container_leaves_keys_that_are_private(pods, job, tmp_path):
    """Run its script on mounts as Kubernetes makes them: links to files that a group can read."""
    secret = {"authority.pem", "certificate.pem", "signing.key", "tls.key"}
    for name in parties(pods[job]):
        mount_secret(tmp_path / "from" / name, secret)
    mount_secret(tmp_path / "certificates", {"alice", "alice-2", "bob", "bob-2"})
    (tmp_path / "keys").mkdir()
    *shell, script = pods[job]["initContainers"][0]["command"]
    for place in ("/from", "/certificates", "/keys"):
        script = script.replace(f"{place}/", f"{tmp_path}{place}/")

    subprocess.run([*shell, script], timeout=30, check=True)

    for name in parties(pods[job]):
        home = tmp_path / "keys" / name
        assert {path.name for path in home.iterdir()} == secret
        assert home.stat().st_mode & 0o077 == 0
        assert all(not path.is_symlink() and path.stat().st_mode & 0o077 == 0 for path in home.iterdir())
    if job == "owner":
        assert (tmp_path / "keys" / "bob-2" / "certificate.pem").read_text() == "bob-2"


def mount_secret(directory, names):
    data = directory / "..2026"
    data.mkdir(parents=True)
    (directory / "..data").symlink_to(data.name)
    for name in names:
        (data / name).write_text(name)
        (data / name).chmod(0o440)
        (directory / name).symlink_to(f"..data/{name}")


@needs_kubectl
def test_kubectl_builds_it_with_the_run_file_inside():
    built = {found["kind"]: found for found in yaml.safe_load_all(kubectl("kustomize", str(HERE)))}

    assert set(built) == {"ConfigMap", "PersistentVolumeClaim", "JobSet"}
    assert built["ConfigMap"]["metadata"]["name"] == "phalanx-run"
    assert built["ConfigMap"]["data"] == {"run.toml": (HERE / "run.toml").read_text()}


@needs_kubectl
def test_kubectl_reads_every_document(documents):
    found = kubectl("label", "--local", "--dry-run=client", "-f", str(HERE / "jobset.yaml"), "seen=yes", "-o", "name")

    assert found.split() == ["persistentvolumeclaim/phalanx-runs", "jobset.jobset.x-k8s.io/phalanx"]


def missing_fields(wanted, found, where="spec"):
    """Where a document has something that its copy has not."""
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            if key not in (found or {}):
                yield f"{where}.{key}"
            else:
                yield from missing_fields(value, found[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from missing_fields(one, other, f"{where}[{index}]")


@pytest.mark.skipif(find_spec("kubeflow_trainer_api") is None, reason="needs the package kubeflow-trainer-api")
def test_the_published_classes_of_jobset_know_every_field(spec):
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSetSpec

    assert list(missing_fields(spec, JobsetV1alpha2JobSetSpec.from_dict(spec).to_dict())) == []
    misspelt = {**spec, "netwrok": {}}
    assert list(missing_fields(misspelt, JobsetV1alpha2JobSetSpec.from_dict(misspelt).to_dict())) == ["spec.netwrok"]


@pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="needs the package kubernetes-validate")
def test_pods_and_claim_follow_the_published_schema(documents, spec):
    import kubernetes_validate

    kubernetes_validate.validate(documents["PersistentVolumeClaim"], "1.32", strict=True)
    for job in spec["replicatedJobs"]:
        as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
        kubernetes_validate.validate(as_job, "1.32", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**as_job, "spce": {}}, "1.32", strict=True)
