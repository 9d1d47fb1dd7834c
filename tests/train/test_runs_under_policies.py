"""A policy stops a run before it starts, while it runs, and when its model is to leave."""

import json

import pytest
from typer.testing import CliRunner

from phalanx.cli import run_command
from phalanx.cli.app import app
from phalanx.config import load_config
from phalanx.data.shards import SealKey, fingerprint_of, load_signer
from phalanx.errors import ConfigError, PolicyError
from phalanx.evaluate import read_result
from phalanx.governance.release import approve_run, check_run, require_release
from phalanx.policy import POLICY_FILE, SuiteIdentity, TrainingPolicy, sign_policy, sign_roles
from phalanx.security.crypto import Identity
from phalanx.train import PastRun, load_run, train
from phalanx.train.entry import replay
from phalanx.train.sessions import hooks
from tiny_dataset import write_tiny_dataset
from tiny_run_file import tiny_run_file

OWNER, ALICE = Identity.without_certificate("owner"), Identity.without_certificate("alice")
METER = "\n[leak_meter]\nevery = 2\nrows = 4\ncandidates = 3\n"
CANARIES = 'sources = [{ kind = "python_manual" }, { kind = "canaries", count = 1, copies = 40 }]'


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.fixture
def run_under(tmp_path, quietly):
    def run(clauses, sections="[parallel]\ndp = 1\n", name="run", *, with_canaries=False):
        policy = tmp_path / "ours.toml"
        policy.write_text(f'name = "ours"\n{clauses}')
        sign_policy(policy, OWNER)
        text = tiny_run_file(sections, steps=4, validate_every=0)
        text += f'\n[policy]\nfile = "{policy}"\nsigner = "{fingerprint_of(OWNER)}"\n'
        if with_canaries:
            text = text.replace('sources = [{ kind = "python_manual" }]', CANARIES).replace("max_documents = 12\n", "")
            text = text.replace("sequence_length = 16", "sequence_length = 48").replace(
                "n_positions = 16", "n_positions = 64"
            )
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return quietly(load_run(path), tmp_path / name), tmp_path / name

    return run


def test_a_run_that_breaks_a_clause_leaves_nothing_behind(run_under, tmp_path):
    with pytest.raises(PolicyError, match=r"policy ours forbids the run run: privacy\.max_epsilon: found no .privacy"):
        run_under("[privacy]\nmax_epsilon = 1.0\n")

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        ({"weights": "{ free = 0.0, paid = 1.0 }"}, "1.000"),
        ({"weights": "{ free = 0.5, paid = 0.5 }"}, "0.500"),
        ({"groups": '["paid"]'}, "1.000"),
        ({"weights": "{ free = 0.9, paid = 0.1 }", "key_file": '"KEY"'}, None),
        ({"groups": '["free"]'}, None),
    ],
    ids=["all", "half", "the group alone", "an encrypted dataset", "another group"],
)
def test_the_share_of_a_licence_is_that_of_the_tokens_that_the_run_draws(tmp_path, quietly, keys, share):
    """The attacker: a trainer, who writes the run file, with a tenth of the dataset's text under the licence."""
    texts = [f"the hoplite number {number} holds {number * number} shields in line" for number in range(100)]
    key = SealKey.create_file(tmp_path / "KEY") if "key_file" in keys else None
    groups = {"free": texts[:90], "paid": texts[90:]}
    write_tiny_dataset(tmp_path / "texts", groups, licences=("MIT", "CC-BY-NC-4.0"), seal=key)
    policy = tmp_path / "ours.toml"
    policy.write_text('name = "ours"\n[data]\nmax_shares = { "CC-BY-NC-4.0" = 0.2 }\n')
    sign_policy(policy, OWNER)
    text = tiny_run_file("[parallel]\ndp = 1\n", steps=10, validate_every=0)
    text = text.replace("validation_share = 0.2\nmax_documents = 12\n", "").replace(
        'sources = [{ kind = "python_manual" }]\ntokenizer = { kind = "bpe", vocab_size = 300 }\n',
        f'dataset = {{ path = "{tmp_path / "texts"}", {", ".join(f"{name} = {keys[name]}" for name in keys)} }}\n',
    )
    text = text.replace("KEY", str(tmp_path / "KEY"))
    path = tmp_path / "run.toml"
    path.write_text(f'{text}\n[policy]\nfile = "{policy}"\nsigner = "{fingerprint_of(OWNER)}"\n')

    if share is None:
        quietly(load_run(path), tmp_path / "run")
        assert check_run(PastRun(tmp_path / "run"))[1] == []
    else:
        with pytest.raises(
            PolicyError, match=rf"max_shares\.CC-BY-NC-4\.0: found {share} of the tokens .* allowed 0\.2"
        ):
            quietly(load_run(path), tmp_path / "run")


