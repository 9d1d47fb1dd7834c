"""Roles of a project: who may do what, four eyes, and an access log that shows every change."""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.access_gate import check_caller, enter_gate, note_read, require_approvals
from phalanx.cli import run_command
from phalanx.cli.answers.tree import leaf_commands
from phalanx.cli.outcome import build_command
from phalanx.cli.role_gate import LateGate
from phalanx.config import load_config
from phalanx.data.shards import load_signer
from phalanx.data.sources import TextConfig, open_source
from phalanx.data.sources.files import SourceFile
from phalanx.data.tasks import Columns, read_examples
from phalanx.errors import AuditLogError, ConfigError, DiskError, PhalanxError, RoleError
from phalanx.evaluate.suite import text_suite
from phalanx.policy import COMMANDS, Project, ProjectRoles, RoleGate, open_person_signer, sign_roles, verify_access_log
from phalanx.policy.rights import right_of_call
from phalanx.security.audit.line import LogHead

sys.path.append(str(Path(__file__).resolve().parents[1] / "security" / "tee"))
PEOPLE = {
    "alice": ("owner",),
    "bob": ("releaser", "data_steward"),
    "carol": ("auditor",),
    "tom": ("trainer",),
    "rita": ("reader",),
}


def key_of(folder: Path, name: str) -> str:
    return load_signer(folder / f"{name}.key").fingerprint


def write_roles(folder: Path, people=PEOPLE, second_key: str | None = None) -> Path:
    lines = ['name = "hospital"']
    for name, roles in people.items():
        keys = [key_of(folder, name), *([] if name != "alice" or second_key is None else [second_key])]
        lines += [f"[people.{name}]", f"keys = {json.dumps(keys)}", f"roles = {json.dumps(list(roles))}"]
    path = folder / "roles.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose people have keys, and one person, alice, two of them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    source = write_roles(tmp_path, second_key=key_of(tmp_path, "alice2"))
    home = tmp_path / "hospital"
    sign_roles(source, home, load_signer(tmp_path / "alice.key"), None)
    return home


def act_as(monkeypatch, home: Path, name: str) -> None:
    monkeypatch.setenv("PHALANX_KEY", str(home.parent / f"{name}.key"))


def log_of(home: Path) -> list:
    return verify_access_log(home).entries


def test_every_command_has_a_row_and_every_row_a_command():
    assert {" ".join(names) for names, _ in leaf_commands(build_command())} == set(COMMANDS)


def test_every_remote_call_has_a_row():
    """Methods of gRPC and routes of HTTP, by how the code declares them; paths of witnesses are compared as text."""
    source = Path(__file__).resolve().parents[2] / "src" / "phalanx"
    calls = set(
        re.findall(r'"(\w+)": grpc\.\w+_rpc_method_handler', (source / "transport" / "grpc_wire.py").read_text())
    )
    routes = [file.read_text() for part in ("serve", "watch") for file in sorted((source / part).rglob("*.py"))]
    for text in routes:
        calls |= set(re.findall(r'Route\(\s*(?:"\w+", )?"(/[^"]*)"', text))
        for names, values in re.findall(r"^(\w*_ROUTE\b.*?) = (.*)$", text, re.MULTILINE):
            calls |= set(re.findall(r'"(/[^"]*)"', values)) if names else set()
    calls |= set(re.findall(r'path == "(/[^"]*)"', (source / "security" / "witness" / "service.py").read_text()))

    assert {"Deliver", "/v1/chat/completions", "/metrics", "/curves", "/add-checkpoint"} <= calls
    assert [call for call in sorted(calls) if right_of_call(call) is None] == []


def test_sixty_commands_of_the_wrong_role_are_refused_before_they_begin_and_logged(project, monkeypatch):
    act_as(monkeypatch, project, "rita")
    monkeypatch.chdir(project)
    refused = []
    for names, command in leaf_commands(build_command()):
        right = COMMANDS[" ".join(names)]
        if right.roles and "reader" not in right.roles:
            with pytest.raises(RoleError, match="rita has reader"):
                command.callback()
            refused.append(" ".join(names))

    entries = [entry for entry in log_of(project) if entry.kind == "refused"]
    assert len(refused) >= 60
    assert [entry.body["command"] for entry in entries] == refused
    assert {entry.body["person"] for entry in entries} == {"rita"}


