"""The gate of a command: files of roles that govern its places, the person who runs it, and a log of its reads."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from phalanx.closing import Closeable
from phalanx.errors import PhalanxError, RoleError
from phalanx.policy.rights import COMMANDS, FOUR_EYES, Action, Right, right_of_call, row_of_call
from phalanx.policy.roles import ACCESS_FILE, ROLES_FILE, Project
from phalanx.policy.signers import open_person_signer
from phalanx.security.audit import PersonSigner
from phalanx.security.audit.line import LogHead
from phalanx.security.crypto import replace_file

KEY = "PHALANX_KEY"
"""Environment variable that names the key of the person at this machine."""


def find_projects(places: Iterable[Path]) -> list[Path]:
    """Return the directories with a file of roles at or above some places; all of them govern."""
    homes = dict.fromkeys(
        folder for place in places for folder in (_absolute(place), *_absolute(place).parents) if _is_project(folder)
    )
    return list(homes)


def _absolute(place: Path) -> Path:
    # resolved, so that a link into a project does not lead around its roles
    return Path(os.path.realpath(place))


def _is_project(folder: Path) -> bool:
    try:
        return (folder / ROLES_FILE).is_file() or (folder / ACCESS_FILE).is_file()
    except OSError:
        return False


def _version_of(home: Path) -> tuple[int, ...]:
    """Return values that differ between two files of roles; an empty tuple without a file."""
    try:
        status = (home / ROLES_FILE).stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size


def default_reference() -> str:
    """Return the key of the person at this machine: PHALANX_KEY, or the key that signs datasets."""
    from phalanx.data.shards import default_signing_key  # noqa: PLC0415 - numpy, for nothing where roles are not used

    return os.environ.get(KEY) or str(default_signing_key())


class HeadMemory:
    """The ends of access logs that this person has seen, in the person's own directory: a cut log is found by them."""

    def __init__(self) -> None:
        home = os.environ.get("XDG_CONFIG_HOME")
        self._folder = (Path(home) if home else Path.home() / ".config") / "phalanx" / "access"

    def read_head(self, home: Path) -> LogHead | None:
        """Return the last head that was seen; None for a project that is new to this person."""
        try:
            fields = json.loads(self._file_of(home).read_bytes())
            return LogHead(int(fields["num_events"]), str(fields["digest"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise RoleError(
                f"{self._file_of(home)}: is damaged; compare the access log with another person's head"
            ) from exc

    def keep_head(self, home: Path, head: LogHead) -> None:
        """Remember a head."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        content = json.dumps({"home": str(home), "num_events": head.num_events, "digest": head.digest}).encode()
        replace_file(self._file_of(home), content, 0o600)

    def _file_of(self, home: Path) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(home)).hexdigest()[:32]}.json"


class RoleGate(Closeable):
    """Who runs one command, and whether this person may.

    Args:
        command: Words of the command, a key of `COMMANDS`.
        homes: Directories of the projects that govern it; reads elsewhere add theirs.
        reference: Key of the person, as `open_person_signer`; None: the one of this machine.

    Guarantees:
        A command of a person without its role, and a read by somebody who is not in the file, are refused and logged
        before anything is read. Holds against people who use these programs, not against who opens files without.
    """

    def __init__(self, command: str, homes: Iterable[Path], reference: str | None = None) -> None:
        self._command, self._reference = command, reference
        self._right = COMMANDS.get(command, Right(("owner",)))
        self._memory = HeadMemory()
        self._stack = ExitStack()
        self._key: PersonSigner | None = None
        self._projects: dict[Path, Project] = {}
        self._versions: dict[Path, tuple[int, ...]] = {}
        self._seen: set[tuple[Path, str, str]] = set()
        self._computed: dict[tuple[str, Path], str] = {}
        try:
            for home in homes:
                self._add_project(home)
        except PhalanxError:
            self.close()
            raise

    def note_read(self, kind: str, digest: str | Callable[[], str], where: Path, *, is_sealed: bool) -> None:
        """Write a read into the logs of all projects that govern it; the same one only once in a command."""
        projects = self._projects_at(where)
        if not isinstance(digest, str):
            digest = self._compute_digest(kind, digest, where) if projects else ""
        for project in projects:
            if (project.home, kind, digest) in self._seen:
                continue
            facts = {"what": kind, "digest": digest}
            if project.roles.person_with(self._signer.fingerprint) is None:
                self._refuse(project, facts, "has no role in this project")
            if is_sealed and self._right.action == "decryption":
                self._require_second(project, "decryption", digest)
            self._append(project, "read", facts)
            self._seen.add((project.home, kind, digest))

    def require_approvals(self, action: str, target: Callable[[], str], where: Path) -> None:
        """Refuse an act that nobody but this person has approved."""
        for project in self._projects_at(where):
            self._require_second(project, next(name for name in FOUR_EYES if name == action), target())

    def check_caller(self, call: str, name: str, key: str | None) -> None:
        """Refuse a remote caller who lacks the role; a key decides before a name."""
        right = right_of_call(call)
        for project in [self._current_project(home) for home in self._projects]:
            person = (
                project.roles.person_with(key) if key is not None else name if name in project.roles.people else None
            )
            if right is not None and (not right.roles or set(right.roles) & set(project.roles.roles_of(person))):
                continue
            needed = "no role may" if right is None else f"needs the role {' or '.join(right.roles)}"
            # once for each caller and row: somebody who calls again and again must not fill the log
            refusal = (project.home, row_of_call(call) or "", f"{name} {key}")
            if refusal not in self._seen:
                self._seen.add(refusal)
                facts = {"what": "call", "call": call[:200], "caller": name[:200], "caller_key": key or ""}
                self._append(project, "refused", facts)
            raise RoleError(f"{call}: {needed}; {name} has {_list_roles(project, person)}")

    def close(self) -> None:
        self._stack.close()

    @property
    def _signer(self) -> PersonSigner:
        if self._key is None:
            try:
                self._key = self._stack.enter_context(open_person_signer(self._reference or default_reference()))
            except PhalanxError as exc:
                raise RoleError(
                    f"this project has roles, and your key cannot be used: {exc}; name it in {KEY}"
                ) from exc
        return self._key

    def _current_project(self, home: Path) -> Project:
        """Return a project with the roles in force; roles signed since this process began count too."""
        is_same = home in self._projects and self._versions[home] == _version_of(home)
        return self._projects[home] if is_same else self._add_project(home)

    def _add_project(self, home: Path) -> Project:
        version = _version_of(home)
        project = Project.open(home)
        self._projects[home], self._versions[home] = project, version
        if self._right.roles:
            person = project.roles.person_with(self._signer.fingerprint)
            if not set(self._right.roles) & set(project.roles.roles_of(person)):
                self._refuse(project, {"what": "command"}, f"needs the role {' or '.join(self._right.roles)}")
        return project

    def _compute_digest(self, kind: str, digest: Callable[[], str], where: Path) -> str:
        place = (kind, _absolute(where))
        if place not in self._computed:
            self._computed[place] = digest()
        return self._computed[place]

    def _projects_at(self, where: Path) -> list[Project]:
        return [self._current_project(home) for home in find_projects((where,))]

    def _require_second(self, project: Project, action: Action, target: str) -> None:
        try:
            approvers = project.require_second(action, target, self._signer.fingerprint)
        except RoleError:
            self._append(project, "refused", {"what": "act", "action": action, "target": target})
            raise
        if (project.home, action, target) not in self._seen:
            self._append(project, "act", {"action": action, "target": target, "approved_by": approvers})
            self._seen.add((project.home, action, target))

    def _refuse(self, project: Project, facts: dict[str, Any], reason: str) -> None:
        self._append(project, "refused", facts)
        person = project.roles.person_with(self._signer.fingerprint)
        raise RoleError(
            f"phalanx {self._command}: {reason}; {person or f'key {self._signer.fingerprint}'} has "
            f"{_list_roles(project, person)} in {project.roles.name}"
        )

    def _append(self, project: Project, kind: str, facts: dict[str, Any]) -> None:
        person = project.roles.person_with(self._signer.fingerprint)
        body = {**facts, "command": self._command, "person": person or "nobody"}
        body["roles"] = list(project.roles.roles_of(person))
        seen_head = self._memory.read_head(project.home)
        self._memory.keep_head(project.home, project.log.append_event(self._signer, kind, body, seen_head))


def _list_roles(project: Project, person: str | None) -> str:
    return ", ".join(project.roles.roles_of(person)) or "none"
