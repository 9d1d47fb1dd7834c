"""A software TPM without certificates, quick to make: started, stopped, and turned back as its host can."""

import shutil
import subprocess
import time
from pathlib import Path

from machine_patience import patience_s
from phalanx.security.tee import TpmDevice, open_tpm

_ACCEPTS = "00010000"
"""Flag of a socket that listens (__SO_ACCEPTCON), in /proc/net/unix."""


def missing_swtpm() -> bool:
    return shutil.which("swtpm") is None


def listens(socket: Path) -> bool:
    """Whether a process accepts connections there; the file is there a moment earlier, when it is only bound."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    return any(line.split()[3] == _ACCEPTS and line.endswith(f" {socket}") for line in lines[1:])


class BareTpm:
    """One swtpm process over one state directory."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._state = folder, folder / "state"
        self._state.mkdir()
        self._process = self._start()

    @property
    def address(self) -> str:
        return f"swtpm:path={self._folder / 'socket'}"

    def open(self) -> TpmDevice:
        return open_tpm(self.address)

    def restart(self) -> None:
        """Switch the machine off and on."""
        self.close()
        self._process = self._start()

    def snapshot(self) -> Path:
        """Copy the state, as the host of a software TPM can, while it is off."""
        self.close()
        copy = self._folder / "copy"
        shutil.copytree(self._state, copy)
        self._process = self._start()
        return copy

    def put_back(self, copy: Path) -> None:
        """Replace the state by an older copy."""
        self.close()
        shutil.rmtree(self._state)
        shutil.copytree(copy, self._state)
        self._process = self._start()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(timeout=patience_s(10.0))

    def _start(self) -> subprocess.Popen:
        socket = self._folder / "socket"
        for one in (socket, Path(f"{socket}.ctrl")):
            one.unlink(missing_ok=True)
        process = subprocess.Popen(
            [
                "swtpm", "socket", "--tpm2", "--tpmstate", f"dir={self._state}",
                "--server", f"type=unixio,path={socket}", "--ctrl", f"type=unixio,path={socket}.ctrl",
                "--flags", "not-need-init,startup-clear",
            ],
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        limit = time.monotonic() + patience_s(60.0)
        while not listens(socket):
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError("swtpm did not start")
            time.sleep(0.005)
        return process
