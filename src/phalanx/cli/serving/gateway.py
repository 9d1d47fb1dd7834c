"""``phalanx gateway``: keys, budgets, filters and log before engines of others."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.options import Sets


def gateway(
    file: Annotated[Path, typer.Argument(metavar="GATEWAY.toml", help="Where to listen, and the engines behind it.")],
    sets: Sets = None,
    check: Annotated[
        bool, typer.Option("--check", help="Read the file and the keys, say what they are, and end.")
    ] = False,
) -> Answer:
    """Let clients with keys of ``phalanx keys`` reach engines that speak the routes of OpenAI, and nobody else.

    It listens on this machine alone unless the file says otherwise, and then by TLS. Relative paths are of the
    folder of the file. SIGTERM and Ctrl-C let answers end first.
    """
    from phalanx.cli.serving.options import require_server

    require_server()
    from phalanx.serve.gateway import load_gateway_config, run_gateway

    config = load_gateway_config(file, sets or ())
    facts = {
        "listen": f"{config.listen.host}:{config.listen.port}",
        "access": config.access,
        "models": sorted({name for backend in config.backends for name in backend.models}),
        "engines": [backend.name for backend in config.backends],
    }
    if check:
        from phalanx.cli.console import print_figures
        from phalanx.serve.access import KeyStore

        facts["keys"] = len(KeyStore.open(config.access).list_keys())
        print_figures(facts)
        return Answer(facts)
    run_gateway(config, lambda address: typer.echo(f"gateway at {address}"))
    return Answer(facts)
