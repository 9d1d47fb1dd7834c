"""A stranger recomputes a published run, and finds what its owner altered and signed anew."""

import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from lying_owner import LyingOwner, sign_publication
from rich.console import Console

from phalanx.checkpoint.manifest import CheckpointManifest, sign_manifest
from phalanx.cli.outcome import run_command
from phalanx.config import canonical_json
from phalanx.errors import AuditLogError, ConfigError, InputError, VerificationError
from phalanx.governance import publication, recomputation
from phalanx.governance.publication import PublicationChoice, Publisher, open_publication, spread_states
from phalanx.governance.recomputation import Laboratory, RunSegment
from phalanx.governance.reverify import (
    ATTESTATION_FILE,
    RequestedPlaces,
    Reverification,
    Reverifier,
    check_attestation,
    sign_attestation,
)
from phalanx.security.crypto import Identity
from phalanx.train import PastRun, load_run, train
from phalanx.train.records.history import CONFIG_CHANGED
from phalanx.verifier.forms import RefusedError
from tiny_run_file import tiny_run_file

SLOW = pytest.mark.slow
STRANGER = Identity.without_certificate("stranger")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose owner has all stages, with a state of every step; not to be changed."""
    home = tmp_path_factory.mktemp("reverify")
    (home / "run.toml").write_text(tiny_run_file("[pipeline]\nstages = 2\n\n[checkpoint]\nevery = 1\nkeep = 20\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(home / ".cache"))
        train(load_run(home / "run.toml"), home / "run", console=Console(file=io.StringIO()))
    return home


@pytest.fixture(autouse=True)
def cache(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(home / ".cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def owner(home: Path, tmp_path: Path) -> LyingOwner:
    shutil.copytree(home / "run", tmp_path / "owner")
    return LyingOwner(tmp_path / "owner")


@pytest.fixture(scope="module")
def published_once(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(home / ".cache"))
        return publish(home / "run", home / "published")


@pytest.fixture
def published(published_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published_once, tmp_path / "published"))


def publish(run: Path, out: Path, **choice: Any) -> Path:
    Publisher(PastRun(run), PublicationChoice(**{"with_data": True, **choice})).publish_run(out)
    return out


def open_stranger(path: Path, home: Path) -> Reverifier:
    return Reverifier(open_publication(path), RequestedPlaces(home / "of-strangers"))


def recompute(path: Path, home: Path, *steps: int) -> Reverification:
    """Recompute the steps, each from the state before it, in a directory that nothing was in."""
    stranger = open_stranger(path, home)
    segments = [RunSegment(step, step + 1) for step in steps]
    return stranger.recompute_segments(segments, ("seed", "1"), path.parent / f"{path.name}-work")


# --- an honest run --------------------------------------------------------------------------------------


def test_a_stranger_recomputes_a_drawn_share_and_attests_to_it(
    home: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reverify", str(published), "--share", "1/20", "--out", str(tmp_path / "work"), "--json"]
    words += ["--certificate", str(home / "run" / "owner.pem")]

    assert run_command([*words, "--dry-run"]) == 0
    price = json.loads(capsys.readouterr().out)["price"]
    assert (price["steps"], price["num_steps"], price["tokens"]) == (1, 6, 128)
    assert price["size_bytes"] == open_publication(published).size_bytes > 2_000_000
    assert not (tmp_path / "work").exists()
    assert run_command(words) == 0

    answer = json.loads(capsys.readouterr().out)
    assert (answer["verdict"], answer["recomputed"], answer["ordered"]) == ("proved", 1, 6)
    assert answer["remarks"] == []
    assert answer["cost"]["cpu_seconds"] > 0
    data = (tmp_path / "work" / ATTESTATION_FILE).read_bytes()
    signer = json.loads(data)["signatures"][0]["keyid"]
    attested = check_attestation(data, signer, open_publication(published))
    assert (attested["verdict"], attested["seed"], attested["share"]) == ("proved", answer["seed"], "1/20")
    verify = ["verify", str(tmp_path / "work" / ATTESTATION_FILE), "--signer"]
    assert run_command([*verify, signer]) == 0
    assert "attestation of a stranger: holds" in capsys.readouterr().out
    assert run_command([*verify, "0" * 64]) == 5
    with pytest.raises(RefusedError):
        check_attestation(data, STRANGER.public.public_key.hex(), open_publication(published))


def test_every_step_is_proved_and_the_draw_can_be_repeated(home: Path, published: Path) -> None:
    stranger = open_stranger(published, home)

    found = recompute(published, home, *range(6))

    assert (found.verdict, found.recomputed, found.reasons) == ("proved", 6, ())
    # commitments of two stages and the clip coefficient of each step, two stages of each state, the final weights
    assert sum(result.compared for result in found.results) == 6 * 3 + 6 * 2 + 1
    draws = [stranger.draw_segments(Fraction(1, 6), str(number)) for number in range(240)]
    assert draws[7] == stranger.draw_segments(Fraction(1, 6), "7")
    counts = Counter(segment.start for (segment,) in draws)
    assert set(counts) == set(range(6))
    assert min(counts.values()) > 20


def test_an_attestation_is_about_one_publication(home: Path, published: Path, tmp_path: Path) -> None:
    signed = open_publication(published)
    data = sign_attestation(recompute(published, home, 4), signed, STRANGER)
    other = open_publication(publish(home / "run", tmp_path / "other", every=3))

    assert check_attestation(data, STRANGER.public.public_key.hex(), signed)["verdict"] == "proved"
    with pytest.raises(VerificationError, match="another publication"):
        check_attestation(data, STRANGER.public.public_key.hex(), other)


def test_an_interrupted_stranger_goes_on_where_it_was(home: Path, published: Path, tmp_path: Path) -> None:
    stranger, told = open_stranger(published, home), list[int]()
    segments = stranger.draw_segments(Fraction(1, 2), "seed")

    def interrupt(done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stranger.recompute_segments(segments, ("seed", "1"), tmp_path, interrupt)
    found = stranger.recompute_segments(segments, ("seed", "1"), tmp_path, lambda done, of: told.append(done))

    assert found.verdict == "proved"
    assert found.recomputed == 3
    assert told == [2, 3]
    # another draw has nothing of it
    assert stranger.recompute_segments(segments[:1], ("other", "1"), tmp_path).recomputed == 1


def test_states_that_are_far_apart_make_long_segments(home: Path, tmp_path: Path) -> None:
    stranger = open_stranger(publish(home / "run", tmp_path / "out", every=4), home)

    assert stranger.segments == [RunSegment(0, 2), RunSegment(2, 6)]
    assert stranger.find_segment(4) == RunSegment(2, 5)
    assert spread_states([9, 7, 6, 3, 1], {1, 3, 6, 9}, 3) == (3, 6, 9)
    with pytest.raises(InputError, match="no state before step 6 of 6"):
        stranger.find_segment(6)


def test_the_price_is_told_and_no_secret_is_published(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["publish", str(home / "run"), "--out", str(tmp_path / "out"), "--with-data", "--json"]
    assert run_command([*words, "--dry-run"]) == 0
    price = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "out").exists()

    assert run_command(words) == 0

    published = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    manifest = len(published[tmp_path / "out" / "publication.json"])
    told = sum(map(len, published.values())) - manifest - len(published[tmp_path / "out" / "summary.json"])
    assert price["total"] == told
    secrets = [p for p in (home / "run").rglob("*") if p.is_file() and (p.suffix == ".key" or p.name == ".lock")]
    assert len(secrets) >= 5
    for secret in filter(None, (path.read_bytes().strip() for path in secrets)):
        assert not [path for path, data in published.items() if secret in data or secret.hex().encode() in data]
    assert not [p for p in published if {"pki", "secrets", "journal", "code"} & set(p.relative_to(tmp_path).parts)]
    assert run_command(words) == 2


def test_an_address_with_a_password_is_not_published(owner: LyingOwner, tmp_path: Path) -> None:
    owner.sign_anew(lambda kind, body: {**body, "reason": "https://user:secret@host/x"} if kind == "step" else body)

    with pytest.raises(ConfigError, match="address with a password"):
        publish(owner.home, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- an owner that lies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "name"),
    [(1, "weight/"), pytest.param(0, "weight/", marks=SLOW), pytest.param(1, "exp_avg_sq/", marks=SLOW)],
)
def test_a_state_that_the_owner_altered_and_signed_anew_is_found(
    stage: int, name: str, home: Path, owner: LyingOwner, tmp_path: Path
) -> None:
    owner.change_tensor(3, stage, name)
    owner.sign_anew()
    path = publish(owner.home, tmp_path / "out")

    found = recompute(path, home, 1, 2, 3)

    assert found.verdict == "refuted"
    assert found.first_difference is not None
    # what step 2 led to; step 3 begins with it and leads elsewhere than the owner says
    assert (found.first_difference.step, found.first_difference.stage) == (2, stage)
    assert found.first_difference.fact == "state of step 3"
    assert [result.verdict for result in found.results] == ["proved", "refuted", "refuted"]
    assert run_command(["reverify", str(path), "--step", "2", "--out", str(tmp_path / "step")]) == 5


def change_commit(step: int, leaf: dict[str, Any]) -> dict[str, Any]:
    if (step, leaf["leaf"], leaf.get("stage")) != (4, "commit", 1):
        return leaf
    return {**leaf, "norm_squared": leaf["norm_squared"] * (1 + 2**-50)}


def change_clip(step: int, leaf: dict[str, Any]) -> dict[str, Any]:
    return {**leaf, "clip": leaf["clip"] * 0.5} if (step, leaf["leaf"]) == (4, "attempt") else leaf


@pytest.mark.parametrize(
    ("change", "fact"),
    [(change_commit, "norm of the weight gradient"), pytest.param(change_clip, "clip", marks=SLOW)],
)
def test_a_record_that_the_owner_altered_is_found(
    change: Callable[..., Any], fact: str, home: Path, owner: LyingOwner, tmp_path: Path
) -> None:
    owner.sign_anew(change_leaf=change)

    found = recompute(publish(owner.home, tmp_path / "out"), home, 4)

    assert found.verdict == "refuted"
    assert found.first_difference is not None
    assert found.first_difference.step == 4
    assert fact in found.first_difference.fact


def test_final_weights_that_no_step_led_to_are_found(home: Path, owner: LyingOwner, tmp_path: Path) -> None:
    owner.sign_anew(lambda kind, body: {**body, "final_weights_digest": "0" * 64} if kind == "run_completed" else body)

    found = recompute(publish(owner.home, tmp_path / "out"), home, 5)

    assert found.first_difference is not None
    assert (found.verdict, found.first_difference.step) == ("refuted", 5)
    assert found.first_difference.fact == "final weights"


def test_another_order_of_the_data_is_found_whichever_segment_is_drawn(
    home: Path, owner: LyingOwner, tmp_path: Path
) -> None:
    """The owner swaps the batches of steps 3 and 4 in its log."""
    lines = [json.loads(line) for line in (owner.home / "events.jsonl").read_text().splitlines()]
    samples = {line["body"]["step"]: line["body"]["samples"] for line in lines if line["kind"] == "step"}
    swapped = {3: samples[4], 4: samples[3]}
    owner.sign_anew(
        lambda kind, body: {**body, "samples": swapped.get(body["step"], body["samples"])} if kind == "step" else body
    )

    found = recompute(publish(owner.home, tmp_path / "out"), home, 0)

    assert found.first_difference is not None
    assert (found.verdict, found.first_difference.step) == ("refuted", 3)
    assert found.first_difference.fact == "order of the data"


@pytest.mark.parametrize(
    ("kinds", "key", "fact"),
    [(("step",), "samples", "order of the data"), (("run_started", "run_resumed"), "corpus", "digest of the data")],
)
def test_a_log_that_is_silent_about_its_data_is_refuted(
    home: Path, owner: LyingOwner, tmp_path: Path, kinds: tuple[str, ...], key: str, fact: str
) -> None:
    """The owner leaves the words out that a stranger would compare."""
    owner.sign_anew(
        lambda kind, body: {name: value for name, value in body.items() if name != key} if kind in kinds else body
    )

    found = recompute(publish(owner.home, tmp_path / "out"), home, 0)

    assert found.first_difference is not None
    assert (found.verdict, found.first_difference.fact) == ("refuted", fact)
    assert found.first_difference.published in ("None", "none")


def test_a_state_that_goes_on_elsewhere_in_the_data_is_found(home: Path, owner: LyingOwner, tmp_path: Path) -> None:
    owner.change_state(4, lambda state: state["loader"].update(num_samples=state["loader"]["num_samples"] + 8))
    owner.sign_anew()

    found = recompute(publish(owner.home, tmp_path / "out"), home, 0)

    assert found.first_difference is not None
    assert (found.verdict, found.first_difference.fact) == ("refuted", "place in the data")
    assert found.first_difference.step == 4


CHANGED = {"step": 1, "changes": [], "from": "0" * 64, "to": "0" * 64}
"""Of a line that says that the run file was changed; the steps before it cannot be recomputed."""


def test_a_changed_run_file_lets_no_owner_choose_the_order_of_the_steps_after_it(
    home: Path, owner: LyingOwner, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in (owner.home / "events.jsonl").read_text().splitlines()]
    samples = {line["body"]["step"]: line["body"]["samples"] for line in lines if line["kind"] == "step"}
    swapped = {3: samples[4], 4: samples[3]}
    owner.insert_line(CONFIG_CHANGED, CHANGED)
    owner.sign_anew(
        lambda kind, body: {**body, "samples": swapped.get(body["step"], body["samples"])} if kind == "step" else body
    )

    found = recompute(publish(owner.home, tmp_path / "out"), home, 2)

    assert found.first_difference is not None
    assert (found.verdict, found.first_difference.step) == ("refuted", 3)
    assert found.first_difference.fact == "order of the data"


def test_a_changed_run_file_lets_no_state_go_on_elsewhere_in_the_data(
    home: Path, owner: LyingOwner, tmp_path: Path
) -> None:
    owner.change_state(4, lambda state: state["loader"].update(num_samples=state["loader"]["num_samples"] + 8))
    owner.insert_line(CONFIG_CHANGED, CHANGED)
    owner.sign_anew()

    found = recompute(publish(owner.home, tmp_path / "out"), home, 2)

    assert found.first_difference is not None
    assert (found.first_difference.step, found.first_difference.fact) == (4, "place in the data")


def test_of_an_honest_run_with_a_changed_run_file_the_order_is_drawn_from_the_first_state_on(
    home: Path, owner: LyingOwner, tmp_path: Path
) -> None:
    owner.insert_line(CONFIG_CHANGED, CHANGED)
    owner.sign_anew()

    found = recompute(publish(owner.home, tmp_path / "out"), home, 2)

    assert (found.verdict, found.ordered) == ("proved", 5)
    assert any("is the owner's word" in remark for remark in found.remarks)


def test_of_a_run_whose_layers_were_cut_anew_the_steps_after_it_are_recomputed(home: Path, tmp_path: Path) -> None:
    run_file, console = home / "run.toml", Console(file=io.StringIO())
    train(load_run(run_file, ["train.steps=3"]), tmp_path / "run", console=console)
    train(load_run(run_file, ["pipeline.stages=1"]), tmp_path / "run", resume=True, console=console)
    stranger = open_stranger(publish(tmp_path / "run", tmp_path / "published"), home)

    found = stranger.recompute_segments(stranger.segments, ("seed", "1"), tmp_path / "work")

    # the first one begins with a state of two stages
    assert stranger.segments == [RunSegment(step, step + 1) for step in (3, 4, 5)]
    assert (found.verdict, found.recomputed) == ("proved", 3)


def test_batches_that_the_owner_says_had_failed_are_told_and_no_more_than_lines(
    home: Path, owner: LyingOwner, tmp_path: Path
) -> None:
    """Whoever may leave batches out may choose the data; a large number would have a stranger draw without end."""
    owner.insert_line("batch_skipped", {"step": 3, "number": 1, "reason": "unlucky"})
    owner.sign_anew()
    stranger = open_stranger(publish(owner.home, tmp_path / "out"), home)
    assert any(remark.startswith("1 batches were given up at 1 steps") for remark in stranger.remarks)

    owner.insert_line("batch_skipped", {"step": 2, "number": 2**40, "reason": "unlucky"})
    owner.sign_anew()
    with pytest.raises(AuditLogError, match="given up before those before it"):
        open_stranger(publish(owner.home, tmp_path / "more"), home)


def test_a_segment_whose_end_nothing_shows_is_not_proved(
    home: Path, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner publishes no state behind it, and a log without records of its steps."""
    monkeypatch.setattr(Laboratory, "read_step", lambda _lab, _step: [])
    monkeypatch.setattr(Laboratory, "open_state", lambda lab, step: lab.past.open_verified(step) if step == 2 else None)
    monkeypatch.setattr(Laboratory, "check_order", lambda _lab: None)

    found = recompute(published, home, 2)

    assert (found.verdict, found.recomputed) == ("undecided", 0)
    assert found.reasons == ("neither the log nor a published state shows what step 2 led to",)


