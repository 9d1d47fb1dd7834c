"""``phalanx audit stamp`` against a real server of time stamps, `openssl ts`, and against servers that lie."""

import contextlib
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.cli import run_command
from phalanx.cli.governance.passport import _check_stamps
from phalanx.errors import AuditLogError, ConfigError, InputError
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.security.witness import TimestampAuthority

pytest.importorskip("rfc3161_client", reason="the extra `timestamp` is not installed")
if shutil.which("openssl") is None:
    pytest.skip("openssl is not installed", allow_module_level=True)

RUN = "0123456789abcdef0123456789abcdef"
POLICY, OTHER_POLICY = "1.3.6.1.4.1.99999.1", "1.3.6.1.4.1.99999.2"
CONFIG = """
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
[tsa]
extendedKeyUsage = critical, timeStamping
[web]
extendedKeyUsage = critical, serverAuth
[loose]
extendedKeyUsage = timeStamping
[plain]
keyUsage = digitalSignature
[section]
serial = {home}/serial
crypto_device = builtin
signer_digest = sha256
default_policy = {policy}
other_policies = {policy}
digests = sha256, sha384, sha512
ess_cert_id_alg = sha256
"""
Lie = Callable[["Server", bytes], bytes]


def openssl(*words: object, content: bytes | None = None) -> bytes:
    done = subprocess.run(["openssl", *map(str, words)], input=content, capture_output=True, check=True, timeout=60)
    return done.stdout


class Server:
    """An authority, its signers, and an HTTP server that answers with what a `lie` makes of a request."""

    def __init__(self, home: Path) -> None:
        self.home, self.lie = home, honest
        home.mkdir()
        self.write_config(POLICY)
        (home / "serial").write_text("01\n")
        for name in ("ca", "other"):
            self.make_key(name)
            self.config("req", "-x509", "-new", "-key", home / f"{name}.key", "-subj", f"/CN={name}", "-days", 30,
                        "-extensions", "ca", "-out", home / f"{name}.pem")  # fmt: skip
        for name in ("tsa", "web", "loose", "plain"):
            self.make_key(name)
            self.certify(name, "ca")

    def make_key(self, name: str) -> None:
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.home / f"{name}.key")

    def certify(self, name: str, authority: str) -> None:
        request = self.config("req", "-new", "-key", self.home / f"{name}.key", "-subj", f"/CN={name}")
        (self.home / f"{name}.csr").write_bytes(request)
        openssl("x509", "-req", "-in", self.home / f"{name}.csr", "-CA", self.home / f"{authority}.pem", "-CAkey",
                self.home / f"{authority}.key", "-CAcreateserial", "-days", 10, "-extfile", self.home / "ts.cnf",
                "-extensions", name, "-out", self.home / f"{name}.pem")  # fmt: skip

    def write_config(self, policy: str) -> None:
        (self.home / "ts.cnf").write_text(CONFIG.format(home=self.home, policy=policy))

    def config(self, command: str, *words: object) -> bytes:
        return openssl(command, "-config", self.home / "ts.cnf", *words)

    def answer(self, request: bytes) -> bytes:
        """Stamp a request as a server does that is set up by the book."""
        (self.home / "query.tsq").write_bytes(request)
        return self.config("ts", "-reply", "-section", "section", "-queryfile", self.home / "query.tsq", "-inkey",
                           self.home / "tsa.key", "-signer", self.home / "tsa.pem")  # fmt: skip

    def sign_facts(self, stamp: bytes, signer: str) -> bytes:
        """Sign the facts of a stamp anew, with a key of the same authority that was certified for something else."""
        (self.home / "honest.tsr").write_bytes(stamp)
        token = self.config("ts", "-reply", "-in", self.home / "honest.tsr", "-token_out")
        facts = openssl("cms", "-verify", "-inform", "DER", "-noverify", content=token)
        forged = openssl("cms", "-sign", "-binary", "-nodetach", "-outform", "DER", "-md", "sha256", "-econtent_type",
                         "1.2.840.113549.1.9.16.1.4", "-signer", self.home / f"{signer}.pem", "-inkey",
                         self.home / f"{signer}.key", content=facts)  # fmt: skip
        # the defence is what `cms -verify` is told to leave out here: without it the forgery holds
        openssl("cms", "-verify", "-inform", "DER", "-CAfile", self.home / "ca.pem", "-purpose", "any", content=forged)
        granted = bytes.fromhex("3003020100")
        return der(0x30, granted + forged)

    @property
    def authority(self) -> TimestampAuthority:
        return TimestampAuthority((self.home / "ca.pem").read_bytes())


