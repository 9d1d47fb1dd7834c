"""The keys of encrypted checkpoints: where the holder's key comes from, and how it wraps each data key."""

import base64
import json
import os
import secrets
import shlex
import subprocess
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from phalanx.config import canonical_json
from phalanx.errors import CertificateError, CheckpointError
from phalanx.security.crypto import in_domain, parse_canonical, read_private, write_private

KEY_FILE = "key.json"
"""The wrapped data key of a checkpoint; not in the manifest, so that a key can be rotated without a new signature."""
_KEY_BYTES, _NONCE_BYTES = 32, 12
_COMMAND_TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 64 * 1024


class KeyHolder(Protocol):
    """An object that can wrap and unwrap data keys."""

    name: str
    """Name of the key in messages and ``key.json``; tells nothing about it."""

    def wrap_key(self, data_key: bytes, about: bytes) -> bytes:
        """Encrypt a data key so that it opens for `about` only."""

    def unwrap_key(self, wrapped: bytes, about: bytes) -> bytes:
        """Decrypt a data key."""


class LocalKey:
    """A key of 32 bytes in this process; AES-256-GCM with a random nonce wraps the data keys."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        identity = HKDF(algorithm=SHA256(), length=8, salt=None, info=in_domain("checkpoint-key-name/1", b""))
        self.name = f"aes256-{identity.derive(key).hex()}"

    def wrap_key(self, data_key: bytes, about: bytes) -> bytes:
        """As `KeyHolder` says."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data_key, about)

    def unwrap_key(self, wrapped: bytes, about: bytes) -> bytes:
        """As `KeyHolder` says."""
        try:
            return self._cipher.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], about)
        except (InvalidTag, ValueError) as exc:
            raise CheckpointError(
                f"{KEY_FILE}: does not open with key {self.name}: it was altered or belongs to another run or step"
            ) from exc

    def __repr__(self) -> str:
        return f"LocalKey({self.name})"


class CommandKey:
    """A key that a program keeps, such as the client of a key management service.

    The program gets one JSON object on its standard input, ``{"operation": "wrap" or "unwrap", "data": base64,
    "context": base64}``, and answers with ``{"data": base64}``; exit code 0. `context` must be bound to the data as
    additional authenticated data (the encryption context of such services).
    """

    def __init__(self, command: str) -> None:
        self._arguments = shlex.split(command)
        if not self._arguments:
            raise CheckpointError("checkpoint.key: the command is empty")
        # arguments may name accounts; the program's name is enough for a message
        self.name = f"command-{Path(self._arguments[0]).name}"

    def wrap_key(self, data_key: bytes, about: bytes) -> bytes:
        """As `KeyHolder` says."""
        return self._ask_command("wrap", data_key, about)

    def unwrap_key(self, wrapped: bytes, about: bytes) -> bytes:
        """As `KeyHolder` says."""
        return self._ask_command("unwrap", wrapped, about)

    def _ask_command(self, operation: str, data: bytes, about: bytes) -> bytes:
        question = {"operation": operation, "data": _to_text(data), "context": _to_text(about)}
        try:
            done = subprocess.run(  # noqa: S603 - the command is the user's own
                self._arguments,
                input=json.dumps(question).encode(),
                capture_output=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
            )
            # what the program printed is not shown: it may hold a key
            if done.returncode != 0 or len(done.stdout) > _MAX_ANSWER_BYTES:
                raise CheckpointError(f"checkpoint.key: {self.name} could not {operation}: exit code {done.returncode}")
            return base64.b64decode(json.loads(done.stdout)["data"], validate=True)
        except subprocess.TimeoutExpired as exc:
            raise CheckpointError(
                f"checkpoint.key: {self.name} did not answer within {_COMMAND_TIMEOUT_S:.0f} s"
            ) from exc
        except OSError as exc:
            raise CheckpointError(f"checkpoint.key: {self.name} cannot be run ({exc.strerror})") from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise CheckpointError(
                f'checkpoint.key: {self.name} answered with no {{"data": base64}} to {operation}'
            ) from exc

    def __repr__(self) -> str:
        return f"CommandKey({self.name})"


def open_key(where: str) -> KeyHolder:
    """Find a key.

    Args:
        where: ``file:PATH`` (mode 0600) or ``env:NAME``, either with 64 hex characters; or ``command:PROGRAM ...``.

    Raises:
        CheckpointError: It is missing, readable for others, or not of that form. Its value is never in the message.
    """
    kind, _, rest = where.partition(":")
    if kind == "command":
        return CommandKey(rest)
    if kind == "file":
        try:
            data = read_private(Path(rest), f"`phalanx checkpoint new-key {shlex.quote(rest)}` makes one")
        except CertificateError as exc:
            raise CheckpointError(f"checkpoint.key: {exc}") from exc
        text = data.decode("ascii", errors="replace")
    elif kind == "env":
        if rest not in os.environ:
            raise CheckpointError(
                f"checkpoint.key: the environment has no {rest}; set it to 64 hex characters"
            ).with_facts(code="PHX-I054", key="checkpoint.key")
        text = os.environ[rest]
    else:
        raise CheckpointError('checkpoint.key: expected "file:PATH", "env:NAME" or "command:PROGRAM"')
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise CheckpointError(f"checkpoint.key: {kind}:{rest} does not hold 64 hex characters").with_facts(
            code="PHX-I054", key="checkpoint.key"
        )
    return LocalKey(key)


def write_new_key(path: Path) -> str:
    """Draw a key and write it to a new file of mode 0600."""
    key = secrets.token_bytes(_KEY_BYTES)
    write_private(path, key.hex().encode() + b"\n")
    return LocalKey(key).name


def new_data_key() -> bytes:
    """Draw the data key of one checkpoint."""
    return secrets.token_bytes(_KEY_BYTES)


def wrap_for(holder: KeyHolder, data_key: bytes, run: str, step: int) -> bytes:
    """Return the bytes of ``key.json``."""
    wrapped = holder.wrap_key(data_key, _associated_data(run, step))
    return canonical_json({"version": 1, "key": holder.name, "wrapped": wrapped.hex()})


def unwrap_for(holder: KeyHolder, data: bytes, run: str, step: int, where: Path) -> bytes:
    """Read ``key.json``."""
    try:
        record = parse_canonical(data)
        version, name, wrapped = record["version"], record["key"], bytes.fromhex(record["wrapped"])
    except (ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{where}: truncated or altered; use an older checkpoint") from exc
    if version != 1:
        raise CheckpointError(f"{where}: is of version {version!r:.20}, expected 1; use the Phalanx that wrote it")
    if name != holder.name:
        raise CheckpointError(
            f"{where}: was wrapped with key {name!s:.80}, but checkpoint.key is {holder.name}; give the former key, "
            "or `phalanx checkpoint rotate` with both"
        ).with_facts(code="PHX-I054", key="checkpoint.key")
    try:
        data_key = holder.unwrap_key(wrapped, _associated_data(run, step))
    except CheckpointError as exc:
        raise CheckpointError(f"{where}: {exc}") from exc
    if len(data_key) != _KEY_BYTES:
        raise CheckpointError(f"{where}: {holder.name} gave {len(data_key)} bytes, expected {_KEY_BYTES}")
    return data_key


def _associated_data(run: str, step: int) -> bytes:
    return in_domain("checkpoint-key/1", canonical_json([run, step]))


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
