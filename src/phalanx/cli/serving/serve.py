"""``phalanx serve``: answer requests for text over HTTP."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer, for_programs, print_object

if TYPE_CHECKING:
    from phalanx.serve.server import Listening

_Named = "NAME=DIR"


def serve(
    where: Annotated[Path, typer.Argument(metavar="RUN_DIR|DIR", help="A run, a checkpoint in one, or a model.")],
    *,
    access: Annotated[
        Path, typer.Option("--access", metavar="DIR", help="Directory of keys, budgets and the log.")
    ] = Path("access"),
    name: Annotated[
        str | None, typer.Option("--name", help="Id of the model for clients; default: its folder.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar=_Named, help="A further model; may be repeated.")
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option("--adapter", metavar=_Named, help="A LoRA adapter of the first model.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; others than loopback need TLS.")] = (
        "127.0.0.1"
    ),
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 takes any free one.")
    ] = 8080,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", metavar="FILE", help="TLS certificate, PEM.")
    ] = None,
    private_key: Annotated[
        Path | None, typer.Option("--private-key", metavar="FILE", help="Private key of the certificate, PEM.")
    ] = None,
    client_authority: Annotated[
        Path | None,
        typer.Option(
            "--client-authority", metavar="FILE", help="Authority, PEM; clients must show a certificate that it signed."
        ),
    ] = None,
    filters: Annotated[
        Path | None, typer.Option("--filters", metavar="FILE.toml", help="Filters of prompts and answers.")
    ] = None,
    mark_keys: Annotated[
        Path | None, typer.Option("--mark-keys", metavar="FILE", help="Mark texts by the keys in this file.")
    ] = None,
    mark: Annotated[
        str, typer.Option("--mark", help="With --mark-keys: on, or required, which allows no text without a mark.")
    ] = "on",
    mark_greedy: Annotated[
        str, typer.Option("--mark-greedy", help="Marking at temperature 0: bias, refuse or plain.")
    ] = "bias",
    watch: Annotated[
        Path | None, typer.Option("--watch", metavar="FILE.toml", help="Settings of alerts, webhook and traces.")
    ] = None,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, max=1024, help="Texts generated at the same time.")
    ] = 32,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=1, max=65536, help="Requests in the queue; others get 503.")
    ] = 128,
    max_cache_tokens: Annotated[
        int, typer.Option("--max-cache-tokens", min=64, help="Size of the key-value cache, in tokens.")
    ] = 65536,
    int8: Annotated[bool, typer.Option("--int8", help="Compute linear layers in 8-bit integers; faster.")] = False,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="The same bits whatever else is in the batch; slower alone.")
    ] = False,
    threads: Annotated[
        int, typer.Option("--threads", min=0, max=1024, help="Threads of torch; 0 lets torch choose.")
    ] = 0,
    drain_s: Annotated[
        int, typer.Option("--drain-s", min=0, max=3600, help="Seconds after SIGTERM for requests to finish.")
    ] = 30,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Show browsers the chat page at /.")] = True,
    page_name: Annotated[
        list[str] | None, typer.Option("--page-name", metavar="HOST", help="Host name of a proxy in front of the page.")
    ] = None,
    chat_link: Annotated[
        str | None, typer.Option("--chat-link", metavar="KEY", help="Print a link that signs a browser in once.")
    ] = None,
    stages: Annotated[
        Path | None,
        typer.Option("--stages", metavar="FILE.toml", help="Parties that hold the layers between the first and last."),
    ] = None,
    seal_texts: Annotated[
        Path | None,
        typer.Option(
            "--seal-texts", metavar="FILE.pub", help="Also log texts, encrypted to a key of phalanx keys text-key."
        ),
    ] = None,
    own_code: Annotated[bool, typer.Option("--own-code", help="Run the code in RUN_DIR/code; read it first.")] = False,
) -> Answer:
    """Serve a model by the protocols of OpenAI and Anthropic; every route needs a key of `phalanx keys create`."""
    from pydantic import ValidationError

    from phalanx.cli.serving.options import config_error, named_directories, require_server
    from phalanx.serve.place import check_place

    check_place(where)
    require_server()
    further, adapters = named_directories("--model", model), named_directories("--adapter", adapter)
    for directory in further.values():
        check_place(directory)
    from phalanx.config import load_config
    from phalanx.governance.release import require_release
    from phalanx.serve.access import ListenConfig
    from phalanx.serve.engine import EngineSettings
    from phalanx.serve.filters import FiltersConfig
    from phalanx.serve.marks import MarkPolicy
    from phalanx.serve.observe import WatchConfig, load_watch_config
    from phalanx.serve.server import ServerPlan, run_server
    from phalanx.serve.stages import StagesConfig

    try:
        listen = ListenConfig(
            host=host,
            port=port,
            certificate=certificate,
            private_key=private_key,
            client_authority=client_authority,
        )
        policy = MarkPolicy.model_validate({"mark": "off" if mark_keys is None else mark, "greedy": mark_greedy})
        engine = EngineSettings(
            max_rows=max_rows, max_waiting=max_waiting, max_cache_tokens=max_cache_tokens, reproducible=reproducible
        )
    except ValidationError as exc:
        raise config_error(exc) from exc
    plan = ServerPlan(
        models={name or where.resolve().name: where, **further},
        access=access,
        adapters=adapters,
        listen=listen,
        engine=engine,
        filters=FiltersConfig() if filters is None else load_config(filters, FiltersConfig),
        mark=policy,
        mark_keys=mark_keys,
        watch=WatchConfig() if watch is None else load_watch_config(watch),
        weights="int8" if int8 else "float",
        drain_s=drain_s,
        num_threads=threads,
        own_code=own_code,
        has_chat_page=page,
        page_names=tuple(page_name or ()),
        link_key=chat_link,
        stages=None if stages is None else load_config(stages, StagesConfig),
        seal_texts=seal_texts,
    )

    for directory in plan.models.values():
        require_release(directory)
    run_server(plan, partial(_announce_server, page=page))
    return Answer({"event": "stopped"})


def _announce_server(listening: "Listening", *, page: bool) -> None:
    facts = {"event": "ready", "url": listening.url, "models": {card.id: card.digest for card in listening.cards}}
    print_object(facts if listening.chat_link is None else {**facts, "chat_link": listening.chat_link})
    if not for_programs():
        names = ", ".join(f"{card.id} ({card.digest[:12]})" for card in listening.cards)
        typer.echo(f"ready: {listening.url} serves {names}")
        if listening.chat_link is not None:
            typer.echo(f"chat, once and within ten minutes: {listening.chat_link}")
        elif page:
            typer.echo(f"chat in a browser: {listening.url}/ asks for a key")