def test_published_data_that_was_not_trained_on_is_found(home: Path, owner: LyingOwner, tmp_path: Path) -> None:
    owner.sign_anew(lambda kind, body: {**body, "corpus": "1" * 64} if kind == "run_started" else body)

    found = recompute(publish(owner.home, tmp_path / "out"), home, 0)

    assert found.first_difference is not None
    assert (found.verdict, found.first_difference.fact) == ("refuted", "digest of the data")


def test_states_of_another_run_or_step_are_refused(
    home: Path, published: Path, owner: LyingOwner, tmp_path: Path
) -> None:
    """One is signed by the same owner for another run, one is of this run under the name of another step."""
    foreign, swapped = tmp_path / "foreign", tmp_path / "swapped"
    shutil.copytree(published, foreign)
    shutil.copytree(published, swapped)
    body = json.loads((foreign / "checkpoints/step-00000003/manifest.json").read_bytes())["body"]
    other = CheckpointManifest.model_validate_json(canonical_json({**body, "run": "f" * 32}))
    (foreign / "checkpoints/step-00000003/manifest.json").write_bytes(sign_manifest(other, owner.identity))
    shutil.rmtree(swapped / "checkpoints/step-00000003")
    shutil.copytree(swapped / "checkpoints/step-00000004", swapped / "checkpoints/step-00000003")

    for path in (foreign, swapped):
        sign_publication(path, owner)
        with pytest.raises(VerificationError, match=r"swapped|foreign"):
            open_stranger(path, home)
    sign_publication(published, owner, states=(1, 2, 4, 5, 6))
    with pytest.raises(VerificationError, match="other states than the manifest lists"):
        open_stranger(published, home)