def test_a_command_line_is_refused_by_the_place_that_it_names(project, monkeypatch, capfd):
    act_as(monkeypatch, project, "tom")

    assert run_command(["pki", "init", str(project / "keys")]) == 5
    assert "needs the role owner; tom has trainer" in capfd.readouterr().err
    assert not (project / "keys").exists()
    assert run_command(["pki", "init", str(project.parent / "elsewhere")]) == 0


def test_a_link_into_a_project_does_not_lead_around_its_roles(project, monkeypatch):
    act_as(monkeypatch, project, "tom")
    (project.parent / "link").symlink_to(project)

    assert run_command(["pki", "init", str(project.parent / "link" / "keys")]) == 5


def test_a_person_without_a_key_of_the_file_is_refused(project, monkeypatch):
    act_as(monkeypatch, project, "mallory")

    assert run_command(["report", str(project)]) == 5
    assert log_of(project)[-1].body["person"] == "nobody"


def test_without_roles_nobody_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_KEY", str(tmp_path / "none" / "key"))
    monkeypatch.chdir(tmp_path)

    assert run_command(["pki", "init", str(tmp_path / "keys")]) == 0
    assert not (tmp_path / "none").exists()


def test_reads_are_logged_once_with_person_role_and_digest(project, monkeypatch):
    act_as(monkeypatch, project, "bob")
    with RoleGate("data sample", [project]) as gate, enter_gate(gate):
        note_read("dataset", "d1", project / "data")
        note_read("dataset", "d1", project / "data")
        note_read("evidence", "e1", project / "run" / "evidence" / "x.json")

    rows = [
        (entry.kind, entry.body["what"], entry.body["digest"], entry.body["person"]) for entry in log_of(project)[1:]
    ]
    assert rows == [("read", "dataset", "d1", "bob"), ("read", "evidence", "e1", "bob")]
    assert log_of(project)[1].body["roles"] == ["releaser", "data_steward"]


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    (folder / "one.txt").write_text("the first letter")
    (folder / "two.txt").write_text("the second letter")
    (folder / "rows.jsonl").write_text('{"text": "a row", "label": "a"}\n')
    return folder


def read_source(folder: Path) -> list[str]:
    return [document.text for document in open_source(TextConfig(path=folder)).documents()]


def read_labels(folder: Path) -> list[str]:
    columns = Columns(text="text", label="label", classes=("a", "b"))
    return [placed.example.text for placed in read_examples(folder / "rows.jsonl", columns)]


PLAIN_READS = {
    "text files": ("", read_source),
    "file": ("rows.jsonl", read_labels),
    "file of a suite": ("one.txt", lambda folder: text_suite("own", folder / "one.txt").rows),
}


@pytest.mark.parametrize("what", PLAIN_READS)
def test_plain_text_is_logged_with_its_digest_before_it_is_read(project, monkeypatch, what):
    texts, (name, read) = write_texts(project / "texts"), PLAIN_READS[what]
    act_as(monkeypatch, project, "mallory")
    with RoleGate("roles show", [project]) as gate, enter_gate(gate), pytest.raises(RoleError, match="has no role"):
        read(texts)
    act_as(monkeypatch, project, "bob")
    for _ in range(2):
        with RoleGate("data build", [project]) as gate, enter_gate(gate):
            assert read(texts) == read(texts)
    (texts / "one.txt").write_text("another letter")
    (texts / "rows.jsonl").write_text('{"text": "another row", "label": "b"}\n')
    with RoleGate("data build", [project]) as gate, enter_gate(gate):
        read(texts)

    reads = [entry.body for entry in log_of(project) if entry.kind == "read"]
    assert [(body["what"], body["person"], body["command"]) for body in reads] == [
        (what.removesuffix(" of a suite"), "bob", "data build")
    ] * 3
    digests = [body["digest"] for body in reads]
    assert digests[0] == digests[1] != digests[2]
    if name:
        assert digests[2] == hashlib.sha256((texts / name).read_bytes()).hexdigest()
    assert any(entry.kind == "refused" and entry.body["person"] == "nobody" for entry in log_of(project))


