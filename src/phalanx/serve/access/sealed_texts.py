"""Texts of requests in the log, where the operator asks for them: sealed for a key that no server has."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.access_gate import note_read
from phalanx.config import canonical_json
from phalanx.errors import CertificateError, SignatureError
from phalanx.security.audit import LogEntry
from phalanx.security.crypto import HybridSealKey, in_domain, read_private, seal_for, write_private

SEALED_KEY = "sealed_texts"
MAX_TEXT_BYTES = 2 * 1024 * 1024
"""Bytes of one request's texts; longer texts are cut, so that they fit a line of the log."""
_PUBLIC_SUFFIX = ".pub"


@dataclass(frozen=True)
class RequestTexts:
    """What a request asked and was answered.

    Attributes:
        prompts: JSON of each prompt, with all that the model reads.
        answers: Texts that went out, behind the filters.
    """

    prompts: Sequence[Any]
    answers: Sequence[str]


@dataclass(frozen=True)
class TextSealer:
    """Seals the texts of requests; whoever reads the log, or takes over the server, cannot open the earlier ones.

    Attributes:
        public: Public half of the reader's key, of ML-KEM-768 and X25519.
    """

    public: bytes

    @classmethod
    def read(cls, path: Path) -> "TextSealer":
        """Read a public half that `make_reader_key` wrote.

        Raises:
            CertificateError: It is none.
        """
        try:
            public = bytes.fromhex(path.read_text(encoding="ascii").strip())
            seal_for(public, b"", b"")
        except (OSError, ValueError) as exc:
            raise CertificateError(
                f"{path}: is no public half of a key for texts; phalanx keys text-key makes one"
            ) from exc
        return cls(public)

    def seal_texts(self, place: Mapping[str, Any], texts: RequestTexts) -> str:
        """Return the texts of one request, in base64.

        Args:
            place: Further facts of the line; the texts open with these alone. Number and time of the line are not among
                them: that texts stand in their line is what the server's signature says.
        """
        content = canonical_json({"prompts": list(texts.prompts), "answers": list(texts.answers)})
        if len(content) > MAX_TEXT_BYTES:
            content = canonical_json({"cut": content[: MAX_TEXT_BYTES // 2].decode("utf-8", "replace")})
        return base64.b64encode(seal_for(self.public, content, _info_of(place))).decode("ascii")


def make_reader_key(path: Path) -> Path:
    """Make the key that opens texts, in a new file of mode 0600, and return the file of its public half.

    Raises:
        CertificateError: One of both files exists already, or cannot be written. A public half that is there stays:
            servers may seal by it for a key that was taken elsewhere.
    """
    key = HybridSealKey.generate()
    public = path.with_name(path.name + _PUBLIC_SUFFIX)
    try:
        with public.open("x", encoding="ascii") as file:
            write_private(path, key.secret_bytes)
            file.write(key.public_bytes.hex() + "\n")
    except FileExistsError as exc:
        raise CertificateError(f"{public}: exists already and is not overwritten; choose another place") from exc
    except OSError as exc:
        raise CertificateError(f"{public}: cannot be written ({exc.strerror})") from exc
    except CertificateError:
        public.unlink(missing_ok=True)
        raise
    return public


def open_texts(lines: Sequence[LogEntry], key_path: Path, directory: Path) -> Iterator[tuple[LogEntry, dict[str, Any]]]:
    """Yield each line of requests that has texts, with these; roles that govern the access directory are asked.

    Raises:
        CertificateError: The file holds no such key.
        SignatureError: Texts do not open with this key, or stand in a line of other facts than they were sealed for.
    """
    try:
        key = HybridSealKey.from_bytes(read_private(key_path, "phalanx keys text-key makes it"))
    except ValueError as exc:
        raise CertificateError(f"{key_path}: holds no key for texts; phalanx keys text-key makes one") from exc
    note_read("request_texts", hashlib.sha256(key.public_bytes).hexdigest(), directory, is_sealed=True)
    for line in lines:
        if SEALED_KEY not in line.body:
            continue
        place = {name: value for name, value in line.body.items() if name != SEALED_KEY}
        try:
            sealed = base64.b64decode(str(line.body[SEALED_KEY]), validate=True)
        except ValueError as exc:
            raise SignatureError(f"line {line.sequence}: its sealed texts are no base64") from exc
        texts: dict[str, Any] = json.loads(key.open_sealed(sealed, _info_of(place)))
        yield line, texts


def _info_of(place: Mapping[str, Any]) -> bytes:
    return in_domain("request-texts/1", canonical_json(dict(place)))