def test_a_state_that_the_log_does_not_certify_is_refused(
    home: Path, published: Path, owner: LyingOwner, tmp_path: Path
) -> None:
    shutil.copytree(published / "checkpoints/step-00000006", published / "checkpoints/step-00000007")
    sign_publication(published, owner, states=(1, 2, 3, 4, 5, 6, 7))

    with pytest.raises(VerificationError, match="certifies no state of step 7"):
        open_stranger(published, home)


def test_a_publication_of_another_end_of_the_log_is_refused(home: Path, published: Path, owner: LyingOwner) -> None:
    sign_publication(published, owner, log_digest="0" * 64)

    with pytest.raises(VerificationError, match="ends elsewhere"):
        open_stranger(published, home)


# --- files that a stranger must not trust ---------------------------------------------------------------


def flip_byte(path: Path) -> None:
    file = path / "checkpoints/step-00000002/stage-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def grow_file(path: Path) -> None:
    os.truncate(path / "checkpoints/step-00000002/stage-0.safetensors", 2**30)


def link_file(path: Path) -> None:
    file = path / "data" / "tokenizer.json"
    file.rename(path.parent / "elsewhere.json")
    file.symlink_to(path.parent / "elsewhere.json")


def link_directory(path: Path) -> None:
    (path / "data").rename(path.parent / "elsewhere")
    (path / "data").symlink_to(path.parent / "elsewhere")


