"""Rendered deployments: read by what will read them, closed to what an attacker inside or beside them would try."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.errors import ConfigError
from phalanx.serve.deploy import TARGETS, DeploymentPlan, render_deployment
from phalanx.serve.gateway import load_gateway_config

DIGEST = "sha256:" + "a" * 64
IMAGE = f"registry.example.org/phalanx@{DIGEST}"
SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_1_34.json").read_text(encoding="utf-8"))
PLANS = {
    "serve": DeploymentPlan(service="serve", name="base", image=IMAGE, model="/srv/model"),
    "gateway": DeploymentPlan(
        service="gateway", name="gate", image=IMAGE, engine_url="http://vllm:8000", unsafe_plain_http=True
    ),
}


@pytest.fixture(params=PLANS)
def plan(request):
    return PLANS[request.param]


def find_faults(value, schema, place="", /):
    """Every place that a strict schema of Kubernetes does not allow."""
    schema = SCHEMAS["definitions"][schema["$ref"]] if "$ref" in schema else schema
    if "oneOf" in schema:
        faults = [find_faults(value, choice, place) for choice in schema["oneOf"]]
        return min(faults, key=len)
    kinds = schema.get("type", [])
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    if kinds and names.get(type(value), "null") not in kinds:
        return [f"{place}: {value!r} is none of {sorted(kinds)}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{place}: {value!r} is none of {schema['enum']}"]
    if isinstance(value, list):
        return [fault for n, item in enumerate(value) for fault in find_faults(item, schema["items"], f"{place}[{n}]")]
    if not isinstance(value, dict):
        return []
    fields, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    faults = [f"{place}: {name} is missing" for name in schema.get("required", []) if name not in value]
    for name, item in value.items():
        if name not in fields and (others is False or (fields and not others)):
            faults.append(f"{place}.{name}: unknown")
        else:
            faults += find_faults(item, fields.get(name, others or {}), f"{place}.{name}")
    return faults


def manifests_of(plan):
    return {doc["kind"]: doc for doc in yaml.safe_load_all(render_deployment(plan, "kubernetes")[f"{plan.name}.yaml"])}


def test_manifests_are_what_kubernetes_reads(plan):
    manifests = manifests_of(plan)

    assert set(manifests) == {"Service", "PersistentVolumeClaim", "Deployment", "PodDisruptionBudget", "NetworkPolicy"}
    for manifest in manifests.values():
        assert find_faults(manifest, SCHEMAS["kinds"][f"{manifest['apiVersion']}/{manifest['kind']}"]) == []


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("spec", "replica"), 1, "replica: unknown"),
        (("spec", "replicas"), "one", "none of"),
        (("spec", "template", "spec", "containers", 0, "securitycontext"), {}, "unknown"),
        (("spec", "template", "spec", "volumes"), {}, "none of"),
        (("spec", "selector"), [], "none of"),
    ],
)
def test_the_schemas_of_these_tests_see_typical_mistakes(path, value, fault):
    deployment = manifests_of(PLANS["serve"])["Deployment"]
    place = deployment
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value

    faults = find_faults(deployment, SCHEMAS["kinds"]["apps/v1/Deployment"])

    assert faults and fault in faults[0]


def test_a_pod_has_no_root_no_token_no_writable_disk_and_bounds(plan):
    pod = manifests_of(plan)["Deployment"]["spec"]["template"]["spec"]

    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & pod.keys()
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["image"] == IMAGE
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
    assert not any("hostPath" in volume for volume in pod["volumes"])
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in pod["containers"][0]["volumeMounts"]}
    assert {path for path, is_read_only in mounts.items() if not is_read_only} == {"/access", "/tmp"}


def test_probes_have_a_key_out_of_a_secret_and_no_key_is_in_the_files(plan):
    manifests = manifests_of(plan)
    container = manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]

    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        words = container[name]["exec"]["command"]
        assert words[words.index("--key-file") + 1] == "/run/phalanx/probe.key"
        assert words[words.index("--authority") + 1] == "/run/phalanx/ca.crt"
        assert container[name]["timeoutSeconds"] > 8
    assert "Secret" not in manifests


def test_all_labels_and_names_of_the_manifests_belong_together(plan):
    manifests = manifests_of(plan)
    labels = manifests["Deployment"]["spec"]["template"]["metadata"]["labels"]

    assert manifests["Service"]["spec"]["selector"] == labels
    assert manifests["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounted = {mount["name"] for part in (*pod["initContainers"], *pod["containers"]) for mount in part["volumeMounts"]}
    assert volumes == mounted
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    assert manifests["PersistentVolumeClaim"]["metadata"]["name"] in claims
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] in ports


def test_a_server_calls_nobody_and_a_gateway_its_engine_alone():
    serve = manifests_of(PLANS["serve"])["NetworkPolicy"]["spec"]
    inside = manifests_of(PLANS["gateway"])["NetworkPolicy"]["spec"]
    cloud = PLANS["gateway"].model_copy(update={"engine_url": "https://api.example.org"})
    outside = manifests_of(cloud)["NetworkPolicy"]["spec"]

    assert serve["policyTypes"] == ["Ingress", "Egress"] and serve["egress"] == []
    assert inside["egress"][1] == {
        "to": [{"podSelector": {"matchLabels": {"phalanx-engine": "true"}}}],
        "ports": [{"protocol": "TCP", "port": 8000}],
    }
    block = outside["egress"][1]["to"][0]["ipBlock"]
    # the metadata service of a cloud gives credentials away
    assert "169.254.0.0/16" in block["except"] and outside["egress"][1]["ports"][0]["port"] == 443
    for policy in (serve, inside, outside):
        assert policy["ingress"][0]["from"] == [{"podSelector": {"matchLabels": {"phalanx-client": "true"}}}]


def test_kustomize_builds_it(plan, tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    for name, text in render_deployment(plan, "kubernetes").items():
        (tmp_path / name).write_text(text)

    built = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], check=True, capture_output=True, text=True, timeout=120
    )

    kinds = [doc["kind"] for doc in yaml.safe_load_all(built.stdout)]
    assert len(kinds) == 5 + (plan.service == "gateway")


COMPOSE_KEYS = {
    *("image", "command", "user", "read_only", "cap_drop", "security_opt", "pids_limit", "mem_limit", "cpus", "init"),
    *("restart", "stop_grace_period", "ports", "environment", "tmpfs", "volumes", "healthcheck"),
}


def test_compose_runs_a_closed_container_on_this_machine_alone(plan):
    project = yaml.safe_load(render_deployment(plan, "compose")["compose.yaml"])
    (server,) = project["services"].values()

    assert project.keys() == {"name", "services"} and server.keys() == COMPOSE_KEYS
    assert server["image"] == IMAGE and server["user"] == "10001:10001"
    assert server["read_only"] is True and server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert server["ports"] == ["127.0.0.1:8443:8443"]
    assert server["mem_limit"] == "4096m" and server["pids_limit"] == 256 and server["cpus"] == 2
    writable = {mount["target"] for mount in server["volumes"] if not mount.get("read_only")}
    assert writable == {"/access"}
    assert all(mount["type"] == "bind" and mount.keys() >= {"source", "target"} for mount in server["volumes"])
    assert server["healthcheck"]["test"][0] == "CMD" and "--key-file" in server["healthcheck"]["test"]


HARDENED = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "RestrictNamespaces": "yes",
    "RestrictAddressFamilies": "AF_INET AF_INET6",
    "CapabilityBoundingSet": "",
    "SystemCallArchitectures": "native",
    "User": "phalanx",
    "UMask": "0077",
}


def unit_lines(plan):
    text = render_deployment(plan, "systemd")[f"{plan.name}.service"]
    return [line.partition("=")[::2] for line in text.splitlines() if "=" in line and not line.startswith("#")]


def test_a_unit_is_hardened_and_starts_the_command(plan):
    lines = unit_lines(plan)
    settings = dict(lines)

    assert HARDENED.items() <= settings.items()
    assert settings["ExecStart"].startswith(f"/opt/phalanx/bin/phalanx {plan.service} ")
    filters = [value for name, value in lines if name == "SystemCallFilter"]
    assert filters[0] == "@system-service" and filters[1].startswith("~@privileged")
    # compiled products need writable code
    assert ("MemoryDenyWriteExecute" in settings) is (plan.service == "gateway")


def test_systemd_reads_the_unit_and_rates_it_as_little_exposed(plan, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    local = plan.model_copy(update={"program": "/bin/true"})
    path = tmp_path / f"{plan.name}.service"
    path.write_text(render_deployment(local, "systemd")[path.name])

    checked = subprocess.run(["systemd-analyze", "verify", str(path)], check=False, capture_output=True, text=True)
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(path)], check=False, capture_output=True, text=True
    )

    assert (checked.returncode, checked.stderr) == (0, "")
    exposure = re.search(r"exposure level for .*: ([0-9.]+)", rated.stdout)
    assert exposure is not None and float(exposure[1]) < 2.0


def test_the_container_file_builds_from_local_wheels_runs_as_a_user_and_starts_the_program():
    text = render_deployment(PLANS["serve"], "container")["Containerfile"]
    instructions = [
        line.split(None, 1)
        for line in re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
        if line.strip()
    ]
    last = dict(instructions)

    assert instructions[0] == ["FROM", "docker.io/library/python:3.11-slim-bookworm"]
    assert set(last) == {"FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert "--no-index" in last["RUN"] and not re.search(r"curl|wget|apt-get|https?://", last["RUN"])
    assert last["USER"] == "10001:10001" and "--uid 10001" in last["RUN"]
    assert json.loads(last["ENTRYPOINT"]) == ["phalanx"]


@pytest.mark.parametrize("target", ["kubernetes", "compose", "systemd"])
def test_the_gateways_file_is_one_that_the_gateway_reads(target, tmp_path):
    (tmp_path / "gateway.toml").write_text(render_deployment(PLANS["gateway"], target)["gateway.toml"])

    config = load_gateway_config(tmp_path / "gateway.toml")

    assert (config.backends[0].url, config.backends[0].unsafe_plain_http) == ("http://vllm:8000", True)
    assert (config.listen.host, config.listen.port) == ("0.0.0.0", 8443)
    assert config.listen.certificate is not None


def test_a_servers_command_is_one_that_the_command_line_reads(plan):
    words = json.loads(re.search(r"args: (\[.*\])", render_deployment(plan, "kubernetes")[f"{plan.name}.yaml"])[1])
    help_text = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output

    assert all(word in help_text for word in words if word.startswith("--"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image", "registry.example.org/phalanx:latest"),
        ("image", f"x@{DIGEST}\nprivileged: true"),
        ("name", "Base"),
        ("name", "a: b"),
        ("namespace", "x}"),
        ("model", "/srv/a b"),
        ("model", "/srv/$HOME"),
        ("model", "/srv/model\nUser=root"),
        ("access", "./a:b"),
        ("server_name", 'x", "--any-status'),
        ("publish", "0.0.0.0:80"),
        ("engine_url", "http://user:key@host"),
        ("engine_url", 'http://host"\n'),
        ("program", "phalanx"),
        ("base_image", "python:latest"),
        ("base_image", "python"),
        ("port", 80),
    ],
)
def test_a_choice_that_would_be_more_than_a_name_is_refused(field, value):
    choices = {"service": "serve", "model": "/srv/model", field: value}

    with pytest.raises(ValueError, match=field):
        DeploymentPlan.model_validate(choices)


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError, match="--model is missing"):
        render_deployment(DeploymentPlan(service="serve", image=IMAGE), "kubernetes")
    assert render_deployment(DeploymentPlan(service="serve"), "container")
    with pytest.raises(ValueError, match="give --engine"):
        DeploymentPlan(service="gateway")
    with pytest.raises(ValueError, match="--unsafe-plain-http"):
        DeploymentPlan(service="gateway", engine_url="http://vllm:8000")
    assert DeploymentPlan(service="gateway", engine_url="http://127.0.0.1:8000").service == "gateway"
    with pytest.raises(ConfigError, match="--image is missing"):
        render_deployment(DeploymentPlan(service="serve", model="/m"), "compose")
    with pytest.raises(ConfigError, match="whole path"):
        render_deployment(DeploymentPlan(service="serve", model="m"), "systemd")


def test_no_placeholder_or_marker_is_left_in_any_file(plan):
    for target in TARGETS:
        for text in render_deployment(plan, target).values():
            assert "${" not in text and "#@" not in text and not re.search(r"\$[a-z]", text)


def test_the_command_writes_once_and_names_what_it_wrote(tmp_path):
    words = ["deploy", str(tmp_path / "out"), "--target", "systemd", "--model", "/srv/m", "--name", "base"]

    first, again, forced = (CliRunner().invoke(app, [*words, *more]) for more in ([], [], ["--force"]))

    assert (first.exit_code, forced.exit_code) == (0, 0) and "base.service" in first.output
    assert isinstance(again.exception, ConfigError) and "already exists" in str(again.exception)
    wrong = CliRunner().invoke(app, ["deploy", str(tmp_path), "--target", "helm"])
    assert "container, compose, kubernetes, systemd" in str(wrong.exception)


def test_no_key_is_in_a_gateways_file():
    table = tomllib.loads(render_deployment(PLANS["gateway"], "kubernetes")["gateway.toml"])

    assert "secret" not in table["backends"][0] and table["backends"][0]["secret_file"].startswith("/run/")
