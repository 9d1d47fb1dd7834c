"""Time stamps of RFC 3161: somebody who is no party of the run says that a signed head of its log existed.

The stamp is over the bytes of the head's file, so `openssl ts -verify -data HEAD` reads it as well.
"""

import http.client
import importlib
import re
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any

from cryptography import x509

from phalanx.errors import AuditLogError, ConfigError
from phalanx.security.witness.published import exchange_bytes

STAMP_SUFFIX = ".tsr"
"""Of the file with the stamp, beside that of the head."""
MAX_STAMP_BYTES = 256 * 1024
_CONTENT_TYPE = "application/timestamp-query"


@dataclass(frozen=True)
class Timestamp:
    """A checked time stamp.

    Attributes:
        time: When the head existed at the latest, by the clock of the authority.
        policy: Object identifier of the rules that the authority says it follows.
    """

    time: datetime
    policy: str


@dataclass(frozen=True)
class TimestampAuthority:
    """Whose time stamps are believed.

    Attributes:
        certificates: Roots, as PEM; the certificate of the signer must follow from one of them.
        policy: Policy that the stamp must name; None accepts any.

    Guarantees:
        A stamp is refused that is of other bytes, of another policy, without a critical extended key usage of time
        stamping in the certificate of its one signer, outside of that certificate's dates, or of another root.
        It does not know of certificates that were revoked.
    """

    certificates: bytes
    policy: str | None = None

    def request_timestamp(self, url: str, content: bytes) -> tuple[bytes, Timestamp]:
        """Have a server stamp some bytes, and return its answer with the result of the checks.

        Raises:
            AuditLogError: Nobody answers, or the answer does not hold; the nonce of the request is compared as well.
            ConfigError: The extra is missing.
        """
        client = _import_client()
        request = client.TimestampRequestBuilder().data(content).hash_algorithm(client.HashAlgorithm.SHA256).build()
        try:
            status, answer = exchange_bytes("POST", url, request.as_bytes(), MAX_STAMP_BYTES, _CONTENT_TYPE)
        except (OSError, http.client.HTTPException, ValueError) as exc:
            raise AuditLogError(f"{url[:200]}: does not answer as a server of time stamps ({exc})") from exc
        if status != HTTPStatus.OK:
            raise AuditLogError(f"{url[:200]}: answers with status {status}, expected a time stamp")
        return answer, self.check_timestamp(answer, content, request.nonce)

    def check_timestamp(self, stamp: bytes, content: bytes, nonce: int | None = None) -> Timestamp:
        """Check offline that a stamp is of these bytes and of this authority.

        Args:
            nonce: The one of the request, which only whoever asked knows.

        Raises:
            AuditLogError: It is not.
            ConfigError: The extra is missing, or the certificates or the policy are malformed.
        """
        client = _import_client()
        verifier = client.VerifierBuilder(roots=self._load_roots(), nonce=nonce, policy_id=self._policy_id()).build()
        if len(stamp) > MAX_STAMP_BYTES:
            raise AuditLogError(f"time stamp: {len(stamp)} bytes, at most {MAX_STAMP_BYTES} are read")
        try:
            response = client.decode_timestamp_response(stamp)
            verifier.verify_message(response, content)
            facts = response.tst_info
            return Timestamp(facts.gen_time, facts.policy.dotted_string)
        except (ValueError, TypeError, OverflowError, client.VerificationError) as exc:
            raise AuditLogError(f"time stamp: does not hold ({_shorten_reason(str(exc))})") from exc

    def _load_roots(self) -> list[x509.Certificate]:
        try:
            return x509.load_pem_x509_certificates(self.certificates)
        except ValueError as exc:
            raise ConfigError(f"authority of time stamps: expected certificates as PEM ({exc})") from exc

    def _policy_id(self) -> x509.ObjectIdentifier | None:
        try:
            return None if self.policy is None else x509.ObjectIdentifier(self.policy)
        except ValueError as exc:
            raise ConfigError(f"policy of time stamps: {self.policy!r:.80} is no object identifier") from exc


def _shorten_reason(text: str) -> str:
    """Return what OpenSSL says of a certificate, without the place in its source."""
    data = re.findall(r'(?:data|reason): "([^"]+)"', text)
    return data[-1] if data else text[:200]


def _import_client() -> Any:
    try:
        return importlib.import_module("rfc3161_client")
    except ImportError as exc:
        raise ConfigError("time stamps need rfc3161-client; install phalanx-train[timestamp]") from exc