def link_manifest(path: Path) -> None:
    (path / "publication.json").rename(path.parent / "elsewhere.json")
    (path / "publication.json").symlink_to(path.parent / "elsewhere.json")


def make_pipe(path: Path) -> None:
    (path / "publication.json").unlink()
    os.mkfifo(path / "publication.json")


def add_file(path: Path) -> None:
    (path / "README.json").write_text("{}")


def remove_file(path: Path) -> None:
    (path / "steps.jsonl").unlink()


def add_pickle(path: Path) -> None:
    (path / "data" / "shards" / "index.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flip_byte, "altered: has another digest"),
        (grow_file, "1073741824 bytes, the signed manifest says"),
        (link_file, "is a link"),
        (link_directory, "is a link"),
        (link_manifest, "is a link"),
        (make_pipe, "is no regular file"),
        (add_file, "the signed manifest does not name it"),
        (remove_file, "missing"),
        (add_pickle, "could hold code"),
    ],
)
def test_a_folder_that_somebody_changed_is_refused(
    change: Callable[[Path], None], reason: str, published: Path
) -> None:
    change(published)

    with pytest.raises(VerificationError, match=reason):
        open_publication(published)


def test_no_byte_of_the_manifest_can_be_changed(published: Path) -> None:
    data, owner = (published / "publication.json").read_bytes(), PastRun(published).owner
    publication._read_manifest(data, owner, published)

    for place in range(0, len(data), 23):
        flipped = data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :]
        with pytest.raises(VerificationError):
            publication._read_manifest(flipped, owner, published)
    for added in (b'{"a":1,', b'{"signature":"",'):
        with pytest.raises(VerificationError):
            publication._read_manifest(added + data[1:], owner, published)


