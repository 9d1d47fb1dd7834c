"""A deployment: what an operator chooses, and the files that are rendered from it."""

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.errors import ConfigError
from phalanx.serve.access.listener import is_loopback

Target = Literal["container", "compose", "kubernetes", "systemd"]
TARGETS: dict[Target, tuple[str, ...]] = {
    "container": ("Containerfile",),
    "compose": ("compose.yaml",),
    "kubernetes": ("kubernetes.yaml", "kustomization.yaml"),
    "systemd": ("systemd.service",),
}
"""Templates of each target; a gateway's own file comes beside them, except in a container's image."""
_KEY_FOLDER = "/run/phalanx"
_DIGEST = r"[a-z0-9][a-z0-9._/:-]{0,200}@sha256:[0-9a-f]{64}"
# nothing that YAML, TOML, a shell or systemd reads as more than a name
_PATH = r"(\.?/)?[A-Za-z0-9_][A-Za-z0-9_./-]{0,200}"
_LABEL = r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?"
_MARKER = re.compile(r"\s+#@(serve|gateway)$")


class DeploymentPlan(StrictModel):
    """Choices of one deployment; every text is of characters that mean nothing in the files that it gets into.

    Attributes:
        service: The server of a model, or a gateway before an engine.
        name: Name of the service, of its secret and of its files.
        image: Image with its digest; a tag alone can be another image tomorrow.
        base_image: Image that the container file builds on, with its digest or a version as its tag.
        model: Directory of the model for compose and systemd; name of the volume claim with it for Kubernetes.
        model_name: Id of the model for clients.
        access: Directory of keys, budgets and log on the machine; for compose.
        server_name: Name in the certificate, which probes ask for.
        publish: Address of the machine that compose listens on.
        engine_url: Address of the engine behind a gateway.
        unsafe_plain_http: Reach an engine on another machine without TLS: its network can then read all texts.
    """

    service: Literal["serve", "gateway"]
    name: Annotated[str, Field(pattern=rf"^{_LABEL}\z")] = "phalanx"
    namespace: Annotated[str, Field(pattern=rf"^{_LABEL}\z")] = "phalanx"
    image: Annotated[str, Field(pattern=rf"^{_DIGEST}\z")] | None = None
    base_image: Annotated[str, Field(pattern=rf"^({_DIGEST}|[a-z0-9][a-z0-9._/-]*:[0-9][A-Za-z0-9._-]*)\z")] = (
        "docker.io/library/python:3.11-slim-bookworm"
    )
    model: Annotated[str, Field(pattern=rf"^{_PATH}\z")] | None = None
    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,100}\z")] = "model"
    access: Annotated[str, Field(pattern=rf"^{_PATH}\z")] = "./access"
    server_name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,200}[a-z0-9])?\z")] = "localhost"
    publish: Annotated[str, Field(pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){3}\z")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1024, le=65535)] = 8443
    cpus: Annotated[int, Field(ge=1, le=256)] = 2
    memory_mib: Annotated[int, Field(ge=256, le=1 << 20)] = 4096
    program: Annotated[str, Field(pattern=rf"^/{_PATH}\z")] = "/opt/phalanx/bin/phalanx"
    engine_url: Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9.-]{1,200}(:[0-9]{1,5})?\z")] | None = None
    unsafe_plain_http: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.service == "gateway" and self.engine_url is None:
            raise ValueError("engine_url: a gateway needs the address of an engine; give --engine")
        engine = urlsplit(self.engine_url or "")
        if engine.scheme == "http" and not is_loopback(engine.hostname or "") and not self.unsafe_plain_http:
            raise ValueError("engine_url: plain HTTP lets others read texts on the way; https, or --unsafe-plain-http")
        return self


def render_deployment(plan: DeploymentPlan, target: Target) -> dict[str, str]:
    """Return the files of one target by their names.

    Raises:
        ConfigError: The target needs a choice that the plan does not make.
    """
    if target in ("compose", "kubernetes") and plan.image is None:
        raise ConfigError(f"--image is missing: {target} runs an image, by its digest: NAME@sha256:...")
    if plan.service == "serve" and plan.model is None and target != "container":
        raise ConfigError(f"--model is missing: {target} needs the place of the model that is served")
    if target == "systemd" and plan.model is not None and not plan.model.startswith("/"):
        raise ConfigError(f"--model {plan.model}: a unit needs the whole path; begin it with /")
    values = _values(plan, target)
    names = [*TARGETS[target], *(("gateway.toml",) if plan.service == "gateway" and target != "container" else ())]
    return {_file_name(plan, name): _render(name, plan.service, values) for name in names}


