"""``phalanx deploy``: write the files that run a server or a gateway in a container, compose, Kubernetes or systemd."""

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import Answer

DEPLOY_EPILOG = (
    "Example: phalanx deploy out --target systemd --model /srv/models/base --name base-server\n\n"
    "Example: phalanx deploy out --target kubernetes --image registry.example.org/phalanx@sha256:DIGEST "
    "--model base-claim\n\n"
    "Example: phalanx deploy out --target compose --service gateway --engine https://vllm:8000 "
    "--image registry.example.org/phalanx@sha256:DIGEST"
)


def deploy(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that the files are written into.")],
    *,
    target: Annotated[
        str, typer.Option("--target", help="Kind of deployment: container, compose, kubernetes or systemd.")
    ],
    service: Annotated[str, typer.Option("--service", help="Service to deploy: serve or gateway.")] = "serve",
    name: Annotated[str | None, typer.Option("--name", help="Name of the service; default: phalanx.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Kubernetes namespace; default: phalanx.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME@sha256:DIGEST", help="Container image, pinned by its digest.")
    ] = None,
    base_image: Annotated[str | None, typer.Option("--base-image", help="What the container file builds on.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Directory of the model; for Kubernetes the claim of its volume.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="Id of the model for clients; default: model.")
    ] = None,
    access: Annotated[
        str | None, typer.Option("--access", help="Directory of keys, for compose; default: ./access.")
    ] = None,
    server_name: Annotated[
        str | None, typer.Option("--server-name", help="Host name in the TLS certificate; default: localhost.")
    ] = None,
    publish: Annotated[
        str | None, typer.Option("--publish", help="Address that compose listens on; default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1024, max=65535, help="Port to listen on; default: 8443.")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus", min=1, max=256, help="Processor cores, at most; default: 2.")
    ] = None,
    memory_mib: Annotated[
        int | None, typer.Option("--memory-mib", min=256, help="Memory in MiB, at most; default: 4096.")
    ] = None,
    program: Annotated[
        str | None, typer.Option("--program", help="Path of phalanx, for systemd; default: /opt/phalanx/bin/phalanx.")
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", metavar="URL", help="Engine behind the gateway.")] = None,
    unsafe_plain_http: Annotated[
        bool, typer.Option("--unsafe-plain-http", help="Reach an engine elsewhere without TLS: texts can be read.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.")] = False,
) -> Answer:
    """Write hardened files of a deployment; keys, certificates and images are made elsewhere and only named in them."""
    from phalanx.cli.files import write_text
    from phalanx.config import config_of
    from phalanx.errors import ConfigError
    from phalanx.serve.deploy import TARGETS, DeploymentPlan, render_deployment

    chosen = next((choice for choice in TARGETS if choice == target), None)
    if chosen is None:
        raise ConfigError(f"--target {target}: choose one of {', '.join(TARGETS)}").with_facts(
            code="PHX-C002", key="--target", found=target, expected=", ".join(TARGETS)
        )
    values: dict[str, Any] = {
        "service": service,
        "name": name,
        "namespace": namespace,
        "image": image,
        "base_image": base_image,
        "model": model,
        "model_name": model_name,
        "access": access,
        "server_name": server_name,
        "publish": publish,
        "port": port,
        "cpus": cpus,
        "memory_mib": memory_mib,
        "program": program,
        "engine_url": engine,
        "unsafe_plain_http": unsafe_plain_http,
    }
    chosen_values = {key: value for key, value in values.items() if value is not None}
    plan = config_of(chosen_values, Path("phalanx deploy"), DeploymentPlan)
    texts = render_deployment(plan, chosen)
    existing = [file for file in texts if (out / file).exists()]
    if existing and not force:
        raise ConfigError(f"{out / existing[0]}: already exists; give another folder, or --force").with_facts(
            code="PHX-C021", file=str(out / existing[0]), do="give another folder, or --force"
        )
    for file, text in texts.items():
        write_text(out / file, text)
        typer.echo(f"wrote {out / file}")
    return Answer({"target": chosen, "files": [out / file for file in texts]})
