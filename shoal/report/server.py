"""A local server of one page: registered files and calls on 127.0.0.1, and nothing else.

Every request needs the random token of the URL, which other users of the machine and other pages of the browser do not
know. `LocalPage` is what is served; `PageServer` binds the port, runs, and stops.
"""

from __future__ import annotations

import json
import socket
import sys
import traceback
import webbrowser
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hmac import compare_digest
from secrets import token_urlsafe
from threading import Thread
from time import sleep
from types import TracebackType
from typing import Any

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.base.errors import UsageError, from_os_error, redact
from shoal.base.terminal import printable

HOST = "127.0.0.1"
LARGEST_BODY = 8 * 2**20  # bytes of a request
GRACE = 1  # seconds in which calls may end after Ctrl-C; longer ones are abandoned
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the token is in the URL
    "X-Content-Type-Options": "nosniff",
}
Call = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class ServedFile:
    """One file of a page."""

    media_type: str  # such as text/html
    content: Callable[[], str]  # returns the text; called for every request
    headers: Mapping[str, str] = field(default_factory=dict)  # further headers, such as a content security policy


@dataclass(frozen=True)
class LocalPage:
    """Everything that a server answers."""

    files: Mapping[str, ServedFile]  # files by their path below the token; "" is the page itself
    # functions by name. ``POST api/NAME`` with a JSON object calls one in a thread, and its plain result is the answer.
    # A `UsageError` is answered with status 400 and ``{"error": message}``.
    calls: Mapping[str, Call]

    def app(self, token: str, port: int) -> ASGIApp:
        """Return the application, for requests to this port with this token."""
        files = [Route(f"/{token}/{path}", _serve_file(file)) for path, file in self.files.items()]
        calls = [
            Route(f"/{token}/api/{name}", _serve_call(name, call), methods=["POST"])
            for name, call in self.calls.items()
        ]
        app = Starlette(routes=[*files, *calls])
        app.router.redirect_slashes = False
        return TokenGuard(app, token, port)


class TokenGuard:
    """Refuses requests without the token (401), or with another host than this machine's (403: DNS rebinding)."""

    def __init__(self, app: ASGIApp, token: str, port: int):
        self.app, self.token = app, token
        self.hosts = {f"{host}:{port}" for host in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        given = request.url.path.split("/")[1]
        if request.headers.get("host", "") not in self.hosts:
            refusal: Response | None = PlainTextResponse("This server answers 127.0.0.1 alone.", 403, HEADERS)
        elif not compare_digest(given.encode(), self.token.encode()):
            refusal = PlainTextResponse("Open the URL that shoal printed: it has a token.", 401, HEADERS)
        else:
            refusal = None
        await (refusal or self.app)(scope, receive, send)


def _serve_file(file: ServedFile) -> Callable[[Request], Response]:
    def serve(request: Request) -> Response:
        return Response(file.content(), headers=HEADERS | {**file.headers}, media_type=file.media_type)

    return serve


def _serve_call(name: str, call: Call) -> Callable[[Request], Any]:
    async def serve(request: Request) -> Response:
        try:
            values = await _read_json(request)
            return JSONResponse(await to_thread.run_sync(call, values, abandon_on_cancel=True), headers=HEADERS)
        except UsageError as error:
            return JSONResponse({"error": printable(redact(str(error)))}, 400, HEADERS)
        except ClientDisconnect:  # a newer move of the slider has replaced this one
            return Response(status_code=400)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            said = f"{name}: {type(error).__name__}. The terminal of the server shows where."
            return JSONResponse({"error": said}, 500, HEADERS)

    return serve


async def _read_json(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        UsageError: it is larger than `LARGEST_BODY`, or no JSON object.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise UsageError(f"the request has more than {LARGEST_BODY:,} bytes.")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError("the request is no JSON object.")
    return values


class PageServer:
    """Server of one page. Use `run` for a command, or the instance as a context to serve from a thread.

    Args:
        port: 0 for a free one.

    Attributes:
        url: address of the page, with its token.

    Raises:
        UsageError: the port cannot be used.

    >>> page = LocalPage({"": ServedFile("text/html", lambda: "<p>hello")}, {"twice": lambda values: 2 * values["n"]})
    >>> from urllib.request import Request, urlopen
    >>> with PageServer(page) as server:
    ...     read = urlopen(server.url).read(), urlopen(Request(f"{server.url}api/twice", b'{"n": 21}')).read()
    >>> read
    (b'<p>hello', b'42')
    """

    def __init__(self, page: LocalPage, port: int = 0):
        # For this protocol asyncio turns Nagle's algorithm off, with which answers wait 40 ms for an acknowledgement.
        self.socket = socket.socket(proto=socket.IPPROTO_TCP)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((HOST, port))
            self.socket.listen()  # from now on, a request waits until the server runs
        except (OSError, OverflowError) as error:
            self.socket.close()
            why = from_os_error(error) if isinstance(error, OSError) else error
            raise UsageError(f"--port {port}: {why}\n  Give another, or leave it out for a free one.") from None
        port, token = self.socket.getsockname()[1], token_urlsafe(24)
        self.url = f"http://{HOST}:{port}/{token}/"
        self.server = uvicorn.Server(uvicorn.Config(
            page.app(token, port), log_level="critical", lifespan="off", ws="none", access_log=False,
            timeout_graceful_shutdown=GRACE, server_header=False,
        ))  # fmt: skip
        self._thread: Thread | None = None

    def run(self, *, browser: bool = True) -> None:
        """Print the URL, and serve until Ctrl-C."""
        print(f"{self.url}\nThe URL is for you alone: its token opens the page. Ctrl-C stops the server.", flush=True)
        if browser:
            Thread(target=self._open, daemon=True).start()
        try:
            self.server.run([self.socket])
        except KeyboardInterrupt:  # uvicorn has stopped, and repeats the signal
            pass
        finally:
            self.socket.close()

    def _open(self) -> None:
        while not self.server.started:
            sleep(0.01)
        webbrowser.open(self.url)

    def __enter__(self) -> PageServer:
        self._thread = Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self._thread.start()
        while not self.server.started and self._thread.is_alive():
            sleep(0.005)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.server.should_exit = True
        if self._thread:
            self._thread.join()
        self.socket.close()