def der(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 128:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


@contextlib.contextmanager
def serve(server: Server) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/timestamp-query"
            body = server.lie(server, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if body else 503)
            self.send_header("Content-Type", "application/timestamp-reply")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return None

    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http_server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http_server.server_port}"
    http_server.shutdown()
    http_server.server_close()
    thread.join()


def honest(server: Server, request: bytes) -> bytes:
    return server.answer(request)


def nonce_of(request: bytes) -> bytes:
    from rfc3161_client._rust import parse_timestamp_request

    nonce = parse_timestamp_request(request).nonce
    raw = nonce.to_bytes((nonce.bit_length() + 8) // 8, "big")
    assert request.count(raw) == 1
    return raw


def imprint_of(request: bytes) -> bytes:
    from rfc3161_client._rust import parse_timestamp_request

    return bytes(parse_timestamp_request(request).message_imprint.message)


def flip_last(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


def other_imprint(server: Server, request: bytes) -> bytes:
    imprint = imprint_of(request)
    return server.answer(request.replace(imprint, flip_last(imprint)))


def other_nonce(server: Server, request: bytes) -> bytes:
    """An answer of before: the server had stamped the same head already, for somebody else."""
    nonce = nonce_of(request)
    return server.answer(request.replace(nonce, flip_last(nonce)))


def other_policy(server: Server, request: bytes) -> bytes:
    server.write_config(OTHER_POLICY)
    return server.answer(request)


def other_root(server: Server, request: bytes) -> bytes:
    server.make_key("tsa")
    server.certify("tsa", "other")
    return server.answer(request)


def signed_by(signer: str) -> Lie:
    return lambda server, request: server.sign_facts(server.answer(request), signer)


def rejection(server: Server, request: bytes) -> bytes:
    """The server answers that it does not know the hash function, and stamps nothing."""
    sha256, sha3_256 = (bytes.fromhex(f"06096086480165030402{kind}") for kind in ("01", "08"))
    return server.answer(request.replace(sha256, sha3_256))


def changed_time(server: Server, request: bytes) -> bytes:
    stamp = server.answer(request)
    year = stamp.index(b"\x18\x0f20") + 2
    return stamp[:year] + b"19" + stamp[year + 2 :]


LIES: dict[str, tuple[Lie, str]] = {
    "imprint": (other_imprint, "does not hold (Mismatch between messages"),
    "nonce": (other_nonce, "does not hold (Nonce mismatch"),
    "policy": (other_policy, "does not hold (Policy ID mismatch"),
    "root": (other_root, "does not hold (Verify error: unable to get local issuer certificate"),
    "key of a web server": (signed_by("web"), "unsuitable certificate purpose"),
    "key without any usage": (signed_by("plain"), "unsuitable certificate purpose"),
    "usage that is not critical": (signed_by("loose"), "unsuitable certificate purpose"),
    "rejection": (rejection, "does not hold"),
    "time": (changed_time, "does not hold"),
    "junk": (lambda _server, _request: b"\x30\x03\x02\x01\x00", "does not hold"),
    "long": (lambda _server, _request: b"x" * 300_000, "at most 262144 are read"),
    "silence": (lambda _server, _request: b"", "answers with status 503"),
}


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "tsa")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    create_authority(tmp_path / "keys")
    issue_certificate(tmp_path / "keys", "owner")
    identity, home = load_identity(tmp_path / "keys" / "owner"), tmp_path / "run"
    home.mkdir()
    (home / "run.json").write_text(json.dumps({"run": RUN}))
    (home / "pki").symlink_to(tmp_path / "keys")
    (home / "owner.pem").write_bytes(identity.certificate_pem)
    with AuditLog(home / "events.jsonl", identity, RUN) as log:
        for number in range(3):
            log.append_event("note", {"number": number})
    return home


def stamp(run: Path, url: str, server: Server, out: Path, *words: str) -> int:
    authority = str(server.home / "ca.pem")
    return run_command(
        ["audit", "stamp", str(run), "--server", url, "--authority", authority, "--out", str(out), *words]
    )


def verify(run: Path, head: Path, authority: Path) -> int:
    return run_command(["verify", str(run), "--head", str(head), "--timestamp-authority", str(authority)])


def test_a_stamped_head_is_verified_offline_with_its_log(
    server: Server, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head.json"
    with serve(server) as url:
        assert stamp(run, url, server, head, "--policy", POLICY) == 0
    identity = load_identity(tmp_path / "keys" / "owner")
    with AuditLog(run / "events.jsonl", identity, RUN) as log:
        log.append_event("note", {"number": 3})
    capsys.readouterr()

    assert verify(run, head, server.home / "ca.pem") == 7
    assert f"policy {POLICY}" in capsys.readouterr().out
    # whoever has neither Phalanx nor its libraries asks openssl
    openssl("ts", "-verify", "-in", f"{head}.tsr", "-data", head, "-CAfile", server.home / "ca.pem")
    assert verify(run, head, server.home / "other.pem") == 5
    # a stamp of this head is none of a log that was written anew
    (run / "events.jsonl").unlink()
    with AuditLog(run / "events.jsonl", identity, RUN) as log:
        for number in range(5):
            log.append_event("note", {"number": -number})
    assert verify(run, head, server.home / "ca.pem") == 5


def test_a_stamp_of_another_head_is_refused(server: Server, run: Path, tmp_path: Path) -> None:
    """The owner stamps a head, and hands over another one with the stamp of the first."""
    with serve(server) as url:
        assert stamp(run, url, server, tmp_path / "early.json") == 0
        with AuditLog(run / "events.jsonl", load_identity(tmp_path / "keys" / "owner"), RUN) as log:
            log.append_event("note", {"number": 4})
        assert stamp(run, url, server, tmp_path / "late.json") == 0
    shutil.copy(tmp_path / "early.json.tsr", tmp_path / "late.json.tsr")

    assert verify(run, tmp_path / "early.json", server.home / "ca.pem") == 7
    assert verify(run, tmp_path / "late.json", server.home / "ca.pem") == 5


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_refused_and_nothing_is_written(
    server: Server, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], lie: str
) -> None:
    server.lie, reason = LIES[lie]
    with serve(server) as url:
        assert stamp(run, url, server, tmp_path / "head.json", "--policy", POLICY) == 5

    assert reason in " ".join(capfd.readouterr().err.split())
    assert not list(tmp_path.glob("head.json*"))


def test_facts_that_the_right_key_signs_anew_hold(server: Server) -> None:
    """So the same by another key is refused for its key, and for nothing else."""
    server.lie = signed_by("tsa")
    with serve(server) as url:
        answer, checked = server.authority.request_timestamp(url, b"a head")

    honest_stamp = (server.home / "honest.tsr").read_bytes()
    assert answer != honest_stamp
    assert checked == server.authority.check_timestamp(honest_stamp, b"a head")
    assert checked.policy == POLICY


def test_changed_bytes_of_a_stamp_never_change_what_it_says(server: Server) -> None:
    """Bytes that no signature covers may be changed; they say nothing."""
    content, made = b"a head", server.authority
    request = openssl("ts", "-query", "-sha256", "-cert", content=content)
    whole = server.answer(request)
    expected = made.check_timestamp(whole, content)
    refused = 0
    for place in range(0, len(whole), 7):
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        try:
            assert made.check_timestamp(changed, content) == expected
        except AuditLogError:
            refused += 1
    assert refused > len(whole) // 7 // 2


@pytest.mark.parametrize(("kind", "has_head"), [("dataset", True), ("log of a run", False)])
def test_a_time_stamp_of_what_has_no_log_or_no_head_is_asked_for_in_vain(
    server: Server, tmp_path: Path, kind: str, has_head: bool
) -> None:
    content, head, authority = b"a head", tmp_path / "head.json", server.home / "ca.pem"
    request = openssl("ts", "-query", "-sha256", "-cert", content=content)
    (tmp_path / "head.json.tsr").write_bytes(server.answer(request))
    assert "existed at" in _check_stamps("passport of a run", [head], [content], authority)[str(head)]

    with pytest.raises(InputError, match="heads of a run's log"):
        _check_stamps(kind, [head] * has_head, [content] * has_head, authority)


def test_malformed_trust_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected certificates as PEM"):
        TimestampAuthority(b"none").check_timestamp(b"", b"")


def test_nobody_there_is_an_answer_as_well(server: Server, run: Path, tmp_path: Path) -> None:
    with serve(server) as url:
        pass

    assert stamp(run, url, server, tmp_path / "head.json") == 5
    assert stamp(run, "ftp://example.org", server, tmp_path / "head.json") == 5