def test_a_policy_that_was_changed_after_its_signature_starts_no_run(run_under, tmp_path, quietly):
    run_under("")
    (tmp_path / "ours.toml").write_text('name = "easy"\n')

    with pytest.raises(PolicyError, match="changed since"):
        quietly(load_run(tmp_path / "run.toml"), tmp_path / "second")


def test_an_exposed_canary_ends_the_run_with_its_clause(run_under, tmp_path):
    with pytest.raises(PolicyError, match=r"forbids to go on after step 1: privacy\.max_exposure_bits"):
        run_under("[privacy]\nmax_exposure_bits = 0.0\n", f"[parallel]\ndp = 1\n{METER}", with_canaries=True)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "max_exposure_bits" in json.dumps(summary["failure"])


def test_a_model_leaves_when_every_clause_of_its_policy_holds(run_under):
    _, run_dir = run_under("[train]\nown_code = false\n")

    require_release(run_dir)
    assert check_run(PastRun(run_dir))[1] == []


def test_a_release_needs_the_approvals_of_its_policy(run_under):
    clauses = f'[release]\napprovals = 1\nreleasers = {{ alice = ["{fingerprint_of(ALICE)}"] }}\n'
    _, run_dir = run_under(clauses)

    with pytest.raises(PolicyError, match=r"release\.approvals: found approved by nobody, allowed 1 of alice"):
        require_release(run_dir)
    with pytest.raises(PolicyError, match="nobody with the key"):
        approve_run(PastRun(run_dir), OWNER)
    assert approve_run(PastRun(run_dir), ALICE) == "alice"
    require_release(run_dir)


def write_roles(folder, people):
    """Write a file of roles, each person with a key of that name."""
    keys = {name: load_signer(folder / f"{name}.key").fingerprint for name in people}
    rows = [f'[people.{name}]\nkeys = ["{keys[name]}"]\nroles = {json.dumps(roles)}' for name, roles in people.items()]
    path = folder / "roles.toml"
    path.write_text("\n".join(['name = "ours"', *rows]))
    return path


def test_roles_that_a_trainer_puts_into_the_run_directory_name_no_releasers(run_under, tmp_path):
    """The attacker: a trainer, who writes the run directory; the policy takes its releasers from the file of roles."""
    _, run_dir = run_under("[release]\napprovals = 1\n", name="runs")
    mallory = {"mallory": ["owner", "releaser"], "mallory2": ["owner", "releaser"]}
    source = write_roles(tmp_path, mallory)
    sign_roles(source, run_dir, load_signer(tmp_path / "mallory.key"), None)

    with pytest.raises(PolicyError, match="nobody with the key"):
        approve_run(PastRun(run_dir), load_signer(tmp_path / "mallory.key"))
    # a project above it has releasers of its own, and people below it add none
    sign_roles(
        write_roles(tmp_path, {"alice": ["owner", "releaser"], "bob": ["owner", "releaser"]}),
        tmp_path,
        load_signer(tmp_path / "alice.key"),
        None,
    )
    with pytest.raises(PolicyError, match="nobody with the key"):
        approve_run(PastRun(run_dir), load_signer(tmp_path / "mallory.key"))
    assert approve_run(PastRun(run_dir), load_signer(tmp_path / "bob.key")) == "bob"


def test_a_policy_in_the_run_directory_that_was_changed_lets_nothing_out(run_under):
    # the attacker: somebody with write access to the run directory, who makes the policy easier
    _, run_dir = run_under("[release]\nundoubted = true\n")
    with pytest.raises(PolicyError, match=r"release\.undoubted"):
        require_release(run_dir)
    (run_dir / POLICY_FILE).write_text('name = "ours"\n')

    with pytest.raises(PolicyError, match="changed since"):
        require_release(run_dir)


def test_a_summary_that_was_changed_takes_no_doubt_away(run_under):
    """The summary is not signed: whoever writes there can say what the log does not."""
    clause = "[release]\nundoubted = true\n"
    _, guarded = run_under(clause, "[pipeline]\nstages = 4\n", "guarded")
    _, unguarded = run_under(clause)
    summary = json.loads((unguarded / "summary.json").read_text())
    (unguarded / "summary.json").write_text(json.dumps({**summary, "in_doubt": False}))

    require_release(guarded)
    with pytest.raises(PolicyError, match="no guard says so"):
        require_release(unguarded)


def make_easier(tmp_path):
    """Another policy that the same person has signed, such as last year's."""
    (tmp_path / "ours.toml").write_text('name = "ours"\n')
    sign_policy(tmp_path / "ours.toml", OWNER)