def _file_name(plan: DeploymentPlan, template: str) -> str:
    renamed = {"kubernetes.yaml": f"{plan.name}.yaml", "systemd.service": f"{plan.name}.service"}
    return renamed.get(template, template)


def _render(template: str, service: str, values: dict[str, object]) -> str:
    """Fill a template; a line that ends in a service's marker is left out of the other service's file."""
    text = (files(__package__) / "templates" / template).read_text(encoding="utf-8")
    rows = [
        _MARKER.sub("", row)
        for row in text.splitlines()
        if (marker := _MARKER.search(row)) is None or marker[1] == service
    ]
    return Template("\n".join(rows) + "\n").substitute(values)


def _values(plan: DeploymentPlan, target: Target) -> dict[str, object]:
    is_unit = target == "systemd"
    # of a unit, systemd copies keys to where this service alone reads them
    key_folder = f"/run/credentials/{plan.name}.service" if is_unit else _KEY_FOLDER
    engine = urlsplit(plan.engine_url or "")
    command = _command(plan, is_unit=is_unit, key_folder=key_folder)
    return {
        **plan.model_dump(exclude={"service"}),
        "command": json.dumps(command),
        "exec_start": " ".join([plan.program, *command]),
        "compose_probe": json.dumps(["CMD", *_probe(plan, "ready")]),
        "live_probe": json.dumps(_probe(plan, "live")),
        "ready_probe": json.dumps(_probe(plan, "ready")),
        "cpu_percent": 100 * plan.cpus,
        "key_folder": key_folder,
        # a server refuses a key that others may read, and a copy of systemd's can look so
        "engine_key": f"/var/lib/{plan.name}/engine.key" if is_unit else f"{_KEY_FOLDER}/engine.key",
        "gateway_access": f"/var/lib/{plan.name}/access" if is_unit else "/access",
        "engine_port": engine.port or (443 if engine.scheme == "https" else 80),
        "engine_is_plain": json.dumps(plan.unsafe_plain_http),
        "engine_is_local": json.dumps(_is_in_cluster(engine.hostname)),
        "engine_peer": _engine_peer(engine.hostname),
    }


def _command(plan: DeploymentPlan, *, is_unit: bool, key_folder: str) -> Sequence[str]:
    if plan.service == "gateway":
        return ["gateway", f"/etc/{plan.name}/gateway.toml" if is_unit else "/config/gateway.toml"]
    model, access = (plan.model or "", f"/var/lib/{plan.name}/access") if is_unit else ("/model", "/access")
    listen = ["--host", "0.0.0.0", "--port", str(plan.port)]  # noqa: S104 - by TLS alone
    keys = ["--certificate", f"{key_folder}/tls.crt", "--private-key", f"{key_folder}/tls.key"]
    return [
        *("serve", model, "--name", plan.model_name, "--access", access),
        *listen,
        *keys,
        "--threads",
        str(plan.cpus),
    ]


def _probe(plan: DeploymentPlan, question: Literal["live", "ready"]) -> list[str]:
    path = f"/health/{question}" if plan.service == "serve" else "/health"
    place = ["--port", str(plan.port), "--path", path, "--server-name", plan.server_name]
    keys = ["--authority", f"{_KEY_FOLDER}/ca.crt", "--key-file", f"{_KEY_FOLDER}/probe.key"]
    alive = ["--any-status"] if question == "live" and plan.service == "gateway" else []
    return ["python", "-m", "phalanx.serve.probe", *place, *keys, *alive]


def _is_in_cluster(host: str | None) -> bool:
    """Whether a name is of a service of the same cluster or machine: a single label, or below ``svc``."""
    return host is not None and (
        "." not in host or host.endswith((".svc", ".svc.cluster.local")) or host == "127.0.0.1"
    )


def _engine_peer(host: str | None) -> str:
    """Return the only peer that a gateway may call: pods with a label, or the internet without private addresses."""
    if _is_in_cluster(host):
        return '{podSelector: {matchLabels: {phalanx-engine: "true"}}}'
    private = "[10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 169.254.0.0/16, 127.0.0.0/8]"
    return f"{{ipBlock: {{cidr: 0.0.0.0/0, except: {private}}}}}"
