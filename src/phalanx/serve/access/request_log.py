"""One signed, chained line for each request: who, what model, how much, with what verdict; never a word of its text.

Where the operator asks for texts, they are in the line as well, sealed for a key that the server does not have.

ACCESS_DIR/log/requests-NNNNNN.jsonl. A file is a log of its own, no longer than a server reads again at its start;
the first line of each further file names the end of the one before it.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.closing import Closeable
from phalanx.config import printable_text
from phalanx.errors import AuditLogError, DiskError
from phalanx.security.audit import AuditLog, LogEntry, LogHead, verify_log
from phalanx.security.crypto import Identity, Peer
from phalanx.serve.access.key_store import Caller
from phalanx.serve.access.request_notes import note_facts
from phalanx.serve.access.sealed_texts import SEALED_KEY, RequestTexts, TextSealer

LOG_FOLDER, LOG_RUN = "log", "serve"
_FILE_NAME = re.compile(r"requests-([0-9]{6})\.jsonl")
_SECRET_START = re.compile(r"phx_[a-z2-7]{4,}(_[a-z2-7]*)?")
_MAX_LINES, _MAX_FILE_BYTES = 5000, 64 * 1024 * 1024
"""Of one file, after which the next one begins; sealed texts make lines of up to 3 MB."""
_MAX_WORD, _MAX_WORDS = 100, 50
_CONTINUES, _REQUEST, _REFUSED = "continues", "request", "refused"
_OK, _UNPAID_STATUSES = 200, (404, 405, 429)
"""Of requests that use up no budget, so that a key may send them without end."""


@dataclass(frozen=True)
class RequestFacts:
    """What the log says of one request.

    Attributes:
        route: Name of the route, such as ``/v1/chat/completions``.
        model_digest: Digest of the model's files; where somebody else has them, the model's name.
        status: HTTP status of the answer.
        sizes: Counts by name, such as ``prompt_tokens``.
        verdicts: One word or name for each filter that had something to say.
        mark: Name of the text's watermark; empty where no text was made.
        texts: What was asked and answered; it is written where the log seals texts, and nowhere else.
    """

    route: str
    model_digest: str
    status: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    verdicts: Sequence[str] = ()
    mark: str = ""
    texts: RequestTexts | None = None


class RequestLog(Closeable):
    """The log of one server, open for its one writer.

    Args:
        directory: Folder of the log files, made where missing.
        max_lines: Lines of one file, after which the next one begins.
        max_file_bytes: Bytes of one file, after which the next one begins.
        sealer: Seals texts of requests; None writes none.

    Raises:
        AuditLogError: The last file was altered, or another server has it open.

    Guarantees:
        A line that was written outlives the process, and after `sync` the machine. A line that is changed, taken out
        or put in is found by `verify_request_log` and by the next start. Against whoever can write the files and has
        not the server's key. Such a writer can cut off the end of the last file unnoticed.
    """

    def __init__(
        self,
        directory: Path,
        identity: Identity,
        max_lines: int = _MAX_LINES,
        max_file_bytes: int = _MAX_FILE_BYTES,
        *,
        sealer: TextSealer | None = None,
    ) -> None:
        self._sealer, self._max_file_bytes = sealer, max_file_bytes
        self._directory, self._identity, self._max_lines = directory, identity, max_lines
        self._refused: Counter[str] = Counter()
        self._unpaid: Counter[tuple[str, int]] = Counter()
        files = log_files(directory)
        self._number = len(files) or 1
        self._drop_unbegun_file()
        self._log = self._open_file(self._number)

    @property
    def seals_texts(self) -> bool:
        """Whether texts are wanted."""
        return self._sealer is not None

    def record_request(self, caller: Caller, facts: RequestFacts) -> None:
        """Write one line; of requests that no budget bounds the first, and `write_refusals` says how many followed.

        Raises:
            DiskError: The disk refuses: an answer that cannot be recorded must not be given.
        """
        note_facts(caller, facts)
        # the start and the end of a page's session have no model
        is_unpaid = facts.status in _UNPAID_STATUSES or (facts.status == _OK and not facts.model_digest)
        if is_unpaid and (caller.key_id, facts.status) in self._unpaid:
            self._unpaid[caller.key_id, facts.status] += 1
            return
        body = {
            "key": caller.key_id,
            "owner": caller.owner,
            "route": _word(facts.route),
            "model": _word(facts.model_digest),
            "status": facts.status,
            "sizes": {_word(name): int(count) for name, count in list(facts.sizes.items())[:_MAX_WORDS]},
            "verdicts": [_word(verdict) for verdict in list(facts.verdicts)[:_MAX_WORDS]],
            "mark": _word(facts.mark),
        }
        if self._sealer is not None and facts.texts is not None:
            body[SEALED_KEY] = self._sealer.seal_texts(body, facts.texts)
        self._append(_REQUEST, body)
        if is_unpaid:
            self._unpaid[caller.key_id, facts.status] = 0

    def record_event(self, kind: str, facts: Mapping[str, str | int]) -> None:
        """Write a line about the server itself: started, stopped, a model put into service or taken out of it."""
        self._append(_word(kind), {_word(name): value for name, value in facts.items()})

    def count_refusal(self, address: str) -> None:
        """Count a request without a valid key; `write_refusals` records them together, so that they fill no disk."""
        if address in self._refused or len(self._refused) < _MAX_WORDS:
            self._refused[address] += 1
        else:
            self._refused["others"] += 1

    def write_refusals(self) -> None:
        """Write one line about requests since the last one that have none of their own: by address, or key and status.

        Nothing is written where there are none.
        """
        by_key = {f"{key} {status}": count for (key, status), count in self._unpaid.items() if count}
        if self._refused or by_key:
            by_address = {_word(name): count for name, count in self._refused.items()}
            self._append(_REFUSED, {"by_address": by_address, **({"by_key": by_key} if by_key else {})})
        self._refused.clear()
        self._unpaid.clear()

    def sync(self) -> None:
        """Force all lines to disk."""
        self._log.sync_events()

    def close(self) -> None:
        """Write pending lines, force all to disk and let others open the log; closing twice is harmless."""
        self.write_refusals()
        self._log.close()

    def _append(self, kind: str, body: dict[str, object]) -> None:
        if self._log.current_head.num_events >= self._max_lines or self._log.size_bytes >= self._max_file_bytes:
            self._begin_file()
        self._log.append_event(kind, body)

    def _begin_file(self) -> None:
        """Go over to a further file once its first line is there; a disk that refuses leaves the old one."""
        head, name = self._log.sync_events(), _name_of(self._number)
        further = self._open_file(self._number + 1)
        try:
            further.append_event(_CONTINUES, {"file": name, "num_events": head.num_events, "digest": head.digest})
        except DiskError:
            further.close()
            raise
        self._log.close()
        self._log, self._number = further, self._number + 1

    def _open_file(self, number: int) -> AuditLog:
        return AuditLog(self._directory / _name_of(number), self._identity, LOG_RUN)

    def _drop_unbegun_file(self) -> None:
        """Remove a last file whose first line, which ties it to the one before, a crash or full disk prevented."""
        path = self._directory / _name_of(self._number)
        if self._number == 1:
            return
        with path.open("rb") as file:
            is_begun = file.readline().endswith(b"\n")
        if not is_begun:
            # opened first: another server that is about to write the line has it locked
            self._open_file(self._number).close()
            path.unlink()
            self._number -= 1


def log_files(directory: Path) -> list[Path]:
    """Return the files of a log in order."""
    files = sorted(path for path in directory.glob("requests-*.jsonl") if _FILE_NAME.fullmatch(path.name))
    if [path.name for path in files] != [_name_of(number) for number in range(1, len(files) + 1)]:
        raise AuditLogError(f"{directory}: expected files {_name_of(1)} and following without a gap; put them back")
    return files


def verify_request_log(
    directory: Path, server: Peer, visit: Callable[[LogEntry], None] = lambda line: None
) -> Counter[str]:
    """Check every line of every file and return the number of lines by kind.

    Args:
        server: The signer, see ``server.json``.
        visit: Is told each line that holds, in order.

    Raises:
        AuditLogError: Names the first file and line that does not hold, or the file that is missing or cut.
    """
    kinds: Counter[str] = Counter()
    head: LogHead | None = None
    for path in log_files(directory):
        links: list[LogEntry] = []

        def visit_line(line: LogEntry, links: list[LogEntry] = links) -> None:
            if line.kind == _CONTINUES:
                links.append(line)
            visit(line)

        summary = verify_log(path, server, run=LOG_RUN, visit=visit_line)
        is_linked = bool(links) and links[0].sequence == 0 and head is not None
        if head is not None and not (is_linked and _is_end(links[0], head)):
            raise AuditLogError(f"{path}: does not go on where the file before it ends; put both back as they were")
        kinds.update(summary.kinds)
        head = summary.head
    return kinds


def _is_end(link: LogEntry, head: LogHead) -> bool:
    return (link.body.get("num_events"), link.body.get("digest")) == (head.num_events, head.digest)


def _name_of(number: int) -> str:
    return f"requests-{number:06}.jsonl"


def _word(text: str) -> str:
    # a client may send its key in the place of a name
    return printable_text(_SECRET_START.sub("phx_...", text), _MAX_WORD)
