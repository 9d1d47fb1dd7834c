"""All verbs in one app."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from phalanx import __version__
from phalanx.cli.align.group import align_app
from phalanx.cli.answers.tree import EXIT_CODES
from phalanx.cli.attack import attack
from phalanx.cli.audit import audit_app
from phalanx.cli.bench import bench
from phalanx.cli.calibrate import calibrate
from phalanx.cli.data.group import data_app
from phalanx.cli.data.tokenizer import tokenizer_app
from phalanx.cli.doctor import doctor
from phalanx.cli.enclave import enclave_app
from phalanx.cli.explain import explain
from phalanx.cli.governance.erase import ERASE_EPILOG, erase
from phalanx.cli.governance.forms import FORMS_EPILOG, forms
from phalanx.cli.governance.passport import PASSPORT_EPILOG, VERIFY_EPILOG, passport, verify
from phalanx.cli.governance.policy import policy_app
from phalanx.cli.governance.publish import PUBLISH_EPILOG, publish
from phalanx.cli.governance.reverify import REVERIFY_EPILOG, reverify
from phalanx.cli.governance.roles import roles_app
from phalanx.cli.governance.unlearn import UNLEARN_EPILOG, unlearn
from phalanx.cli.init import init
from phalanx.cli.launch import launch
from phalanx.cli.lr import lr
from phalanx.cli.models.checkpoint import checkpoint_app
from phalanx.cli.models.classify import CLASSIFY_EPILOG, classify
from phalanx.cli.models.evaluate import EVAL_EPILOG, evaluate
from phalanx.cli.models.export import EXPORT_EPILOG, export
from phalanx.cli.models.generate import generate
from phalanx.cli.models.laptop import LAPTOP_EPILOG, laptop
from phalanx.cli.models.model import model_app
from phalanx.cli.models.redteam import REDTEAM_EPILOG, redteam
from phalanx.cli.options import PLAN_EXAMPLES
from phalanx.cli.parties.invite import invite
from phalanx.cli.parties.join import join
from phalanx.cli.parties.peers import peers
from phalanx.cli.parties.pki import pki_app
from phalanx.cli.parties.site import flower_app, nvflare_job, site
from phalanx.cli.parties.witness import witness_app
from phalanx.cli.parties.workers import client, rollout_worker, stage_worker
from phalanx.cli.plan import plan
from phalanx.cli.report import report
from phalanx.cli.reproduce import reproduce
from phalanx.cli.runs.interpret import interpret_app
from phalanx.cli.runs.listing import COMPARE_EPILOG, RUNS_EPILOG, compare, runs
from phalanx.cli.runs.sweep import SWEEP_EPILOG, sweep
from phalanx.cli.serving.deploy import DEPLOY_EPILOG, deploy
from phalanx.cli.serving.detect import DETECT_EPILOG, detect
from phalanx.cli.serving.gateway import gateway
from phalanx.cli.serving.incident import incident_app
from phalanx.cli.serving.keys import keys_app
from phalanx.cli.serving.mark import mark_app
from phalanx.cli.serving.serve import serve
from phalanx.cli.serving.watch import WATCH_EPILOG, watch
from phalanx.cli.train import train
from phalanx.cli.worker import masked_worker, worker


def _example_of(command: Callable[..., object]) -> str:
    name = command.__name__.replace("_", "-")
    return f"Example: phalanx {name} {name.split('-')[-1]}.toml"


# By panel of the help; a group has no epilog of its own here.
PANELS: dict[str, dict[str, tuple[Callable[..., object], str] | typer.Typer]] = {
    "Start here": {
        "doctor": (
            doctor,
            "Example: phalanx doctor --identity pki/alice\n\nExit codes: 0 all checks pass, 2 wrong command line, 3 a "
            "check fails.",
        ),
        "init": (
            init,
            "Example: phalanx init run.toml --kind scratch --data my_texts\n\n"
            "Example: phalanx init tune.toml --kind finetune --model models/mine --data notes.jsonl\n\n"
            "Example: phalanx init shared.toml --kind remote --workers alice,bob",
        ),
        "train": (train, "Example: phalanx train run.toml --set train.steps=100 --run-dir runs/first"),
        "report": (report, "Example: phalanx report runs/first"),
        "generate": (
            generate,
            'Example: phalanx generate runs/first --prompt "The owner" --max-new-tokens 40\n\n'
            "Example: phalanx generate runs/first --input prompts.jsonl --out texts.jsonl --temperature 0",
        ),
        "classify": (classify, CLASSIFY_EPILOG),
        "laptop": (laptop, LAPTOP_EPILOG),
        "explain": (explain, "Example: phalanx explain PHX-C005"),
    },
    "Data": {"data": data_app, "tokenizer": tokenizer_app, "align": align_app},
    "Plan, launch and search": {
        "plan": (plan, PLAN_EXAMPLES),
        "launch": (
            launch,
            "Example: phalanx launch run.toml --set pipeline.pki=keys --dry-run\n\n"
            "Example: phalanx launch run.toml --engine ray --address auto --resume\n\n"
            "Example: phalanx launch run.toml --party alice --owner owner.example.org:7070",
        ),
        "lr": (lr, "Example: phalanx lr run.toml --to 0.1 --steps 100 --out rates.svg"),
        "sweep": (sweep, SWEEP_EPILOG),
    },
    "Watch and compare": {
        "watch": (watch, WATCH_EPILOG),
        "runs": (runs, RUNS_EPILOG),
        "compare": (compare, COMPARE_EPILOG),
        "interpret": interpret_app,
    },
    "Parties of a run": {
        "invite": (invite, "Example: phalanx invite run.toml --name alice --host owner.example.org"),
        "join": (
            join,
            "Example: phalanx join phx1-...\n\nExample: phalanx join phx1-... --train train.csv --test test.csv",
        ),
        "peers": (
            peers,
            "Example: phalanx peers runs/first\n\nExample: phalanx peers runs/first --revoke alice --reason stolen",
        ),
        "worker": (worker, _example_of(worker)),
        "masked-worker": (masked_worker, _example_of(masked_worker)),
        "rollout-worker": (rollout_worker, _example_of(rollout_worker)),
        "stage-worker": (stage_worker, _example_of(stage_worker)),
        "client": (client, _example_of(client)),
        "site": (site, _example_of(site)),
        "nvflare-job": (nvflare_job, "Example: phalanx nvflare-job run.toml job"),
        "flower-app": (flower_app, "Example: phalanx flower-app run.toml app"),
        "enclave": enclave_app,
        "pki": pki_app,
    },
    "Models": {
        "model": model_app,
        "checkpoint": checkpoint_app,
        "export": (export, EXPORT_EPILOG),
        "eval": (evaluate, EVAL_EPILOG),
        "redteam": (redteam, REDTEAM_EPILOG),
    },
    "Serve": {
        "serve": (
            serve,
            "Example: phalanx keys create --owner alice && phalanx serve runs/first --name first\n\n"
            "Example: phalanx serve models/base --name base --adapter notes=adapters/notes --port 0 --json\n\n"
            "Example: phalanx serve runs/first --host 0.0.0.0 --certificate server.pem --private-key server.key\n\n"
            "Example: phalanx serve models/base --stages stages.toml",
        ),
        "gateway": (
            gateway,
            "Example: phalanx gateway gateway.toml\n\nExample: phalanx gateway gateway.toml --check",
        ),
        "keys": keys_app,
        "mark": mark_app,
        "detect": (detect, DETECT_EPILOG),
        "deploy": (deploy, DEPLOY_EPILOG),
        "incident": incident_app,
    },
    "Prove and govern": {
        "audit": audit_app,
        "passport": (passport, PASSPORT_EPILOG),
        "verify": (verify, VERIFY_EPILOG),
        "publish": (publish, PUBLISH_EPILOG),
        "reverify": (reverify, REVERIFY_EPILOG),
        "witness": witness_app,
        "policy": policy_app,
        "roles": roles_app,
        "forms": (forms, FORMS_EPILOG),
        "erase": (erase, ERASE_EPILOG),
        "unlearn": (unlearn, UNLEARN_EPILOG),
    },
    "Measure Phalanx itself": {
        "bench": (bench, "Example: phalanx bench pipeline --quick --json --out pipeline.json"),
        "attack": (attack, "Example: phalanx attack examples/quickstart.toml --kinds drift,framing --rate 0.5"),
        "reproduce": (reproduce, "Example: phalanx reproduce defence --quick --out defence.json"),
        "calibrate": (calibrate, "Example: phalanx calibrate examples/quickstart.toml --quick --out calibration.json"),
    },
}


class PanelGroup(TyperGroup):
    """Commands and groups in the order of the panels; typer would list all groups behind all commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for entries in PANELS.values() for name in entries]


app = typer.Typer(
    name="phalanx",
    cls=PanelGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    # a traceback with the values of local variables could show a key
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phalanx {__version__}")
        raise typer.Exit()


@app.callback(epilog=f"Example: phalanx train examples/quickstart.toml\n\n{EXIT_CODES}")
def phalanx(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models on machines you do not have to trust."""


for panel, entries in PANELS.items():
    for name, entry in entries.items():
        if isinstance(entry, typer.Typer):
            app.add_typer(entry, name=name, rich_help_panel=panel)
        else:
            command, epilog = entry
            app.command(name, epilog=epilog, rich_help_panel=panel)(command)