def test_a_source_with_links_is_hashed_once_whatever_the_number_of_its_places(project, monkeypatch):
    texts, places = write_texts(project / "texts"), [project / name for name in ("north", "south")]
    for place in places:
        place.mkdir()
        (place / "letter.txt").write_text("a letter")
        (texts / f"{place.name}.txt").symlink_to(place / "letter.txt")
    act_as(monkeypatch, project, "bob")
    hashed, opened = [], SourceFile.open_bytes
    monkeypatch.setattr(SourceFile, "open_bytes", lambda file: hashed.append(file.name) or opened(file))

    with RoleGate("data build", [project]) as gate, enter_gate(gate):
        open_source(TextConfig(path=texts, linked_roots=tuple(places)))

    assert sorted(hashed) == ["north.txt", "one.txt", "south.txt", "two.txt"]


def test_plain_text_in_a_project_is_logged_by_a_command_outside_of_it(project, tmp_path, monkeypatch, capfd):
    """A recipe elsewhere names the texts; links to them lead around nothing either."""
    write_texts(project / "texts")
    (tmp_path / "link").symlink_to(project / "texts")
    recipe = tmp_path / "vocabulary.toml"
    recipe.write_text(
        f'sources = [{{ kind = "text", path = "{tmp_path / "link"}" }}]\n[tokenizer]\nkind = "bpe"\nvocab_size = 260\n'
    )
    words = ["tokenizer", "train", str(tmp_path / "vocabulary"), "--recipe", str(recipe)]
    act_as(monkeypatch, project, "rita")
    assert run_command(words) == 5
    assert "rita has reader" in capfd.readouterr().err
    act_as(monkeypatch, project, "tom")
    assert run_command(words) == 0

    reads = [entry.body for entry in log_of(project) if entry.kind == "read"]
    assert [(body["what"], body["person"], body["command"]) for body in reads] == [
        ("text files", "tom", "tokenizer train")
    ]


