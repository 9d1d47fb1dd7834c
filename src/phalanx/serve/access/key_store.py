"""API keys: made, listed, limited, revoked and recognised."""

import base64
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from phalanx.errors import ConfigError, KeyFileError, RollbackError
from phalanx.security.crypto import (
    Identity,
    Peer,
    load_signer,
    lock_file,
    make_signer,
    read_number,
    read_public_signer,
    steady_now,
    write_number,
)
from phalanx.serve.access.key_file import (
    MAX_KEYS,
    KeyFile,
    KeyLimits,
    KeyRecord,
    KeyTerms,
    ModelOrder,
    read_key_file,
    secret_digest,
    write_key_file,
)
from phalanx.serve.access.page_sessions import PageSessions

KEYS_FILE, SEEN_FILE = "keys.json", "keys.seen"
OPERATOR_HOME, OPERATOR_FILE = "operator", "operator.json"
_SECRET = re.compile(r"phx_([a-z2-7]{12})_[a-z2-7]{52}")
_MAX_SECRET_CHARACTERS = 128
_UNKNOWN_SALT, _UNKNOWN_DIGEST = "00" * 16, "00" * 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Caller:
    """The holder of a valid key, as every other part of the server knows it.

    Attributes:
        models: Names of the models that the key may use; None allows all.
        session: Name of the session of the chat page that stands for the key; empty for the key itself.
    """

    key_id: str
    owner: str
    role: Literal["user", "operator"]
    models: frozenset[str] | None
    may_skip_mark: bool
    session: str = ""

    def allows_model(self, name: str) -> bool:
        """Whether the key may use a model."""
        return self.models is None or name in self.models


