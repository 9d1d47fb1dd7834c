"""A software TPM of its own for a test, driven by tpm2-tools: real structures, real keys, a real EK certificate."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from bare_tpm import listens
from tcg import pcr_values

from machine_patience import patience_s
from phalanx.security.tee import Binding, Enrolment, Evidence

TOOLS = ("swtpm", "swtpm_setup", "swtpm_localca", "tpm2_quote", "tpm2_activatecredential")
PCRS = (0, 7, 16)
_RSA_EK_CERTIFICATE = "0x01c00002"


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in TOOLS if shutil.which(name) is None]


class SoftwareTpm:
    """One TPM with an EK, its certificate, and an attestation key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "TPM2TOOLS_TCTI": f"swtpm:path={folder / 'socket'}",
        }
        (folder / "state").mkdir()
        state = str(folder / "state")
        self._run("swtpm_setup", "--tpm2", "--tpmstate", state, "--create-ek-cert", "--config", str(self._configure()))
        self._process = self._start()
        self._run("tpm2_createek", "-c", "ek.ctx", "-G", "rsa", "-u", "ek.pub")
        self._run(
            "tpm2_createak", "-C", "ek.ctx", "-c", "ak.ctx", "-G", "ecc", "-g", "sha256", "-s", "ecdsa", "-u", "ak.pub"
        )
        self._run("tpm2_flushcontext", "-t")

    @property
    def address(self) -> str:
        """Where it is; one connection at a time."""
        return f"swtpm:path={self._folder / 'socket'}"

    @property
    def roots(self) -> bytes:
        """The local authority's root, PEM."""
        return next(self._folder.rglob("swtpm-localca-rootca-cert.pem")).read_bytes()

    @property
    def chain(self) -> bytes:
        """The local authority's issuing certificate, PEM."""
        return next(self._folder.rglob("issuercert.pem")).read_bytes()

    @property
    def ek_certificate(self) -> bytes:
        """As the TPM has it in its own memory, DER."""
        self._run("tpm2_nvread", _RSA_EK_CERTIFICATE, "-C", "o", "-o", "ek.der")
        return (self._folder / "ek.der").read_bytes()

    @property
    def ak_public(self) -> bytes:
        """TPMT_PUBLIC: what tpm2-tools write, less its size."""
        return (self._folder / "ak.pub").read_bytes()[2:]

    def activate(self, enrolment: Enrolment) -> bytes:
        """Have the TPM read the secret of a challenge."""
        head = bytes.fromhex("badcc0de00000001")
        (self._folder / "credential").write_bytes(head + enrolment.credential + enrolment.encrypted_secret)
        self._run("tpm2_startauthsession", "--policy-session", "-S", "session.ctx")
        self._run("tpm2_policysecret", "-S", "session.ctx", "-c", "e")
        self._run(
            "tpm2_activatecredential", "-c", "ak.ctx", "-C", "ek.ctx", "-i", "credential", "-o", "secret",
            "-P", "session:session.ctx",
        )  # fmt: skip
        self._run("tpm2_flushcontext", "session.ctx")
        self._run("tpm2_flushcontext", "-t")
        return (self._folder / "secret").read_bytes()

    def extend(self, index: int, digest: bytes) -> None:
        """Extend a PCR."""
        self._run("tpm2_pcrextend", f"{index}:sha256={digest.hex()}")

    def evidence(self, binding: Binding, **more: bytes) -> Evidence:
        """Quote the PCRs over a binding."""
        selection = "sha256:" + ",".join(str(index) for index in PCRS)
        self._run(
            "tpm2_quote", "-c", "ak.ctx", "-l", selection, "-q", binding.binding_digest().hex(), "-m", "message",
            "-s", "signature", "-g", "sha256",
        )  # fmt: skip
        self._run("tpm2_flushcontext", "-t")
        self._run("tpm2_pcrread", selection, "-o", "pcrs")
        message, signature = ((self._folder / name).read_bytes() for name in ("message", "signature"))
        raw = (self._folder / "pcrs").read_bytes()
        values = {index: raw[32 * place : 32 * place + 32] for place, index in enumerate(PCRS)}
        endorsements = {"ak": self.ak_public, "pcrs": pcr_values(values), **more}
        return Evidence("tpm", len(message).to_bytes(2, "big") + message + signature, endorsements, binding)

    def close(self) -> None:
        """End the TPM's process."""
        self._process.terminate()
        self._process.wait(timeout=patience_s(10.0))

    def _configure(self) -> Path:
        """A certificate authority of this TPM's own, and nothing of the machine's."""
        authority = self._folder / "authority"
        authority.mkdir()
        ca, options, setup = (self._folder / name for name in ("ca.conf", "ca.options", "setup.conf"))
        ca.write_text(
            f"statedir = {authority}\nsigningkey = {authority}/signkey.pem\n"
            f"issuercert = {authority}/issuercert.pem\ncertserial = {authority}/certserial\n"
        )
        options.write_text("--platform-manufacturer Test\n--platform-version 1\n--platform-model Test\n")
        setup.write_text(
            f"create_certs_tool = {shutil.which('swtpm_localca')}\ncreate_certs_tool_config = {ca}\n"
            f"create_certs_tool_options = {options}\nactive_pcr_banks = sha256\n"
        )
        return setup

    def _start(self) -> subprocess.Popen[bytes]:
        socket = self._folder / "socket"
        process = subprocess.Popen(
            [
                "swtpm", "socket", "--tpm2", "--tpmstate", f"dir={self._folder / 'state'}",
                "--server", f"type=unixio,path={socket}", "--ctrl", f"type=unixio,path={socket}.ctrl",
                "--flags", "not-need-init,startup-clear",
            ],
            env=self._environment,
        )  # fmt: skip
        limit = time.monotonic() + patience_s(60.0)
        while not listens(socket):
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError("swtpm did not start")
            time.sleep(0.01)
        return process

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=patience_s(60.0),
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]}: {done.stderr or done.stdout}")