def test_four_eyes_need_two_people_and_not_two_keys_of_one(project, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    target = "run-0123456789abcdef:00"
    for key in ("alice", "alice2"):
        assert run_command(["roles", "approve", "release", target, "--key", str(tmp_path / f"{key}.key")]) == 0
    act_as(monkeypatch, project, "alice2")
    with RoleGate("checkpoint export", [project]) as gate, enter_gate(gate):
        with pytest.raises(RoleError, match="release needs a second person; one of bob"):
            require_approvals("release", lambda: target, project / "run")
        # tom's role may not approve, so his approval is refused and counts for nothing
        assert run_command(["roles", "approve", "release", target, "--key", str(tmp_path / "tom.key")]) == 5
        with pytest.raises(RoleError):
            require_approvals("release", lambda: target, project / "run")
        assert run_command(["roles", "approve", "release", target, "--key", str(tmp_path / "bob.key")]) == 0
        require_approvals("release", lambda: target, project / "run")
        with pytest.raises(RoleError):
            require_approvals("release", lambda: f"{target}1", project / "run")
    assert log_of(project)[-2].body["approved_by"] == ["alice", "bob"]


def test_sealed_content_is_shown_to_a_person_after_a_second_one_has_approved(project, tmp_path, monkeypatch):
    act_as(monkeypatch, project, "alice")
    # to train on it shows it to nobody, and what is not sealed needs no second person
    with RoleGate("train", [project]) as gate, enter_gate(gate):
        note_read("dataset", "d1", project, is_sealed=True)
    with RoleGate("data sample", [project]) as gate, enter_gate(gate):
        note_read("dataset", "d2", project)
        with pytest.raises(RoleError, match="decryption needs a second person"):
            note_read("dataset", "d1", project, is_sealed=True)
        Project.open(project).approve_act("decryption", "d1", load_signer(tmp_path / "bob.key"), None)
        note_read("dataset", "d1", project, is_sealed=True)
        with pytest.raises(RoleError):
            note_read("dataset", "d3", project, is_sealed=True)


def test_a_key_belongs_to_one_person_and_every_act_has_two(tmp_path):
    people = {"alice": ("owner",), "bob": ("trainer",)}
    with pytest.raises(ConfigError, match="nobody could approve release"):
        sign_roles(write_roles(tmp_path, people), tmp_path / "p", load_signer(tmp_path / "alice.key"), None)
    source = write_roles(tmp_path, second_key=key_of(tmp_path, "bob"))
    with pytest.raises(ConfigError, match="a key belongs to two people"):
        sign_roles(source, tmp_path / "p", load_signer(tmp_path / "alice.key"), None)


def test_roles_change_by_an_owner_and_a_second_person_only(project, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    changed = write_roles(tmp_path, {**PEOPLE, "tom": ("trainer", "releaser")})
    sign = ["roles", "sign", str(changed), "--home", str(project)]
    assert run_command([*sign, "--key", str(tmp_path / "tom.key")]) == 5
    assert run_command([*sign, "--key", str(tmp_path / "alice.key")]) == 5
    approve = ["roles", "approve", "policy_change", str(changed), "--home", str(project)]
    assert run_command([*approve, "--key", str(tmp_path / "carol.key")]) == 0
    assert run_command([*sign, "--key", str(tmp_path / "alice.key")]) == 0
    assert Project.open(project).roles.roles_of("tom") == ("trainer", "releaser")


def test_older_roles_that_are_put_back_are_refused(project, tmp_path):
    older = (project / "roles.json").read_bytes()
    opened = Project.open(project)
    changed = write_roles(tmp_path, {**PEOPLE, "rita": ("trainer",)})
    digest = opened.roles.digest
    opened.approve_act(
        "policy_change", load_config(changed, ProjectRoles).digest, load_signer(tmp_path / "carol.key"), None
    )
    sign_roles(changed, project, load_signer(tmp_path / "alice.key"), None)
    assert Project.open(project).roles.digest != digest
    (project / "roles.json").write_bytes(older)

    with pytest.raises(RoleError, match="put the newest one back"):
        Project.open(project)


def change_roles(home: Path, people) -> None:
    """Put other roles in force: alice signs them, carol has approved them."""
    source = write_roles(home.parent, people, second_key=key_of(home.parent, "alice2"))
    digest = load_config(source, ProjectRoles).digest
    Project.open(home).approve_act("policy_change", digest, load_signer(home.parent / "carol.key"), None)
    sign_roles(source, home, load_signer(home.parent / "alice.key"), None)


def test_older_roles_that_are_put_back_with_their_line_are_refused(project, tmp_path):
    """The attacker may write the directory, and has no key: a line that an owner once signed comes once more."""
    older, line = (project / "roles.json").read_bytes(), (project / "access.jsonl").read_bytes()
    change_roles(project, {**PEOPLE, "tom": ("reader",)})
    (project / "roles.json").write_bytes(older)
    with (project / "access.jsonl").open("ab") as file:
        file.write(line)

    with pytest.raises(AuditLogError, match="put the whole log back"):
        Project.open(project)


def test_roles_of_another_project_of_the_same_owner_are_refused(project, tmp_path):
    """Tom is an owner there, and copies its two files over."""
    source = write_roles(tmp_path, {**PEOPLE, "tom": ("owner",)}, second_key=key_of(tmp_path, "alice2"))
    source.write_text(source.read_text().replace('"hospital"', '"kiosk"'))
    other = tmp_path / "kiosk"
    sign_roles(source, other, load_signer(tmp_path / "alice.key"), None)
    (project / "roles.json").write_bytes((other / "roles.json").read_bytes())
    with (project / "access.jsonl").open("ab") as file:
        file.write((other / "access.jsonl").read_bytes())

    with pytest.raises(AuditLogError, match="roles of another project"):
        Project.open(project)


def test_roles_that_change_while_a_command_runs_count_for_its_next_read(project, monkeypatch):
    act_as(monkeypatch, project, "bob")
    with RoleGate("data sample", [project]) as gate, enter_gate(gate):
        note_read("dataset", "d1", project)
        change_roles(project, {**PEOPLE, "bob": ("reader",), "beate": ("releaser", "data_steward")})
        with pytest.raises(RoleError, match="needs the role"):
            note_read("dataset", "d2", project)

    assert [entry.kind for entry in log_of(project)] == ["roles", "read", "approval", "roles", "refused"]


def test_a_person_who_is_taken_out_while_a_command_runs_reads_no_more_and_the_log_holds(project, monkeypatch):
    act_as(monkeypatch, project, "bob")
    people = {name: roles for name, roles in PEOPLE.items() if name != "bob"} | {"beate": ("releaser", "data_steward")}
    with RoleGate("data sample", [project]) as gate, enter_gate(gate):
        note_read("dataset", "d1", project)
        change_roles(project, people)
        with pytest.raises(RoleError, match="needs the role"):
            note_read("dataset", "d2", project)

    assert log_of(project)[-1].body["person"] == "nobody"


def test_a_remote_caller_who_lost_the_role_is_refused_by_a_process_that_runs(project, monkeypatch):
    act_as(monkeypatch, project, "alice")
    with RoleGate("serve", [project]) as gate, enter_gate(gate):
        check_caller("/v1/chat/completions", "rita", None)
        change_roles(project, {**PEOPLE, "rita": ("auditor",)})
        with pytest.raises(RoleError, match="needs the role"):
            check_caller("/v1/chat/completions", "rita", None)


def test_a_caller_without_the_role_fills_no_log_by_calling_one_path_after_another(project, monkeypatch):
    act_as(monkeypatch, project, "alice")
    paths = [f"/v1/{row}/{number}" for row in ("models", "unheard") for number in range(20)]
    with RoleGate("serve", [project]) as gate, enter_gate(gate):
        for path in paths:
            with pytest.raises(RoleError):
                check_caller(path, "tom", None)

    assert [entry.kind for entry in log_of(project)] == ["roles", "refused", "refused"]


def test_a_line_is_not_written_by_roles_that_are_no_longer_in_force(project, tmp_path):
    """Two processes: one has read the roles, the other changes them before the first one writes."""
    stale = Project.open(project)
    change_roles(project, {**PEOPLE, "tom": ("reader",)})

    with pytest.raises(AuditLogError, match="roles were changed"):
        stale.log.append_event(load_signer(tmp_path / "tom.key"), "read", {"person": "tom", "digest": "d1"})
    with pytest.raises(AuditLogError, match="roles were changed"):
        stale.log.append_event(load_signer(tmp_path / "alice.key"), "roles", {"statement": {}})


def test_roles_that_somebody_else_signed_or_changed_are_refused(project, tmp_path):
    content = json.loads((project / "roles.json").read_bytes())
    content["statement"]["people"]["tom"]["roles"] = ["owner"]
    (project / "roles.json").write_text(json.dumps(content, sort_keys=True, separators=(",", ":")))

    with pytest.raises(RoleError, match="was changed"):
        Project.open(project)


def test_a_missing_file_of_roles_opens_nothing(project, monkeypatch):
    act_as(monkeypatch, project, "alice")
    (project / "roles.json").unlink()

    assert run_command(["pki", "init", str(project / "keys")]) == 5


def test_every_altered_byte_of_the_access_log_is_found(project, monkeypatch):
    act_as(monkeypatch, project, "bob")
    with RoleGate("data sample", [project]) as gate, enter_gate(gate):
        for number in range(3):
            note_read("dataset", f"d{number}", project)
    path = project / "access.jsonl"
    whole = path.read_bytes()
    size = len(whole)
    for place in [*range(0, size, 37), size - 1, size - 2]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(PhalanxError):
            verify_access_log(project)
    path.write_bytes(whole)
    assert len(log_of(project)) == 4


def test_a_line_that_is_cut_off_or_taken_out_is_found_by_who_has_seen_it(project, monkeypatch):
    act_as(monkeypatch, project, "bob")
    with RoleGate("data sample", [project]) as gate, enter_gate(gate):
        note_read("dataset", "d1", project)
        note_read("dataset", "d2", project)
    path, head = project / "access.jsonl", verify_access_log(project).head
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))

    verify_access_log(project)
    with pytest.raises(AuditLogError, match="3 are known"):
        verify_access_log(project, known=head)
    with RoleGate("data sample", [project]) as gate, enter_gate(gate), pytest.raises(AuditLogError, match="has seen 3"):
        note_read("dataset", "d3", project)
    path.write_bytes(b"".join((lines[0], lines[2])))
    with pytest.raises(AuditLogError, match="line 2"):
        verify_access_log(project)


