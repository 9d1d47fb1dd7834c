"""All verbs in one app."""

from typing import Annotated

import typer

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

app = typer.Typer(
    name="phalanx",
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


app.command(
    epilog="Example: phalanx doctor --identity pki/alice\n\nExit codes: 0 all checks pass, 2 wrong command line, 3 a "
    "check fails."
)(doctor)
app.command(epilog="Example: phalanx explain PHX-C005")(explain)
app.command(
    epilog="Example: phalanx init run.toml --kind scratch --data my_texts\n\n"
    "Example: phalanx init tune.toml --kind finetune --model models/mine --data notes.jsonl\n\n"
    "Example: phalanx init shared.toml --kind remote --workers alice,bob"
)(init)
app.command(epilog="Example: phalanx train run.toml --set train.steps=100 --run-dir runs/first")(train)
app.command(epilog=LAPTOP_EPILOG)(laptop)
app.command(epilog="Example: phalanx nvflare-job run.toml job")(nvflare_job)
app.command(epilog="Example: phalanx flower-app run.toml app")(flower_app)
app.command(epilog="Example: phalanx invite run.toml --name alice --host owner.example.org")(invite)
app.command(epilog="Examples: phalanx join phx1-...; phalanx join phx1-... --train train.csv --test test.csv")(join)
app.command(epilog="Examples: phalanx peers runs/first; phalanx peers runs/first --revoke alice --reason stolen")(peers)
for one in (client, site, worker, masked_worker, rollout_worker, stage_worker):
    app.command(epilog=f"Example: phalanx {one.__name__.replace('_', '-')} {one.__name__.split('_')[-1]}.toml")(one)
app.command(
    epilog="Example: phalanx launch run.toml --set pipeline.pki=keys --dry-run\n\n"
    "Example: phalanx launch run.toml --engine ray --address auto --resume\n\n"
    "Example: phalanx launch run.toml --party alice --owner owner.example.org:7070"
)(launch)
app.command(epilog="Example: phalanx lr run.toml --to 0.1 --steps 100 --out rates.svg")(lr)
app.command(epilog=PLAN_EXAMPLES)(plan)
app.command(epilog="Example: phalanx report runs/first")(report)
app.command(epilog=WATCH_EPILOG)(watch)
app.command(epilog=RUNS_EPILOG)(runs)
app.command(epilog=COMPARE_EPILOG)(compare)
app.command(epilog=SWEEP_EPILOG)(sweep)
app.command(
    epilog='Example: phalanx generate runs/first --prompt "The owner" --max-new-tokens 40\n\n'
    "Example: phalanx generate runs/first --input prompts.jsonl --out texts.jsonl --temperature 0"
)(generate)
app.command(
    epilog="Example: phalanx serve runs/first --access access\n\n"
    "Example: phalanx serve models/base --name base --adapter notes=adapters/notes --port 0 --json\n\n"
    "Example: phalanx serve runs/first --host 0.0.0.0 --certificate server.pem --private-key server.key\n\n"
    "Example: phalanx serve models/base --stages stages.toml"
)(serve)
app.command(epilog="Example: phalanx gateway gateway.toml\n\nExample: phalanx gateway gateway.toml --check")(gateway)
app.command(epilog=DEPLOY_EPILOG)(deploy)
app.command(epilog=ERASE_EPILOG)(erase)
app.command(epilog=UNLEARN_EPILOG)(unlearn)
app.command(epilog=PASSPORT_EPILOG)(passport)
app.command(epilog=FORMS_EPILOG)(forms)
app.command(epilog=VERIFY_EPILOG)(verify)
app.command(epilog=PUBLISH_EPILOG)(publish)
app.command(epilog=REVERIFY_EPILOG)(reverify)
app.command(epilog=DETECT_EPILOG)(detect)
app.command(epilog=EXPORT_EPILOG)(export)
app.command(epilog=REDTEAM_EPILOG)(redteam)
app.command("eval", epilog=EVAL_EPILOG)(evaluate)
app.command(epilog="Example: phalanx bench pipeline --quick --json --out pipeline.json")(bench)
app.command(epilog="Example: phalanx attack examples/quickstart.toml --kinds drift,framing --rate 0.5")(attack)
app.command(epilog="Example: phalanx reproduce defence --quick --out defence.json")(reproduce)
app.command(epilog="Example: phalanx calibrate examples/quickstart.toml --quick --out calibration.json")(calibrate)
GROUPS = {"align": align_app, "audit": audit_app, "checkpoint": checkpoint_app, "data": data_app}
GROUPS |= {"enclave": enclave_app, "incident": incident_app, "keys": keys_app, "mark": mark_app, "model": model_app}
GROUPS |= {"interpret": interpret_app, "pki": pki_app, "policy": policy_app, "tokenizer": tokenizer_app}
GROUPS |= {"roles": roles_app, "witness": witness_app}
for name, group in GROUPS.items():
    app.add_typer(group, name=name)