@pytest.mark.parametrize("name", ["../escape.json", "/etc/hosts", "data/../../escape.json", "data/shards/x/nodes.so"])
def test_a_name_that_no_published_file_may_have_is_refused_although_the_owner_signed_it(
    name: str, published: Path, owner: LyingOwner
) -> None:
    files = json.loads((published / "publication.json").read_bytes())["body"]["files"]
    files[name] = files["run.json"]
    sign_publication(published, owner, files=files)

    with pytest.raises(VerificationError, match=r"is no name that|does not name it|missing"):
        open_publication(published)


def test_the_owner_cannot_sign_a_name_that_holds_code(published: Path, owner: LyingOwner) -> None:
    (published / "model").mkdir()
    (published / "model" / "modeling.txt.sh").write_text("true")
    sign_publication(published, owner)

    with pytest.raises(VerificationError, match="is no name that a published file may have"):
        open_publication(published)


def test_another_key_is_refused(published: Path, owner: LyingOwner, tmp_path: Path) -> None:
    owner.identity = Identity.without_certificate("owner")
    sign_publication(published, owner)

    with pytest.raises(VerificationError, match="did not sign it"):
        open_publication(published)
    assert run_command(["reverify", str(published), "--out", str(tmp_path / "work")]) == 5
    assert run_command(["reverify", str(tmp_path), "--out", str(tmp_path / "work")]) == 3