def test_a_line_is_added_without_reading_what_this_command_has_seen(project, monkeypatch):
    act_as(monkeypatch, project, "bob")
    sizes, read = [], os.read
    with RoleGate("data sample", [project]) as gate, enter_gate(gate):
        monkeypatch.setattr(os, "read", lambda fd, size: sizes.append(len(part := read(fd, size))) or part)
        for number in range(20):
            note_read("dataset", f"d{number}", project)
            if number == 9:
                # somebody else writes in between, and those lines are read
                with RoleGate("data sample", [project]) as other:
                    other.note_read("checkpoint", "c", project, is_sealed=False)
        monkeypatch.undo()
    act_as(monkeypatch, project, "bob")

    assert verify_access_log(project).head.num_events == 22
    assert sum(sizes) < 5 * (project / "access.jsonl").stat().st_size


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize(
    "change",
    [lambda lines: lines[:-1], lambda lines: [*lines[:-1], lines[0]], lambda lines: [lines[0], lines[2]]],
    ids=["cut", "exchanged", "taken out"],
)
def test_a_log_that_changes_within_a_command_is_found(project, monkeypatch, change, has_memory):
    act_as(monkeypatch, project, "bob")
    path = project / "access.jsonl"
    with RoleGate("data sample", [project]) as gate, enter_gate(gate):
        note_read("dataset", "d1", project)
        note_read("dataset", "d2", project)
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
        if not has_memory:
            monkeypatch.setattr("phalanx.policy.gate.HeadMemory.read_head", lambda *_: None)
        with pytest.raises(AuditLogError, match="has seen"):
            note_read("dataset", "d3", project)