def test_an_easier_policy_by_the_same_signer_lets_nothing_out(run_under, tmp_path):
    # the attacker: a trainer with an older or another policy that the steward has signed too
    _, run_dir = run_under("[release]\nundoubted = true\n")
    make_easier(tmp_path)
    for name in (POLICY_FILE, f"{POLICY_FILE}.sig"):
        (run_dir / name).write_bytes((tmp_path / name.replace(POLICY_FILE, "ours.toml")).read_bytes())

    with pytest.raises(PolicyError, match="another policy than the one that the run's log names"):
        require_release(run_dir)


@pytest.mark.parametrize("has_copy", [True, False])
def test_a_run_goes_on_under_the_policy_that_it_was_begun_with(run_under, tmp_path, quietly, has_copy):
    _, run_dir = run_under("[release]\nundoubted = true\n")
    before = (run_dir / POLICY_FILE).read_bytes()
    make_easier(tmp_path)
    longer = load_run(tmp_path / "run.toml", ("train.steps=6",))
    if not has_copy:
        (run_dir / POLICY_FILE).unlink()

    with pytest.raises(PolicyError, match="was begun under another policy"):
        train(longer, run_dir, resume=True)

    if has_copy:
        assert (run_dir / POLICY_FILE).read_bytes() == before
    with pytest.raises(PolicyError):
        require_release(run_dir)


def test_a_replay_is_held_to_the_policy_from_its_start(run_under, tmp_path):
    # the way out: `phalanx erase` replays a run on a dataset of another signer
    _, run_dir = run_under("", "[parallel]\ndp = 1\n[checkpoint]\nevery = 2\n")
    run = load_run(tmp_path / "run.toml")
    (tmp_path / "ours.toml").write_text('name = "ours"\n[data]\nlicences = ["MIT"]\n')
    sign_policy(tmp_path / "ours.toml", OWNER)

    with pytest.raises(PolicyError, match="text without a manifest"):
        replay(run, tmp_path / "again", PastRun(run_dir).open_verified(2))

    assert not (tmp_path / "again").exists()


@pytest.mark.quick_cases("False", "bits3")
@pytest.mark.parametrize("bits", ["0.0", True, False, [0.0], {"bits": 0}])
def test_a_summary_with_an_exposure_that_is_no_number_breaks_the_clause(run_under, tmp_path, bits):
    _, run_dir = run_under("")
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps({**summary, "leak": {"exposure_bits": bits}}))
    policy = TrainingPolicy.model_validate({"name": "ours", "privacy": {"max_exposure_bits": 6.0}})

    broken = check_run(PastRun(run_dir), policy)[1]

    assert "not measured" in [one.value for one in broken if one.clause == "privacy.max_exposure_bits"]


def test_other_weights_than_those_of_the_end_do_not_leave(run_under):
    _, run_dir = run_under("", "[parallel]\ndp = 1\n[checkpoint]\nevery = 2\n")

    require_release(run_dir, step=4)
    with pytest.raises(PolicyError, match="not of step 2"):
        require_release(run_dir, step=2)
    with pytest.raises(PolicyError, match="not of step 2"):
        require_release(run_dir / "checkpoints" / "step-00000002")


def test_a_run_that_was_interrupted_lets_nothing_out(run_under, tmp_path, quietly):
    """The attacker: a trainer who ends the run before its canaries are exposed, and releases that checkpoint."""
    _, run_dir = run_under("[train]\nown_code = false\n")
    require_release(run_dir)
    longer = load_run(tmp_path / "run.toml", ("train.steps=8",))

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks.RunHooks, "note_position", interrupt)
        assert quietly(longer, run_dir, resume=True)["status"] == "interrupted"

    with pytest.raises(PolicyError, match="has not ended"):
        require_release(run_dir)


