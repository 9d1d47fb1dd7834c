"""A browser at the chat page: what a person does there, and what went wrong meanwhile."""

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
AXE = Path(__file__).with_name("axe_core") / "axe.min.js"


def _load_script():
    if "browser" not in sys.modules:
        spec = importlib.util.spec_from_file_location("browser", ROOT / "scripts" / "browser.py")
        sys.modules["browser"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["browser"])
    return sys.modules["browser"]


browser_script = _load_script()
_KEYS = {
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Tab": (9, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "Home": (36, ""),
    " ": (32, " "),
}
_WATCH = """
addEventListener('securitypolicyviolation', (event) => {
  (window.violations ??= []).push(`${event.effectiveDirective} ${event.blockedURI} ${event.sample}`);
});
"""


class ChatBrowser(browser_script.Browser):
    """One tab at a server."""

    def __enter__(self):
        super().__enter__()
        self._call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)
        return self

    def open_page(self, path="/", width=1280, height=900, *, dark=False):
        self.open_address("about:blank", width, height)
        self.open_address(self._server + path, width, height, dark=dark)

    def sign_in(self, link, width=1280, height=900, *, dark=False):
        self.open_page(link.removeprefix(self._server), width, height, dark=dark)
        self.wait_for("!document.getElementById('app').hidden")

    def wait_for(self, condition):
        """Wait until an expression on the page is true."""
        self.evaluate(
            f"new Promise((done) => {{ const look = () => ({condition}) ? done(1) : setTimeout(look, 20); look(); }})"
        )

    def click(self, selector):
        """Click where an element is, as a mouse does."""
        box = self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({ block: 'nearest' }); const box = node.getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        place = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, **place)

    def click_action(self, label, number=-1):
        """Click a button of a message by its words."""
        self.evaluate(
            "document.querySelectorAll('[data-clicked]').forEach((node) => delete node.dataset.clicked);"
            "[...document.querySelectorAll('#messages button')]"
            f".filter((node) => node.textContent === {json.dumps(label)}).at({number}).dataset.clicked = '1'"
        )
        self.click("[data-clicked]")

    def press(self, key, *, shift=False):
        code, text = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type_text(self, text):
        self._call("Input.insertText", text=text)

    def ask(self, text):
        """Send a message and wait for the end of the answer."""
        self.evaluate("document.getElementById('prompt').focus()")
        self.type_text(text)
        self.press("Enter")
        self.wait_for_answer()

    def wait_for_answer(self):
        self.wait_for("document.getElementById('send').title === 'Send'")

    def focused(self):
        """Name of what has the focus: its id, its label or its words."""
        return self.evaluate(
            "(() => { const node = document.activeElement;"
            "return node.id || node.getAttribute('aria-label') || node.textContent.trim(); })()"
        )

    def text_of(self, selector):
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent")

    def texts_of(self, selector):
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText)")

    def faults_so_far(self):
        """What went wrong since the page was opened; that it comes with status 401 is no fault."""
        shown = self.find_faults()
        shown.complaints = [
            each for each in shown.complaints if "status of 401" not in each or f"({self._server}/" not in each
        ]
        shown.complaints += self.evaluate("window.violations ?? []")
        return shown

    def requests(self):
        """Method and address of every request since the page was opened."""
        return [
            (event["params"]["request"]["method"], event["params"]["request"]["url"])
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def check_accessibility(self):
        """Return what axe-core has against the page: rule, impact and elements."""
        if not self.evaluate("typeof axe === 'object'"):
            self.evaluate(AXE.read_text() + ";0")
        result = self.evaluate(
            "axe.run(document, { resultTypes: ['violations'] }).then((found) => JSON.stringify(found.violations))"
        )
        return [
            (rule["id"], rule["impact"], [node["html"][:120] + " " + node["failureSummary"] for node in rule["nodes"]])
            for rule in json.loads(result)
        ]
