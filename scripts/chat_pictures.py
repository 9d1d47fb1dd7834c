"""Photographs of the chat page for the documentation, at 1280 and 390 pixels, light and dark.

``PYTHONPATH=$PWD/src:$PWD/tests:$PWD/tests/serve/page python scripts/chat_pictures.py`` writes them. The model is
the tests' one that writes what it is told to; server, keys, marks, filters and page are those of `phalanx serve`.
"""

import base64
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from chat_browser import ChatBrowser
from pictures import IMAGES, compress
from written_model import write_answering_model

from tiny_served import add_key

QUESTION = "How can readers know that a machine wrote a text?"
ANSWER = """In three ways, and none of them is enough alone:

1. **A notice.** The page says so before the first word, as this one does.
2. **A watermark.** While it writes, the model lets a secret key choose among words that are about equally likely. \
Whoever has the key can compute later how improbable the text is by chance.
3. **A signed record.** The server keeps which model wrote when, without the text.

A watermark needs some length before a verdict is possible:

| the text is | words needed |
|---|---|
| predictable | hundreds |
| surprising | dozens |

To check a text, ask the detector:

```sh
phalanx detect letter.txt
```

Short texts stay undecided, and a good detector says *cannot tell* rather than guess."""
SCREENS = {"": (1280, 900), "-small": (390, 844)}


def main() -> int:
    """Take every picture."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_answering_model(place / "harbour-chat", [(QUESTION, ANSWER)])
        key_id, _ = add_key(place / "access")
        phalanx = [sys.executable, "-m", "phalanx"]
        subprocess.run([*phalanx, "mark", "new-keys", "marks.json"], cwd=place, check=True)  # noqa: S603 - ours
        options = ["--access", "access", "--mark-keys", "marks.json", "--chat-link", key_id, "--port", "0", "--json"]
        command = [*phalanx, "serve", "harbour-chat", *options]
        with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - ours
            try:
                ready = json.loads(server.stdout.readline()) if server.stdout else {}
                photograph_chat(ready["url"], ready["chat_link"])
            finally:
                server.kill()
    return 0


def photograph_chat(url: str, link: str) -> None:
    """Write a picture of a short chat on each screen, in both colours."""
    with ChatBrowser(url) as browser:
        browser.sign_in(link)
        browser.ask(QUESTION)
        for colours in ("", "-dark"):
            for suffix, (width, height) in SCREENS.items():
                browser.open_page("/", width, height, dark=bool(colours))
                browser.wait_for("document.querySelector('.facts')")
                browser.evaluate("scrollTo(0, 0)")
                taken = browser._call("Page.captureScreenshot", format="png")
                picture = IMAGES / f"chat{colours}{suffix}.png"
                picture.write_bytes(base64.b64decode(taken["data"]))
                compress(picture)
                print(picture.name, picture.stat().st_size)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main())
