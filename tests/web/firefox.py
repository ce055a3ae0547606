"""Firefox behind Selenium's interface, by its own protocol: Debian has no driver program for it.

Does with Firefox's own means what the tests do in Chromium through its developer tools.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.remote.command import Command
from selenium.webdriver.remote.file_detector import UselessFileDetector

_START_S = 60
_PREFERENCES = {
    "app.update.disabledForTesting": True,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "dom.events.testing.asyncClipboard": True,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "network.disable-localhost-when-offline": True,
    "network.manage-offline-status": False,
    "services.settings.server": "data:,#",
    "toolkit.telemetry.server": "",
}
_NAMES = {
    Command.NEW_SESSION: "WebDriver:NewSession",
    Command.GET: "WebDriver:Navigate",
    Command.REFRESH: "WebDriver:Refresh",
    Command.GO_BACK: "WebDriver:Back",
    Command.CLOSE: "WebDriver:CloseWindow",
    Command.NEW_WINDOW: "WebDriver:NewWindow",
    Command.SWITCH_TO_WINDOW: "WebDriver:SwitchToWindow",
    Command.W3C_GET_CURRENT_WINDOW_HANDLE: "WebDriver:GetWindowHandle",
    Command.W3C_GET_WINDOW_HANDLES: "WebDriver:GetWindowHandles",
    Command.SET_WINDOW_RECT: "WebDriver:SetWindowRect",
    Command.GET_CURRENT_URL: "WebDriver:GetCurrentURL",
    Command.GET_TITLE: "WebDriver:GetTitle",
    Command.FIND_ELEMENT: "WebDriver:FindElement",
    Command.FIND_ELEMENTS: "WebDriver:FindElements",
    Command.FIND_CHILD_ELEMENT: "WebDriver:FindElement",
    Command.FIND_CHILD_ELEMENTS: "WebDriver:FindElements",
    Command.W3C_GET_ACTIVE_ELEMENT: "WebDriver:GetActiveElement",
    Command.CLICK_ELEMENT: "WebDriver:ElementClick",
    Command.CLEAR_ELEMENT: "WebDriver:ElementClear",
    Command.SEND_KEYS_TO_ELEMENT: "WebDriver:ElementSendKeys",
    Command.GET_ELEMENT_TEXT: "WebDriver:GetElementText",
    Command.GET_ELEMENT_TAG_NAME: "WebDriver:GetElementTagName",
    Command.GET_ELEMENT_PROPERTY: "WebDriver:GetElementProperty",
    Command.GET_ELEMENT_RECT: "WebDriver:GetElementRect",
    Command.GET_ELEMENT_VALUE_OF_CSS_PROPERTY: "WebDriver:GetElementCSSValue",
    Command.IS_ELEMENT_ENABLED: "WebDriver:IsElementEnabled",
    Command.IS_ELEMENT_SELECTED: "WebDriver:IsElementSelected",
    Command.W3C_EXECUTE_SCRIPT: "WebDriver:ExecuteScript",
    Command.W3C_EXECUTE_SCRIPT_ASYNC: "WebDriver:ExecuteAsyncScript",
    Command.SET_TIMEOUTS: "WebDriver:SetTimeouts",
    Command.SCREENSHOT: "WebDriver:TakeScreenshot",
    Command.W3C_ACTIONS: "WebDriver:PerformActions",
    Command.W3C_CLEAR_ACTIONS: "WebDriver:ReleaseActions",
    Command.W3C_ACCEPT_ALERT: "WebDriver:AcceptAlert",
    Command.W3C_DISMISS_ALERT: "WebDriver:DismissAlert",
    Command.W3C_GET_ALERT_TEXT: "WebDriver:GetAlertText",
}
_LISTS = ("WebDriver:FindElements", "WebDriver:GetWindowHandles")  # come without a name

_CLEAR = """
const done = arguments[arguments.length - 1];
Services.clearData.deleteDataFromHost(new URL(arguments[0]).hostname, true,
  Ci.nsIClearDataService.CLEAR_ALL, () => done());
"""
# the browser's own switch leaves this machine within reach
_OFFLINE = """
const [isOffline] = arguments;
Services.io.offline = isOffline;
if (window.refuses) Services.obs.removeObserver(window.refuses, "http-on-modify-request");
const refuse = (request) => request.QueryInterface(Ci.nsIRequest).cancel(Cr.NS_ERROR_OFFLINE);
window.refuses = isOffline ? { observe: refuse } : null;
if (!isOffline) return;
Services.obs.addObserver(window.refuses, "http-on-modify-request");
Services.obs.notifyObservers(null, "net:cancel-all-connections");
"""
_RESIZE = """
const {style} = gBrowser.selectedBrowser;
[style.width, style.height] = [...arguments].map((length) => `${length}px`);
[style.minWidth, style.maxWidth, style.maxHeight, style.flex] =
  [0, style.width, style.height, "none"];
