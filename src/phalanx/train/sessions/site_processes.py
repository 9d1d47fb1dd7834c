"""The site processes of this machine: started by the owner, started again when they end, and ended with it."""

import secrets
from collections.abc import Mapping
from pathlib import Path

from phalanx.child import PythonProcess, request_stacks
from phalanx.config import dump_toml
from phalanx.train.sessions.site_file import SiteFile

_TO_END_S = 20.0
"""A site that owns a pipeline gives its workers a moment first, and then closes its log."""
COMMAND = ("phalanx.train.parties.site_process",)


class LocalSites:
    """Child processes by the name of their site.

    Args:
        respawns: Maximum of restarts of each process.
    """

    def __init__(self, directory: Path, files: Mapping[str, SiteFile], threads: int, respawns: int) -> None:
        self._directory, self._files, self._threads = directory, dict(files), threads
        self._left = dict.fromkeys(files, respawns)
        self._processes: dict[str, PythonProcess] = {}

    def start_sites(self) -> None:
        """Start all of them; their output goes to ``NAME.log``."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for site in self._files:
            self._start_site(site)

    @property
    def process_ids(self) -> dict[str, int]:
        """Return the process ids of the last starts."""
        return {site: process.pid for site, process in self._processes.items()}

    def restart_ended_sites(self) -> dict[str, str]:
        """Start the sites again whose process has ended; return by name how each one ended."""
        ended: dict[str, str] = {}
        for site, process in list(self._processes.items()):
            if process.poll() is None:
                continue
            ended[site] = f"{process.how_it_ended()}: {process.last_output()}"
            del self._processes[site]
            if self._left[site]:
                self._left[site] -= 1
                self._start_site(site)
        return ended

    def close(self) -> None:
        """Give processes that have been told to end a moment, then end them."""
        for process in self._processes.values():
            process.end_or_kill(_TO_END_S)

    def kill_sites(self) -> None:
        """Kill the processes of all sites; a running one first writes the stacks of its threads to its log."""
        for site, process in self._processes.items():
            if process.poll() is None:
                request_stacks(process.pid, self._directory / f"{site}.log")
            process.kill()

    def _start_site(self, site: str) -> None:
        path = self._directory / f"{site}.toml"
        path.write_text(dump_toml(self._files[site]), encoding="utf-8")
        threads = {"OMP_NUM_THREADS": str(self._threads)}
        self._processes[site] = PythonProcess((*COMMAND, str(path)), threads, self._directory / f"{site}.log")


def new_session(prefix: str) -> str:
    """Return a name for a session that none had before, so that nothing of an earlier one can be replayed."""
    return prefix + secrets.token_hex(8)
