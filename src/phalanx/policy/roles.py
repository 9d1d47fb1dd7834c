"""The file of roles: the people of a project, their keys and roles, signed by an owner; and who read what beside it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from phalanx.config import StrictModel, canonical_json, digest_config, load_config, printable_text
from phalanx.errors import AuditLogError, RoleError, SignatureError
from phalanx.policy.approvals import ActApproval, People, person_of_key
from phalanx.policy.policy_file import Name
from phalanx.policy.rights import FOUR_EYES, Action, Role
from phalanx.policy.signers import PersonKey
from phalanx.security.audit import AccessLog, PersonSigner, read_access_log
from phalanx.security.audit.access import ROLES_KIND, is_of_roles
from phalanx.security.audit.line import LogEntry, LogHead, check_place, first_head, next_head, signed_part
from phalanx.security.crypto import in_domain, parse_canonical, replace_file, verify_by_fingerprint

ROLES_FILE, ACCESS_FILE = "roles.json", "access.jsonl"
_DOMAIN = "roles/1"
_MAX_BYTES = 1024 * 1024


class Person(StrictModel):
    """One person, with all certificates and keys that are this person's.

    Attributes:
        keys: Fingerprints: of a key file, of a TPM, of a token, of the certificate of a party.
    """

    keys: tuple[PersonKey, ...] = Field(min_length=1, max_length=100)
    roles: tuple[Role, ...] = Field(min_length=1)


class ProjectRoles(StrictModel):
    """All people of a project.

    Attributes:
        name: Name of the project; every line of its access log bears it.
    """

    name: Name
    people: dict[Name, Person] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys = [key for person in self.people.values() for key in person.keys]
        if len(keys) != len(set(keys)):
            raise ValueError("people: a key belongs to two people; give each person keys of their own")
        if not self.people_with(("owner",)):
            raise ValueError("people: nobody has the role owner; name one who signs this file")
        for action, roles in FOUR_EYES.items():
            if len(self.people_with(roles)) < 2:
                raise ValueError(f"people: nobody could approve {action}; give two people a role of {', '.join(roles)}")
        return self

    @property
    def digest(self) -> str:
        """SHA-256 over people, keys and roles."""
        return digest_config(self)

    def people_with(self, roles: Iterable[Role]) -> dict[str, tuple[str, ...]]:
        """Return the keys of the people who have one of these roles."""
        roles = set(roles)
        return {name: person.keys for name, person in self.people.items() if roles & set(person.roles)}

    def person_with(self, key: str) -> str | None:
        """Return the name of the person who has a key."""
        return person_of_key({name: person.keys for name, person in self.people.items()}, key)

    def roles_of(self, person: str | None) -> tuple[Role, ...]:
        """Return the roles of a person; none of somebody who is not in the file."""
        return () if person is None else self.people[person].roles


@dataclass(frozen=True)
class AccessSummary:
    """A checked access log.

    Attributes:
        head: Its end; kept elsewhere, it shows a tail that was cut off.
        roles: The roles that are in force at its end.
    """

    entries: list[LogEntry]
    head: LogHead
    roles: ProjectRoles


@dataclass(frozen=True)
class Project:
    """A directory with a file of roles, and all directories below it.

    Attributes:
        roles_line: Number of the line of its log that put them in force.
    """

    home: Path
    roles: ProjectRoles
    roles_line: int

    @classmethod
    def open(cls, home: Path) -> Self:
        """Read the file of roles, and compare it with the last roles in the log.

        Raises:
            RoleError: The file is missing, malformed, older than the log, or not signed by an owner.
            AuditLogError: The access log is missing or broken where it speaks of roles.
        """
        path = home / ROLES_FILE
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as exc:
            raise RoleError(f"{path}: cannot be read ({exc.strerror}); put the signed file back") from exc
        roles = _open_statement(content, path)
        logged_roles, number = _logged_roles(home / ACCESS_FILE)
        if logged_roles != roles:
            raise RoleError(f"{path}: is not the file that {home / ACCESS_FILE} named last; put the newest one back")
        return cls(home, roles, number)

    @cached_property
    def log(self) -> AccessLog:
        """Who read what, and who was refused."""
        return AccessLog(self.home / ACCESS_FILE, self.roles.name, self.roles_line)

    def list_approvers(self, action: Action, target: str) -> list[str]:
        """Return the people with a role for it who approved an act."""
        people = self.roles.people_with(FOUR_EYES[action])
        return ActApproval(action, target, self.roles.digest).list_approvers(self.home, people)

    def require_second(self, action: Action, target: str, key: str) -> list[str]:
        """Return the people who approved an act, one of whom is another than the person with this key.

        Raises:
            RoleError: There is no other person; two keys of one person are one.
        """
        approvers = self.list_approvers(action, target)
        if not set(approvers) - {self.roles.person_with(key)}:
            people = ", ".join(sorted(set(self.roles.people_with(FOUR_EYES[action])) - {self.roles.person_with(key)}))
            raise RoleError(
                f"{action} needs a second person; one of {people} runs: phalanx roles approve {action} {target}"
            )
        return approvers

    def approve_act(
        self, action: Action, target: str, signer: PersonSigner, known: LogHead | None
    ) -> tuple[str, LogHead]:
        """Sign an approval, and log it; return the person and the head of the log.

        Raises:
            RoleError: The key is of nobody whose role may approve this.
        """
        people: People = self.roles.people_with(FOUR_EYES[action])
        person = person_of_key(people, signer.fingerprint)
        body = {"action": action, "target": target, "person": person or "nobody"}
        if person is None:
            self.log.append_event(signer, "refused", {**body, "what": "approval"}, known)
            roles = " or ".join(FOUR_EYES[action])
            raise RoleError(f"{action}: an approval needs the role {roles}, which key {signer.fingerprint} has not")
        ActApproval(action, target, self.roles.digest).sign_approval(self.home, person, signer)
        return person, self.log.append_event(signer, "approval", body, known)


def sign_roles(source: Path, home: Path, signer: PersonSigner, known: LogHead | None) -> tuple[Project, LogHead]:
    """Put a TOML file of people in force in a directory.

    Raises:
        ConfigError: The file is none of roles.
        RoleError: The key is no owner's, or a second person has not approved the change of earlier roles.
    """
    roles = load_config(source, ProjectRoles)
    project = Project.open(home) if is_project(home) else None
    former = None if project is None else project.roles
    for version in (former, roles):
        if version is not None and person_of_key(version.people_with(("owner",)), signer.fingerprint) is None:
            raise RoleError(f"{source}: key {signer.fingerprint} is no owner's; an owner of the project signs")
    if former is not None and former.name != roles.name:
        raise RoleError(f"{source}: a project keeps its name, {former.name}")
    if project is not None:
        project.require_second("policy_change", roles.digest, signer.fingerprint)
    statement = roles.model_dump(mode="json")
    signature = signer.sign_data(in_domain(_DOMAIN, canonical_json(statement))).hex()
    envelope = {"key": signer.fingerprint, "signature": signature, "statement": statement}
    body = {"roles": roles.digest, "statement": statement}
    home.mkdir(parents=True, exist_ok=True)
    log = AccessLog(home / ACCESS_FILE, roles.name, 0 if project is None else project.roles_line)
    head = log.append_event(signer, ROLES_KIND, body, known)
    replace_file(home / ROLES_FILE, canonical_json(envelope), 0o664)
    return Project(home, roles, head.num_events), head


def is_project(home: Path) -> bool:
    """Whether a directory has a file of roles, or had one."""
    return (home / ROLES_FILE).exists() or (home / ACCESS_FILE).exists()


def verify_access_log(home: Path, owner: str | None = None, known: LogHead | None = None) -> AccessSummary:
    """Check every line of an access log: chain, signatures, and that each signer had a place in the roles of the time.

    Args:
        owner: Fingerprint of the key that must have signed the first roles; None: the log's own word.
        known: A head that the log must contain.

    Raises:
        AuditLogError: Names the first line that does not hold.
    """
    path = home / ACCESS_FILE
    scope = Project.open(home).roles.name
    roles: ProjectRoles | None = None
    entries = []
    for entry in read_access_log(path, scope, known):
        key, place = str(entry.body["key"]), f"{path}: line {entry.head.num_events}"
        if entry.kind == ROLES_KIND:
            if roles is None and owner not in (None, key):
                raise AuditLogError(f"{place}: the first roles are signed by {key}, expected {owner}")
            roles = _next_roles(roles, entry.body, place)
        elif roles is None:
            raise AuditLogError(f"{place}: comes before any roles")
        else:
            signer = roles.person_with(key)
            person = "nobody" if signer is None and entry.kind == "refused" else signer
            if person is None or person != entry.body.get("person"):
                raise AuditLogError(f"{place}: is signed by a key that is not {entry.body.get('person')!r}'s")
        entries.append(entry)
    if roles is None:
        raise AuditLogError(f"{path}: has no roles")
    return AccessSummary(entries, entries[-1].head, roles)


def _open_statement(content: bytes, path: Path) -> ProjectRoles:
    try:
        envelope = parse_canonical(content[: _MAX_BYTES + 1])
        statement, key = canonical_json(envelope["statement"]), str(envelope["key"])
        roles = ProjectRoles.model_validate_json(statement)
        verify_by_fingerprint(key, bytes.fromhex(envelope["signature"]), in_domain(_DOMAIN, statement))
    except (ValueError, KeyError, TypeError, SignatureError) as exc:
        raise RoleError(f"{path}: is no signed file of roles, or was changed; phalanx roles sign makes it") from exc
    if person_of_key(roles.people_with(("owner",)), key) is None:
        raise RoleError(f"{path}: is signed by {printable_text(key, 66)}, who is no owner in it")
    return roles


def _next_roles(former: ProjectRoles | None, body: Mapping[str, Any], place: str) -> ProjectRoles:
    """Return the roles of one event, which an owner of the former ones must have signed."""
    try:
        roles = ProjectRoles.model_validate_json(canonical_json(body["statement"]))
    except (ValidationError, KeyError) as exc:
        raise AuditLogError(f"{place}: holds no roles") from exc
    if person_of_key((former or roles).people_with(("owner",)), str(body.get("key"))) is None:
        raise AuditLogError(f"{place}: roles that no owner signed")
    if former is not None and former.name != roles.name:
        raise AuditLogError(f"{place}: roles of another project")
    return roles


def _logged_roles(path: Path) -> tuple[ProjectRoles | None, int]:
    """Return the roles that a log named last, and the number of that line.

    Lines that change roles are checked, with their place in the chain: one of another project, or one that is there
    twice, is refused. The other lines are not checked.
    """
    roles, last_number, previous = None, 0, b""
    try:
        with path.open("rb") as file:
            for number, entry in enumerate(file, 1):
                line = entry.rstrip(b"\n")
                if is_of_roles(line):
                    event = parse_canonical(line)
                    signature = bytes.fromhex(event["signature"])
                    verify_by_fingerprint(str(event["body"]["key"]), signature, signed_part(event))
                    roles, last_number = _next_roles(roles, event["body"], f"{path}: line {number}"), number
                    head = first_head(roles.name)
                    before = head.digest if number == 1 else next_head(head, previous).digest
                    check_place(event, roles.name, LogHead(number - 1, before))
                previous = line
    except OSError as exc:
        raise AuditLogError(f"{path}: cannot be read ({exc.strerror}); put the whole log back") from exc
    except (ValueError, KeyError, TypeError, SignatureError) as exc:
        raise AuditLogError(f"{path}: a line that changes roles is broken; put the whole log back") from exc
    return roles, last_number