def test_a_run_file_that_claims_more_than_the_states_fill_is_not_built(home: Path) -> None:
    run = load_run(home / "run" / "config.toml")
    architecture = {**(run.model.architecture or {}), "vocab_size": 2**24, "n_embd": 2**14}
    huge = run.model_copy(update={"model": run.model.model_copy(update={"architecture": architecture})})
    deep = {**architecture, "vocab_size": 300, "n_embd": 32, "n_layer": 10**6}
    tall = run.model_copy(update={"model": run.model.model_copy(update={"architecture": deep})})

    for claim in (huge, tall):
        with pytest.raises(ConfigError, match="the run file claims"):
            recomputation._check_size(claim, 2**20)
    recomputation._check_size(run, 0)


# --- what cannot be decided -----------------------------------------------------------------------------


def test_without_the_data_nothing_is_decided_and_a_copy_of_it_is_enough(
    home: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = publish(home / "run", tmp_path / "out", with_data=False)
    words = ["reverify", str(path), "--out", str(tmp_path / "work")]

    assert run_command(words) == 7
    assert "the data is not published: give --data DIR" in capsys.readouterr().out
    assert run_command([*words, "--data", str(published / "data")]) == 0
    shutil.copytree(published / "data", tmp_path / "other")
    (tmp_path / "other" / "dataset.json").write_bytes(b"{}")
    # another copy accuses nobody
    assert run_command(["reverify", str(path), "--out", str(tmp_path / "more"), "--data", str(tmp_path / "other")]) == 7


def test_other_bits_decide_nothing_on_a_machine_of_another_class(
    home: Path, owner: LyingOwner, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.change_tensor(3, 1, "weight/")
    owner.sign_anew()
    path = publish(owner.home, tmp_path / "out")
    kernels = {name: "0" * 64 for name in ("forward", "backward", "gradient", "update")}
    monkeypatch.setattr(
        recomputation, "class_of_session", lambda plan, session: {"kernels": kernels, "described": "an abacus"}
    )

    found = recompute(path, home, 1, 2)

    assert (found.verdict, found.recomputed) == ("undecided", 1)
    assert "this machine is of another numeric class (an abacus) than the run" in found.reasons[0]
    # equal bits prove on any machine
    assert recompute(published, home, 2).verdict == "proved"


def test_a_log_without_a_class_decides_nothing_by_other_bits(home: Path, owner: LyingOwner, tmp_path: Path) -> None:
    owner.change_tensor(3, 1, "weight/")
    owner.sign_anew(lambda kind, body: {name: value for name, value in body.items() if name != "numeric_class"})

    found = recompute(publish(owner.home, tmp_path / "out"), home, 2)

    assert found.verdict == "undecided"
    assert "does not say which numeric class" in found.reasons[0]


def test_runs_that_nobody_else_can_recompute_are_refused_with_the_reason(home: Path, tmp_path: Path) -> None:
    past = PastRun(home / "run")
    past.config = past.config.model_copy(
        update={"checkpoint": past.config.checkpoint.model_copy(update={"encrypt": True})}
    )

    with pytest.raises(ConfigError, match="its checkpoints are encrypted"):
        Publisher(past, PublicationChoice())


def test_the_passport_of_another_run_is_not_published(home: Path, tmp_path: Path) -> None:
    passport = Path(__file__).parents[1] / "vectors" / "passport" / "small.passport"
    passport = passport if passport.exists() else next(Path(__file__).parents[1].rglob("small.passport"))

    with pytest.raises(VerificationError, match=re.escape("run.passport")):
        publish(home / "run", tmp_path / "out", passport=passport)
