"""A real Chromium, driven from Python without any library.

Chromium speaks its DevTools protocol over two pipes (`--remote-debugging-pipe`): JSON messages, each ended
by a zero byte, read from file descriptor 3 and written to 4. That needs neither a port nor a WebSocket.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Table = dict[str, Any]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-default-apps", "--mute-audio", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE_S = 30.0

# Puts the pipes where Chromium looks for them and becomes Chromium. Moved out of the way first, in case one
# of the two already has the other's number.
_MOVE = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3]]
os.dup2(ours[0], 3)
os.dup2(ours[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One Chromium process; `open` gives a page in a fresh tab."""

    def __init__(self, executable: str, folder: Path) -> None:
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        words = [executable, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MOVE, str(their_in), str(their_out), *words],
            pass_fds=(their_in, their_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": str(folder)},
        )
        os.close(their_in)
        os.close(their_out)
        self._buffer, self._last_id = b"", 0
        self.events: list[Table] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> Table:
        """Ask for something and wait for the answer; events that come in between are kept."""
        self._last_id += 1
        message: Table = {"id": self._last_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(time.monotonic() + PATIENCE_S)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: Table = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> Table:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for event in self.events:
                if event.get("method") == method and event.get("sessionId") == session:
                    return event
            self.events.append(self._receive(deadline))

    def _receive(self, deadline: float) -> Table:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium did not answer in time"
            part = os.read(self._in, 1 << 20)
            assert part, f"Chromium went away (exit {self._process.poll()})"
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: Table = json.loads(line)
        return message

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.prefer(dark=dark)
        page.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return page

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Page:
    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self.session, self._target = browser, session, target

    def call(self, method: str, **params: Any) -> Table:
        return self._browser.call(method, self.session, **params)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression (promises are waited for)."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> bool:
        """Whether the expression becomes true soon: a browser tells some changes a moment later."""
        deadline = time.monotonic() + 5.0
        while not self.evaluate(script):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)  # fmt: skip

    def prefer(self, *, dark: bool, media: str = "") -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])

    def click(self, selector: str) -> None:
        """A real click of the mouse in the middle of the element, scrolled into view first."""
        # Smooth scrolling would move the element away under the pointer.
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    def reload(self) -> None:
        self._browser.events.clear()
        self.call("Page.reload")
        self._browser.wait_for("Page.loadEventFired", self.session)

    def complaints(self) -> list[str]:
        """Everything that went wrong: console errors, exceptions, policy violations, dialogs."""
        self.evaluate("new Promise(done => setTimeout(done, 50))")
        bad = {"Runtime.exceptionThrown", "Page.javascriptDialogOpening", "Audits.issueAdded"}
        found = []
        for event in self._mine():
            method, params = event["method"], event["params"]
            logged = method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")
            said = method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
            if method in bad or logged or said:
                found.append(f"{method}: {json.dumps(params)[:300]}")
        return found

    def requests(self) -> list[str]:
        """The addresses of everything that was asked for over any protocol."""
        return [
            e["params"]["request"]["url"] for e in self._mine() if e["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def _mine(self) -> list[Table]:
        return [event for event in self._browser.events if event.get("sessionId") == self.session]
