"""``phalanx witness``: cosign heads of audit logs, publish a run's log, and find logs with two histories."""

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer, for_programs, print_object
from phalanx.cli.console import print_line
from phalanx.cli.parties.witness_log import (
    compare_logs,
    mirror_log,
    print_keys,
    prove_line,
    publish_log,
    verify_line,
)
from phalanx.errors import ConfigError

Home = Annotated[Path, typer.Argument(metavar="HOME", help="Directory of the witness: its keys and its memory.")]

witness_app = typer.Typer(
    name="witness",
    help="Have the heads of audit logs cosigned by others, so that nobody can be shown another history.",
    epilog="Example: phalanx witness init w1 --name example.org/w1 && phalanx witness trust w1 first.vkey && "
    "phalanx witness serve w1 --port 7100",
    no_args_is_help=True,
)
witness_app.command("keys", epilog="Example: phalanx witness keys runs/first > first.vkey")(print_keys)
witness_app.command("publish", epilog="Example: phalanx witness publish runs/first --policy policy --to public/first")(
    publish_log
)
witness_app.command(
    "prove", epilog="Example: phalanx witness prove runs/first --from public/first --line 12 --out line.tlog-proof"
)(prove_line)
witness_app.command("verify", epilog="Example: phalanx witness verify line.tlog-proof --policy policy")(verify_line)
witness_app.command(
    "compare",
    epilog="Example: phalanx witness compare public/first https://example.org/first --policy policy --out fork.json\n\n"
    "Example: phalanx witness compare fork.json --policy policy",
)(compare_logs)
witness_app.command(
    "mirror", epilog="Example: phalanx witness mirror m1 https://owner.example.org/first copy --policy policy"
)(mirror_log)


@witness_app.command("init", epilog="Example: phalanx witness init w1 --name example.org/w1")
def make_home(
    home: Home,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name in signatures, such as HOST/PATH.")],
) -> Answer:
    """Make the keys of a witness, Ed25519 and ML-DSA-44, and print their public halves for policy files."""
    from phalanx.security.witness import make_witness

    keys = [key.to_text() for key in make_witness(home, name).keys]
    for key in keys:
        typer.echo(key)
    return Answer({"home": home, "name": name, "keys": keys})


@witness_app.command("trust", epilog="Example: phalanx witness trust w1 first.vkey")
def trust_log(
    home: Home,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Keys of a log, a line each, as phalanx witness keys prints them.")
    ],
) -> Answer:
    """Have the witness cosign a log; a running one reads its list at each request."""
    from phalanx.security.witness import NoteKey, add_log

    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file}: cannot be read; give a file of keys as phalanx witness keys prints them") from exc
    keys = [NoteKey.from_text(line) for line in lines]
    add_log(home, keys)
    print_line(f"{home}: cosigns {keys[0].name}")
    return Answer({"home": home, "origin": keys[0].name, "keys": len(keys)})


@witness_app.command("serve", epilog="Example: phalanx witness serve w1 --port 7100")
def serve_witness(
    home: Home,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a certificate.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 7100,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="TLS certificate, PEM.")] = None,
    private_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key of the certificate, PEM.")
    ] = None,
    both: Annotated[
        bool, typer.Option("--both", help="Cosign only what a log signed by Ed25519 and by ML-DSA-44.")
    ] = False,
) -> Answer:
    """Answer requests for cosignatures until Ctrl-C or SIGTERM."""
    from phalanx.cli.serving.options import require_server

    require_server()
    from phalanx.security.witness import Witness
    from phalanx.security.witness import witness_app as asgi_app
    from phalanx.serve.access import ListenConfig, RequestBounds, bind_socket, make_server

    listen = ListenConfig(host=host, port=port, certificate=certificate, private_key=private_key)
    with Witness(home, unix_time=time.time, demand_both=both) as witness:
        server = make_server(asgi_app(witness), listen, RequestBounds(), drain_s=3)
        sock = bind_socket(listen)
        sock.listen()
        url = f"{'http' if certificate is None else 'https'}://{host}:{sock.getsockname()[1]}"
        print_object({"event": "ready", "url": url})
        if not for_programs():
            typer.echo(f"witness {witness.signer.name} at {url}")
        asyncio.run(server.serve(sockets=[sock]))
    return Answer({"event": "stopped"})
