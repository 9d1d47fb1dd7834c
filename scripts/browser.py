"""A headless Chromium that shows local pages, photographs them and tells what went wrong on them.

It is spoken to over two pipes in the browser's own protocol, so that no package and no port is needed. Every request
that would leave the machine is refused by the browser itself and reported.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",  # it shows our own files alone; in a container as root it would not start otherwise
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--allow-file-access-from-files",
    "--remote-debugging-pipe",
)
_START = 'exec "$@" 3<"$0/told" 4>"$0/says"'
"""A shell opens the two pipes under the numbers that the browser expects, and becomes the browser."""
_LOCAL = ("file:", "data:", "blob:", "about:")
_WIDER = """(() => {
  const wide = document.documentElement.clientWidth;
  const scrolled = (node) => {
    for (let up = node.parentElement; up && up !== document.body; up = up.parentElement)
      if (['auto', 'scroll', 'hidden', 'clip'].includes(getComputedStyle(up).overflowX)) return true;
    return false;
  };
  const out = [];
  for (const node of document.body.querySelectorAll('*')) {
    const box = node.getBoundingClientRect();
    const gone = box.width === 0 || box.height === 0 || getComputedStyle(node).visibility === 'hidden';
    if (!gone && box.right > wide + 1 && box.left < wide && !scrolled(node))
      out.push(`${node.tagName.toLowerCase()}.${node.className} ${Math.round(box.left)}..${Math.round(box.right)}`);
  }
  return JSON.stringify({ page: document.documentElement.scrollWidth, screen: wide, wide: out.slice(0, 8) });
})()"""


def installed() -> str | None:
    """Return the browser's path, or nothing where none is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class ShownPage:
    """What was found out about one page on one screen."""

    wider: list[str] = field(default_factory=list)
    """Elements that reach beyond the right edge of the screen and cannot be scrolled into it."""
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and uncaught exceptions."""
    outside: list[str] = field(default_factory=list)
    """Addresses outside this machine that the page asked for."""


class BrowserError(RuntimeError):
    """The browser ended or refused a command."""


class Browser:
    """One browser with one tab; it is a context manager, and leaving the context ends the browser.

    Args:
        server: Address of a server on this machine that pages may ask, such as ``http://127.0.0.1:8080``.
    """

    def __init__(self, server: str | None = None) -> None:
        path = installed()
        if path is None:
            raise BrowserError(f"none of {', '.join(NAMES)} is installed")
        self._path, self._server = path, server
        self._reachable = _LOCAL if server is None else (*_LOCAL, f"{server}/")
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        self._tab: str | None = None

    def __enter__(self) -> Self:
        with ExitStack() as ends:
            home = ends.enter_context(tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True))
            told, says = Path(home, "told"), Path(home, "says")
            os.mkfifo(told, 0o600)
            os.mkfifo(says, 0o600)
            profile = f"--user-data-dir={home}/profile"
            hosts = "MAP * ~NOTFOUND" if self._server is None else "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
            process = subprocess.Popen(  # noqa: S603 - a browser of this machine
                [
                    "/bin/sh",
                    "-c",
                    _START,
                    home,
                    self._path,
                    *_OPTIONS,
                    f"--host-resolver-rules={hosts}",
                    profile,
                    "about:blank",
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"HOME": home},
            )
            ends.callback(_end, process)
            # the browser ends when the pipe that tells it what to do is closed
            self._to = ends.enter_context(told.open("wb", buffering=0))
            self._from = ends.enter_context(says.open("rb", buffering=0))
            tab = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._tab = self._call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()

    def show(self, page: Path, width: int, height: int = 900, *, dark: bool = False) -> ShownPage:
        """Load a page on a screen of that many CSS pixels, and return what is wrong with it there."""
        self.open_address(page.resolve().as_uri(), width, height, dark=dark)
        return self.find_faults()

    def open_address(self, address: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Load a page on a screen of that many CSS pixels."""
        # what another page remembered, such as the colours it was shown in, is forgotten
        self.evaluate("try { localStorage.clear() } catch {}")
        self._events.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self._call("Emulation.setEmulatedMedia", features=[scheme, still])
        self._call("Page.navigate", url=address)
        self._until("Page.loadEventFired")
        # two frames later scripts have laid out what they add when the page is there
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
        self.evaluate(frames)

    def find_faults(self) -> ShownPage:
        """Return what is wrong with the page that is shown, and went wrong since it was loaded."""
        return self._found(json.loads(self.evaluate(_WIDER)))

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression on the page that is shown; a promise is waited for."""
        told = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return told["result"].get("value")

    def photograph(self, to: Path, *, most_px: int | None = None) -> None:
        """Write a picture (PNG) of the page that is shown, as far down as it goes or `most_px`."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        tall = size["height"] if most_px is None else min(size["height"], most_px)
        clip = {"x": 0, "y": 0, "width": self.evaluate("innerWidth"), "height": tall, "scale": 1}
        taken = self._call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(base64.b64decode(taken["data"]))

    def _found(self, layout: dict[str, Any]) -> ShownPage:
        found = ShownPage(wider=list(layout["wide"]))
        if layout["page"] > layout["screen"] + 1:
            found.wider.append(f"the page is {layout['page']} wide")
        for event in self._events:
            said = event["params"]
            match event["method"]:
                case "Network.requestWillBeSent" if not said["request"]["url"].startswith(self._reachable):
                    found.outside.append(said["request"]["url"])
                case "Log.entryAdded" if said["entry"]["level"] in ("error", "warning"):
                    found.complaints.append(f"{said['entry']['text']} ({said['entry'].get('url', '')})")
                case "Runtime.exceptionThrown":
                    found.complaints.append(str(said["exceptionDetails"].get("exception", said["exceptionDetails"])))
                case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                    found.complaints.append(" ".join(str(one.get("value", one)) for one in said["args"]))
        return found

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        order = {"id": self._number, "method": method, "params": params}
        if self._tab is not None:
            order["sessionId"] = self._tab
        self._to.write(json.dumps(order).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") != self._number:
                self._events.append(answer)
            elif "error" in answer:
                raise BrowserError(f"{method}: {answer['error']}")
            else:
                return dict(answer["result"])

    def _until(self, method: str) -> None:
        while not any(event.get("method") == method for event in self._events):
            self._events.append(self._message())

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._from.read(1 << 16)
            if not more:
                raise BrowserError("the browser has ended")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