class KeyStore:
    """The keys of one access directory.

    Args:
        directory: Holds ``keys.json`` and ``keys.seen``.
        operator: The signer that the file must have.
        operator_home: Directory of the operator's key, which only changes of keys read.

    Attributes:
        sessions: Secrets of the chat page, which stand for keys while this object lives.

    Guarantees:
        A file that is missing, altered or older than one that was read lets nobody in. A change of the file counts
        from the next request on. The time of `find_caller` depends neither on the number of keys nor on how much of
        a secret is right. Against whoever can write the directory and has not the operator's key; such a writer can
        still stop the service, and can undo what ``keys.seen`` remembers while no server runs.

    Raises:
        KeyFileError: (from `open`) The file is not one to go on with.
    """

    def __init__(self, directory: Path, operator: Peer, operator_home: Path) -> None:
        self._path, self._seen_path = directory / KEYS_FILE, directory / SEEN_FILE
        self._operator, self._operator_home = operator, operator_home
        self._operator_file = directory / OPERATOR_FILE
        self.sessions = PageSessions()
        self._records: dict[str, KeyRecord] = {}
        self._orders: dict[str, ModelOrder] = {}
        self._sequence = 0
        self._version: tuple[int, ...] | None = None
        self._fault: str | None = None
        self._load_file()

    @classmethod
    def open(cls, directory: Path, *, operator: Peer | None = None, operator_home: Path | None = None) -> Self:
        """Open the keys of a directory.

        Args:
            operator: The signer; that of ``operator.json`` in the directory if None, which whoever can write there
                can exchange together with the keys.
            operator_home: ``operator`` in the directory if None.

        Raises:
            CertificateError: ``operator.json`` is missing or malformed.
            KeyFileError: The keys are missing, altered, or older than at an earlier reading.
        """
        signer = operator or read_public_signer(directory / OPERATOR_FILE)
        return cls(directory, signer, operator_home or directory / OPERATOR_HOME)

    @classmethod
    def create(cls, directory: Path, *, operator_home: Path | None = None) -> Self:
        """Make the directory with an operator's key and no API keys.

        Raises:
            ConfigError: The directory cannot be made.
        """
        home = operator_home or directory / OPERATOR_HOME
        try:
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"{directory}: cannot be made ({exc.strerror}); give another --access") from exc
        identity = make_signer(home, directory / OPERATOR_FILE, "operator")
        write_key_file(directory / KEYS_FILE, identity, KeyFile())
        return cls(directory, identity.public, home)

    @property
    def fault(self) -> str | None:
        """Why nobody is let in at present; None while the file is in order."""
        try:
            self._reload_file()
        except KeyFileError as exc:
            return str(exc)
        return None

    def create_key(self, terms: KeyTerms) -> tuple[str, str]:
        """Make a key and return its id and its secret, which nothing holds afterwards.

        Raises:
            CertificateError: The operator's key cannot be read.
            KeyFileError: There are too many keys, or the file was altered.
        """
        key_id, random_part = _random_text(8)[:12], _random_text(32)
        secret, salt = f"phx_{key_id}_{random_part}", secrets.token_hex(16)
        record = KeyRecord(
            key_id=key_id,
            salt=salt,
            digest=secret_digest(salt, secret),
            created=int(steady_now().timestamp()),
            terms=terms,
        )
        with lock_file(self._path):
            operator = self._load_operator()
            self._load_file()
            if len(self._records) >= MAX_KEYS or key_id in self._records:
                raise KeyFileError(f"{self._path}: holds {len(self._records)} keys, at most {MAX_KEYS} are allowed")
            self._write_records(operator, [*self._records.values(), record])
        return key_id, secret

    def revoke_key(self, key_id: str) -> KeyRecord:
        """Revoke a key for good, or return what says that it is revoked already.

        Raises:
            CertificateError: The operator's key cannot be read.
            KeyFileError: There is no such key, or the file was altered.
        """

        def revoke(record: KeyRecord) -> KeyRecord:
            if record.revoked is not None:
                return record
            return record.model_copy(update={"revoked": int(steady_now().timestamp())})

        return self._change_key(key_id, revoke)

    def quarantine_key(self, key_id: str, *, is_quarantined: bool) -> KeyRecord:
        """Take a key out of service until it is released, or release it; answers that are being sent to it end.

        Raises:
            CertificateError: The operator's key cannot be read.
            KeyFileError: There is no such key, or the file was altered.
        """

        def quarantine(record: KeyRecord) -> KeyRecord:
            since = (record.quarantined or int(steady_now().timestamp())) if is_quarantined else None
            return record.model_copy(update={"quarantined": since})

        return self._change_key(key_id, quarantine)

    def change_terms(self, key_id: str, change: Callable[[KeyTerms], KeyTerms]) -> KeyRecord:
        """Change the rights of a key; servers follow from the next request on, and earlier usage stays counted.

        Raises:
            CertificateError: The operator's key cannot be read.
            KeyFileError: There is no such key, it is revoked, or the file was altered.
        """

        def change_record(record: KeyRecord) -> KeyRecord:
            if record.revoked is not None:
                raise KeyFileError(f"{self._path}: key {key_id} is revoked for good; make another one")
            return record.model_copy(update={"terms": change(record.terms)})

        return self._change_key(key_id, change_record)

    def _change_key(self, key_id: str, change: Callable[[KeyRecord], KeyRecord]) -> KeyRecord:
        with lock_file(self._path):
            operator = self._load_operator()
            self._load_file()
            record = self._records.get(key_id)
            if record is None:
                raise KeyFileError(f"{self._path}: holds no key {key_id[:40]!r}; phalanx keys list shows them")
            changed = change(record)
            if changed != record:
                self._write_records(operator, list({**self._records, key_id: changed}.values()))
            return changed

    def order_model(self, order: ModelOrder) -> None:
        """Put an order about a model in the place of an older one; servers follow it from the next message on.

        Raises:
            CertificateError: The operator's key cannot be read.
        """
        with lock_file(self._path):
            operator = self._load_operator()
            self._load_file()
            self._orders = {**self._orders, order.model: order}
            self._write_records(operator, list(self._records.values()))

    def list_orders(self) -> list[ModelOrder]:
        """Return all orders about models.

        Raises:
            KeyFileError: The file is missing, altered or older than before.
        """
        self._reload_file()
        return list(self._orders.values())

    def allows_models(self, models: Iterable[tuple[str, str]]) -> bool:
        """Whether no order is against a model, for each of some ids with the digests of their files."""
        self._reload_or_close()
        return self._allows_models(models)

    def _allows_models(self, models: Iterable[tuple[str, str]]) -> bool:
        orders = self._orders
        return all(name not in orders or orders[name].allows_digest(digest) for name, digest in models)

    def list_keys(self) -> list[KeyRecord]:
        """Return all keys in the order in which they were made.

        Raises:
            KeyFileError: The file is missing, altered or older than before.
        """
        self._reload_file()
        return list(self._records.values())

    def find_caller(self, secret: str, address: str) -> Caller | None:
        """Recognise a caller by its secret.

        Args:
            secret: Any text that a client sent.
            address: The client's IP address; any other text is outside of every network.

        Returns:
            None for a secret that is unknown, revoked, expired or used from elsewhere, without telling these apart,
            and for every secret while the file is not in order.
        """
        self._reload_or_close()
        stands_for = self.sessions.find_key(secret[:_MAX_SECRET_CHARACTERS])
        if stands_for is not None:
            key_id, session = stands_for
            caller = self._admit_record(self._records.get(key_id), address)
            # a browser never steers the server
            return None if caller is None else replace(caller, role="user", session=session)
        match = _SECRET.fullmatch(secret[:_MAX_SECRET_CHARACTERS])
        record = self._records.get(match[1]) if match and len(secret) <= _MAX_SECRET_CHARACTERS else None
        salt, digest = (record.salt, record.digest) if record else (_UNKNOWN_SALT, _UNKNOWN_DIGEST)
        # an unknown id costs the same digest and comparison as one that exists
        is_equal = hmac.compare_digest(secret_digest(salt, secret[:_MAX_SECRET_CHARACTERS]), digest)
        return self._admit_record(record, address) if is_equal else None

    @staticmethod
    def _admit_record(record: KeyRecord | None, address: str) -> Caller | None:
        if record is None or not record.is_active(steady_now().timestamp()) or not record.allows_address(address):
            return None
        terms = record.terms
        models = None if terms.models is None else frozenset(terms.models)
        return Caller(record.key_id, terms.owner, terms.role, models, terms.may_skip_mark)

    def is_active(self, key_id: str) -> bool:
        """Whether a key may still be used: asked while an answer is being sent."""
        self._reload_or_close()
        record = self._records.get(key_id)
        return record is not None and record.is_active(steady_now().timestamp())

    def is_admitted(self, caller: Caller, models: Iterable[tuple[str, str]] = ()) -> bool:
        """Whether a caller may still be answered: its key is active, its session goes on, its models are in service.

        Args:
            models: Ids with the digests of their files.
        """
        return (
            self.is_active(caller.key_id)
            and (not caller.session or self.sessions.is_open(caller.session))
            and self._allows_models(models)
        )

    def limits_of(self, key_id: str) -> KeyLimits:
        """Return the budgets of a key; an unknown key has budgets that allow nothing."""
        self._reload_or_close()
        record = self._records.get(key_id)
        return record.terms.limits if record else _NOTHING

    def _load_operator(self) -> Identity:
        return load_signer(self._operator_home, self._operator_file)

    def _write_records(self, operator: Identity, records: list[KeyRecord]) -> None:
        if operator.public != self._operator:
            raise KeyFileError(f"{self._path}: is signed by another operator than {self._operator_home} holds")
        content = KeyFile(sequence=self._sequence + 1, keys=tuple(records), models=tuple(self._orders.values()))
        write_key_file(self._path, operator, content)
        self._load_file()

    def _reload_or_close(self) -> None:
        try:
            self._reload_file()
        except KeyFileError as exc:
            if self._records:
                _log.error("nobody is let in: %s", exc)
            self._records = {}

    def _reload_file(self) -> None:
        version = self._file_version()
        if version is None or version != self._version:
            self._load_file()
        elif self._fault is not None:
            # a file that was refused is not read again for each request
            raise KeyFileError(self._fault)

    def _file_version(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _load_file(self) -> None:
        # asked before it is read: a change in between is read once more
        self._version = self._file_version()
        try:
            content = self._read_newest()
        except KeyFileError as exc:
            self._fault = str(exc)
            raise
        self._fault = None
        self._sequence = content.sequence
        self._records = {record.key_id: record for record in content.keys}
        self._orders = {order.model: order for order in content.models}

    def _read_newest(self) -> KeyFile:
        try:
            # within the lock: a file that was read before it could be older than what another process has seen since
            with lock_file(self._seen_path):
                content = read_key_file(self._path, self._operator)
                seen = max(self._sequence, read_number(self._seen_path, "sequence") or 0)
                if content.sequence < seen:
                    raise KeyFileError(
                        f"{self._path}: is change {content.sequence}, and change {seen} was read before; "
                        "put the operator's last file back"
                    )
                if content.sequence > seen:
                    write_number(self._seen_path, "sequence", content.sequence)
        except RollbackError as exc:
            raise KeyFileError(str(exc)) from exc
        return content


_NOTHING = KeyLimits(
    requests_per_minute=0, tokens_per_minute=0, requests_per_month=0, tokens_per_month=0, concurrency=0
)


def _random_text(num_bytes: int) -> str:
    return base64.b32encode(secrets.token_bytes(num_bytes)).decode("ascii").rstrip("=").lower()
