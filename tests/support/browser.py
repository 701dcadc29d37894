"""A headless Chromium that tests can resize, put into the dark scheme, and type into.

It is spoken to by the DevTools protocol over a pipe: JSON messages that end in a zero byte.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("TACIT_REQUIRE_BROWSER"),
    reason="no chromium: install it with 'apt-get install chromium' to check pages",
)
PATIENCE = 120
"""Seconds that a browser may take to answer on a busy machine."""


class Browser:
    """A page in a browser; use it as a context manager."""

    def __init__(self, folder):
        assert CHROMIUM is not None, "TACIT_REQUIRE_BROWSER is set, but there is no chromium"
        self._count, self._buffer = 0, b""
        self.messages = []
        """What the page logged: errors of scripts, requests that failed."""
        self.requests = []
        """The addresses that were asked for."""
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        arguments = [
            "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
            "--disable-dev-shm-usage", "--remote-debugging-pipe",
            f"--user-data-dir={folder / 'profile'}", "about:blank",
        ]  # fmt: skip
        # The browser reads commands from its file 3, and writes answers to its file 4.
        shell = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, *arguments],
            pass_fds=(command_read, answer_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._session = None
        pages = self._call("Target.getTargets")["targetInfos"]
        (target,) = [page["targetId"] for page in pages if page["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._read)
        os.close(self._write)

    def open(self, path, *, width=1280, height=800, dark=False):
        """Load a file in a window of this width, in the light or the dark scheme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.messages.clear()
        self.requests.clear()
        self._call("Page.navigate", url=path.as_uri())
        end = time.monotonic() + PATIENCE
        while self.run("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < end, "the page did not load"

    def emulate_print(self, *, dark=False):
        """Show the page as on paper; which scheme the user has is of no importance then."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media="print", features=[scheme])

    def run(self, script):
        """The value of an expression of JavaScript."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press_tab(self):
        """Press the tabulator key."""
        for kind in ("rawKeyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9
            )

    def screenshot(self, path):
        """Write the window as a PNG."""
        answer = self._call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def pdf(self):
        """The page as it is printed."""
        return base64.b64decode(self._call("Page.printToPDF")["data"])

    def _call(self, method, **parameters):
        """Send a command and return its result; events in between are noted."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while True:
            answer = self._next_message(end)
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._note(answer)

    def _note(self, event):
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Log.entryAdded":
            self.messages.append(parameters["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(parameters["exceptionDetails"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def _next_message(self, end):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)