"""
# Behind the last element of a page Tab goes into the browser's own bars. The page still hears keys,
# for they are sent to it, but without the focus they press no button.
_FOCUS = """
const {selectedBrowser} = gBrowser;
if (document.activeElement !== selectedBrowser) selectedBrowser.focus();
"""
_KEYS = (Command.SEND_KEYS_TO_ELEMENT, Command.W3C_ACTIONS)
_ERRORS = """
const errors = Services.console.getMessageArray().filter((it) => it instanceof Ci.nsIScriptError &&
  !(it.flags & Ci.nsIScriptError.warningFlag) && it.sourceName.startsWith("http"));
Services.console.reset();
return errors.map((it) => it.message);
"""


class Marionette:
    """The protocol: a command is one array, and so is its answer."""

    def __init__(self, port: int) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                self._socket = socket.create_connection(("127.0.0.1", port), 5)
                break
            assert time.monotonic() < deadline, "Firefox does not listen"
            time.sleep(0.1)
        self._socket.settimeout(300)
        self._file = self._socket.makefile("rb")
        self._number = 0
        self._read()  # its greeting

    def execute(self, command: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """As Selenium's connection answers."""
        name = _NAMES.get(command)
        if name is None:
            raise WebDriverException(f"Firefox is not asked for {command} here")
        given = {key: value for key, value in parameters.items() if key != "sessionId"}
        if command == Command.NEW_SESSION:
            given = parameters["capabilities"]
        if command in (Command.FIND_CHILD_ELEMENT, Command.FIND_CHILD_ELEMENTS):
            given["element"] = given.pop("id")
        error, result = self.ask(name, given)
        if error:
            answer = {"value": error}
            return {"status": error["error"], "value": json.dumps(answer)}
        if name == "WebDriver:NewSession" or name in _LISTS or "value" not in result:
            return {"value": result}
        return result

    def ask(self, name: str, parameters: dict[str, Any]) -> Any:
        self._number += 1
        data = json.dumps([0, self._number, name, parameters]).encode()
        self._socket.sendall(b"%d:%b" % (len(data), data))
        _, number, error, result = self._read()
        assert number == self._number
        return error, result

    def close(self) -> None:
        """Part of Selenium's connection."""
        self._socket.close()

    def _read(self) -> Any:
        length = b""
        while (digit := self._file.read(1)) != b":":
            assert digit, "Firefox has gone"
            length += digit
        return json.loads(self._file.read(int(length)))


class Firefox(webdriver.Remote):
    def __init__(self, width: int, height: int) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self._profile = Path(tempfile.mkdtemp(prefix="headrace-firefox-"))
        lines = [
            f"user_pref({json.dumps(name)}, {json.dumps(value)});\n"
            for name, value in {**_PREFERENCES, "marionette.port": port}.items()
        ]
        (self._profile / "user.js").write_text("".join(lines))
        size = (f"--width={width}", f"--height={height}")
        command = [
            "firefox-esr",
            "--headless",
            "--marionette",
            "--remote-allow-system-access",
            "--no-remote",
            *size,
        ]
        self._log = (self._profile / "log").open("w")
        self._process = subprocess.Popen(
            [*command, "--profile", str(self._profile)], stdout=self._log, stderr=self._log
        )
        self._marionette = Marionette(port)
        executor: Any = self._marionette
        super().__init__(command_executor=executor, options=webdriver.FirefoxOptions())
        self.file_detector = UselessFileDetector()  # it reads this machine's files itself

    def quit(self) -> None:
        self._marionette.close()
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def execute(self, driver_command: str, params: Any = None) -> dict[str, Any]:
        if driver_command in _KEYS:
            self.in_browser(_FOCUS)
        return super().execute(driver_command, params)

    def in_browser(self, script: str, *arguments: Any, waits: bool = False) -> Any:
        """Runs a script in the browser's own page, which may do what pages may not."""
        self._marionette.ask("Marionette:SetContext", {"value": "chrome"})
        try:
            kind = "ExecuteAsyncScript" if waits else "ExecuteScript"
            given = {"script": script, "args": list(arguments)}
            error, result = self._marionette.ask(f"WebDriver:{kind}", given)
        finally:
            self._marionette.ask("Marionette:SetContext", {"value": "content"})
        assert not error, error
        return result["value"]

    def execute_cdp_cmd(self, cmd: str, cmd_args: dict[str, Any]) -> None:
        match cmd, cmd_args:
            case "Storage.clearDataForOrigin", {"origin": origin}:
                self.in_browser(_CLEAR, origin, waits=True)
            case "Network.emulateNetworkConditions", {"offline": is_offline}:
                self.in_browser(_OFFLINE, is_offline)
            case "Emulation.setEmulatedMedia", {"features": [{"value": scheme}]}:
                name = "layout.css.prefers-color-scheme.content-override"
                value = 0 if scheme == "dark" else 1
                self.in_browser("Services.prefs.setIntPref(...arguments)", name, value)
            case "Emulation.setDeviceMetricsOverride", {"width": width, "height": height}:
                self.in_browser(_RESIZE, width, height)
            case "Network.clearBrowserCache", _:
                self.in_browser("Services.cache2.clear()")
            case "Network.enable", _:
                pass
            case _:
                raise AssertionError(f"Firefox is not taught {cmd}")

    def get_log(self, log_type: str) -> list[dict[str, Any]]:
        return [{"level": "SEVERE", "message": it} for it in self.in_browser(_ERRORS)]