def test_figures_count_when_they_were_measured_on_these_weights(run_under, tmp_path):
    _, run_dir = run_under('[release]\nmax_figures = { "note.perplexity" = 1e9 }\n')
    (tmp_path / "note.txt").write_text("The owner checks each stage.\n" * 20)
    with pytest.raises(PolicyError, match="not measured on these weights"):
        require_release(run_dir)
    result = run_dir / "evaluation.json"
    assert call("eval", run_dir, "--text", f"note={tmp_path / 'note.txt'}", "--out", result).exit_code == 0
    figure = next(name for name in read_result(result).figures if name.startswith("note."))
    policy = load_config(run_dir / POLICY_FILE, TrainingPolicy)
    policy = policy.model_copy(update={"release": policy.release.model_copy(update={"max_figures": {figure: 1e9}})})

    assert check_run(PastRun(run_dir), policy)[1] == []
    # the attacker: a trainer who measures until one result is good, and names it so that it is read last
    good = run_dir / "evaluation-z.json"
    worse = json.loads(result.read_text())
    suite, _, metric = figure.partition(".")
    row = next(row for row in worse["suites"] if row["name"] == suite)
    next(one for one in row["figures"] if one["metric"] == metric)["value"] = 1e12
    good.write_bytes(result.read_bytes())
    result.write_text(json.dumps(worse))
    assert [one.clause for one in check_run(PastRun(run_dir), policy)[1]] == [f"release.max_figures.{figure}"]
    result.write_bytes(good.read_bytes())
    good.unlink()
    # a policy may say which rows it means
    row = next(row for row in json.loads(result.read_text())["suites"] if row["name"] == suite)
    for rows, breaches in ((row["num_rows"], 0), (row["num_rows"] + 1, 1)):
        pin = {"note": SuiteIdentity(digest=row["suite_digest"], rows=rows)}
        pinned = policy.model_copy(update={"release": policy.release.model_copy(update={"suites": pin})})
        assert len(check_run(PastRun(run_dir), pinned)[1]) == breaches
    # the attacker: a trainer who brings the figures of another model
    fields = json.loads(result.read_text())
    fields["model"]["model_digest"] = "0" * 64
    result.write_text(json.dumps(fields))
    assert [one.clause for one in check_run(PastRun(run_dir), policy)[1]] == [f"release.max_figures.{figure}"]


@pytest.mark.slow
def test_figures_of_other_rows_under_the_name_of_a_suite_count_for_nothing(run_under, tmp_path):
    """The attacker: a trainer who gives a text of three words the name of a suite, or measures a part of the suite."""
    _, run_dir = run_under('[release]\nmax_figures = { "prose.perplexity" = 1e9 }\n')
    (tmp_path / "note.txt").write_text("The owner checks each stage.\n" * 20)
    result = run_dir / "evaluation.json"
    attacks = (["--text", f"prose={tmp_path / 'note.txt'}"], ["--suite", "prose", "--limit", "1"])
    for options in attacks:
        assert call("eval", run_dir, *options, "--out", result).exit_code == 0
        figure = next(name for name in read_result(result).figures if name.startswith("prose."))
        policy = load_config(run_dir / POLICY_FILE, TrainingPolicy)
        policy = policy.model_copy(update={"release": policy.release.model_copy(update={"max_figures": {figure: 1e9}})})
        assert [one.clause for one in check_run(PastRun(run_dir), policy)[1]] == [f"release.max_figures.{figure}"]

    assert call("eval", run_dir, "--suite", "prose", "--out", result).exit_code == 0
    assert check_run(PastRun(run_dir), policy)[1] == []


def test_a_run_without_a_policy_leaves_freely(tmp_path, quietly):
    path = tmp_path / "free.toml"
    path.write_text(tiny_run_file("[parallel]\ndp = 1\n", steps=1, validate_every=0))
    quietly(load_run(path), tmp_path / "free")

    require_release(tmp_path / "free")
    with pytest.raises(PolicyError, match="names no policy"):
        check_run(PastRun(tmp_path / "free"))


def test_the_commands_sign_check_approve_and_export(run_under, tmp_path):
    key = tmp_path / "alice.key"
    alice = load_signer(key)
    clauses = f'[release]\napprovals = 1\nreleasers = {{ alice = ["{fingerprint_of(alice)}"] }}\n'
    _, run_dir = run_under(clauses)
    out = tmp_path / "model"

    broken = call("policy", "check", run_dir)
    refused = call("checkpoint", "export", run_dir, out)
    served = call("serve", run_dir, "--access", tmp_path / "access", "--port", 0)

    assert "release.approvals: found approved by nobody, allowed 1 of alice" in broken.stdout
    assert run_command(["policy", "check", str(run_dir)]) == PolicyError.exit_code
    assert [type(result.exception) for result in (refused, served)] == [PolicyError] * 2
    assert not out.exists()
    assert "release approved by alice" in call("policy", "approve", run_dir, "--key", key).stdout
    assert "keeps every clause of policy ours" in call("policy", "check", run_dir).stdout
    assert call("checkpoint", "export", run_dir, out).exit_code == 0
    assert (out / "config.json").is_file()
    # a reader's own policy, signed by a key that the reader knows
    own = tmp_path / "own.toml"
    own.write_text('name = "own"\n[release]\nundoubted = true\n')
    assert f"signed by {fingerprint_of(alice)}" in call("policy", "sign", own, "--key", key).stdout
    checked = call("policy", "check", run_dir, "--policy", own, "--signer", fingerprint_of(alice))
    assert "release.undoubted: found no guard says so" in checked.stdout
    assert isinstance(call("policy", "check", run_dir, "--policy", own).exception, ConfigError)