def test_a_head_of_before_the_own_last_line_is_compared_too(project, tmp_path):
    log, alice = Project.open(project).log, load_signer(tmp_path / "alice.key")
    heads = [log.append_event(alice, "note", {"number": number}) for number in range(3)]

    with pytest.raises(AuditLogError, match="line 2 is another"):
        log.append_event(alice, "note", {}, LogHead(2, heads[1].digest))
    assert log.append_event(alice, "note", {}, LogHead(2, heads[0].digest)).num_events == 5


def test_a_command_outside_of_a_project_hashes_and_logs_a_read_once(project, monkeypatch):
    act_as(monkeypatch, project, "bob")
    hashed = []
    with LateGate("data build") as gate, enter_gate(gate):
        for _ in range(2):
            note_read("file", lambda: hashed.append(1) or "d1", project / "rows.jsonl")

    assert (len(hashed), [entry.kind for entry in log_of(project)]) == (1, ["roles", "read"])


def test_a_full_disk_leaves_no_half_line(project, monkeypatch):
    act_as(monkeypatch, project, "bob")
    before, write = (project / "access.jsonl").read_bytes(), os.write

    def write_half(fd: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:-50])

    with RoleGate("data sample", [project]) as gate, enter_gate(gate):
        with monkeypatch.context() as patch, pytest.raises(DiskError, match="No space left"):
            patch.setattr(os, "write", write_half)
            note_read("dataset", "d1", project)
        assert (project / "access.jsonl").read_bytes() == before
        note_read("dataset", "d1", project)

    assert log_of(project)[-1].body["digest"] == "d1"


def test_another_first_owner_is_found_by_the_fingerprint_that_a_reader_keeps(project, tmp_path):
    verify_access_log(project, key_of(tmp_path, "alice"))
    with pytest.raises(AuditLogError, match="the first roles are signed by"):
        verify_access_log(project, key_of(tmp_path, "tom"))


def test_a_line_in_the_name_of_another_person_is_found(project, tmp_path):
    log = Project.open(project).log
    log.append_event(load_signer(tmp_path / "tom.key"), "read", {"person": "bob", "digest": "d1"})

    with pytest.raises(AuditLogError, match="not 'bob'"):
        verify_access_log(project)


@pytest.mark.parametrize(
    ("signer", "kind", "body"),
    [
        ("mallory", "read", {"digest": "d1"}),
        ("mallory", "read", {"person": None, "digest": "d1"}),
        ("mallory", "refused", {"person": "bob", "what": "command"}),
        ("mallory", "refused", {"what": "command"}),
        ("tom", "refused", {"person": "bob", "what": "command"}),
        ("tom", "refused", {"person": "nobody", "what": "command"}),
    ],
)
def test_a_line_that_names_somebody_else_than_its_signer_is_found(project, tmp_path, signer, kind, body):
    """Mallory has a key that is in no file of roles; tom has one, and would have others be refused."""
    Project.open(project).log.append_event(load_signer(tmp_path / f"{signer}.key"), kind, body)

    with pytest.raises(AuditLogError, match="is signed by a key that is not"):
        verify_access_log(project)


@pytest.mark.parametrize(
    ("call", "name", "key", "passes"),
    [
        ("Deliver", "worker-1", "tom", True),
        ("Describe", "worker-1", "rita", False),
        ("Deliver", "tom", "mallory", False),
        ("/v1/chat/completions", "rita", None, True),
        ("/v1/models/secret", "rita", None, True),
        ("/v1/chat/completions", "tom", None, False),
        ("/metrics", "rita", None, False),
        ("/v1/unheard", "alice", None, False),
    ],
)
def test_remote_calls_need_the_role_of_their_row(project, monkeypatch, call, name, key, passes):
    act_as(monkeypatch, project, "alice")
    fingerprint = None if key is None else key_of(project.parent, key)
    with RoleGate("serve", [project]) as gate, enter_gate(gate):
        if passes:
            check_caller(call, name, fingerprint)
        else:
            for _ in range(2):
                with pytest.raises(RoleError):
                    check_caller(call, name, fingerprint)
    refused = [entry.body["caller"] for entry in log_of(project) if entry.kind == "refused"]
    assert refused == ([] if passes else [name])


def test_a_tpm_signs_as_a_person(project, tmp_path, monkeypatch):
    if shutil.which("swtpm") is None:
        pytest.skip("swtpm is not installed (Debian: swtpm)")
    from bare_tpm import BareTpm

    (tmp_path / "tpm").mkdir()
    tpm = BareTpm(tmp_path / "tpm")
    try:
        assert_key_signs_as_person(f"tpm:{tpm.address}", tmp_path, monkeypatch)
    finally:
        tpm.close()


def test_a_token_of_pkcs11_signs_as_a_person(project, tmp_path, monkeypatch):
    module = Path("/usr/lib/softhsm/libsofthsm2.so")
    if not module.exists():
        pytest.skip("softhsm2 is not installed (Debian: softhsm2)")
    pkcs11 = pytest.importorskip("pkcs11")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "softhsm2.conf").write_text(f"directories.tokendir = {tmp_path / 'tokens'}\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(tmp_path / "softhsm2.conf"))
    monkeypatch.setenv("PHALANX_PKCS11_PIN", "1234")
    pins = ["--so-pin", "1234", "--pin", "1234"]
    subprocess.run(["softhsm2-util", "--init-token", "--free", "--label", "people", *pins], check=True, timeout=60)
    library = pkcs11.lib(str(module))
    library.reinitialize()
    token = library.get_token(token_label="people")
    with token.open(user_pin="1234", rw=True) as session:
        curve = session.create_domain_parameters(
            pkcs11.KeyType.EC,
            {pkcs11.Attribute.EC_PARAMS: pkcs11.util.ec.encode_named_curve_parameters("secp256r1")},
            local=True,
        )
        curve.generate_keypair(store=True, label="alice")
    reference = f"pkcs11:token=people;object=alice?module-path={module}"
    assert_key_signs_as_person(reference, tmp_path, monkeypatch)
    monkeypatch.setenv("PHALANX_PKCS11_PIN", "wrong")
    with pytest.raises(PhalanxError, match="check token, object and PIN"), open_person_signer(reference):
        pass


def assert_key_signs_as_person(reference: str, folder: Path, monkeypatch) -> None:
    with open_person_signer(reference) as holder:
        fingerprint = holder.fingerprint
        assert len(holder.sign_data(b"x")) == 64
    source, home = write_roles(folder, second_key=fingerprint), folder / "hard"
    with open_person_signer(reference) as holder:
        sign_roles(source, home, holder, None)
    monkeypatch.setenv("PHALANX_KEY", reference)
    with RoleGate("pki init", [home]) as gate, enter_gate(gate):
        note_read("dataset", "d1", home)
    assert verify_access_log(home, fingerprint).entries[-1].body["person"] == "alice"


def test_a_head_of_another_log_is_no_head_of_this_one(project):
    with pytest.raises(AuditLogError):
        verify_access_log(project, known=LogHead(1, "00" * 32))
