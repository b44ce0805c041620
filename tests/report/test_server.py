"""A local server answers what is registered, to those who know its token, and nothing else."""

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from threading import Event, Thread
from urllib.parse import urlsplit

import pytest

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.report.server import LARGEST_BODY, LocalPage, PageServer, ServedFile


def refuse(values: dict) -> None:
    raise UsageError("tp = 3 does not divide 8 heads.\n  Use 2.")


def fail(values: dict) -> None:
    raise ZeroDivisionError("a bug, with a secret in its text")


@pytest.fixture(scope="module")
def server():
    page = LocalPage(
        {"": ServedFile("text/html", lambda: "<p>page"), "a.js": ServedFile("text/javascript", lambda: "1")},
        {"twice": lambda values: {"n": 2 * values["n"]}, "refuse": refuse, "fail": fail},
    )
    with PageServer(page) as server:
        yield server


def ask(server, path=None, *, method="GET", body=None, host=None):
    """Return the status and the text of a request; ``path`` is below the token, or begins with a slash."""
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)
    path = path if path and path.startswith("/") else url.path + (path or "")
    connection.request(method, path, body, {"Host": host} if host else {})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_files_and_calls_are_answered(server):
    assert ask(server) == (200, "<p>page")
    assert ask(server, "a.js") == (200, "1")
    assert ask(server, "api/twice", method="POST", body='{"n": 21}') == (200, '{"n":42}')


def test_an_answer_waits_for_no_acknowledgement(server):
    """It comes as head and body. By Nagle's algorithm the body would wait for the client's delayed acknowledgement."""
    url, times = urlsplit(server.url), []
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)
    for _ in range(20):
        begin = time.monotonic()
        connection.request("GET", url.path)
        connection.getresponse().read()
        times.append(time.monotonic() - begin)
    assert min(times[10:]) < 0.03  # 40 ms else; the system acknowledges the first few at once


@pytest.mark.parametrize("path", ["/", "/a.js", "/api/twice", "/x/a.js", "/%2e%2e/etc/passwd", "//"])
def test_every_request_needs_the_token(server, path):
    assert ask(server, path)[0] == 401
    assert ask(server, path, method="POST", body="{}")[0] == 401


@pytest.mark.parametrize("host", ["example.com", "example.com:80", "127.0.0.1", "127.0.0.1:1"])
def test_another_host_is_refused(server, host):
    """A page of another site can let its name point to this machine (DNS rebinding)."""
    assert ask(server, host=host)[0] == 403


@pytest.mark.parametrize("path", ["b.js", "../a.js", "..%2f..%2fetc/passwd", "api/unknown", "api", "a.js/"])
def test_nothing_else_is_served(server, path):
    assert ask(server, path)[0] in (401, 404)  # 401 if the path leads out of the token's
    assert ask(server, "api/twice")[0] == 405


def test_a_refusal_is_its_text_with_status_400(server):
    status, text = ask(server, "api/refuse", method="POST", body="{}")
    assert (status, json.loads(text)) == (400, {"error": "tp = 3 does not divide 8 heads.\n  Use 2."})
    for body in ("", "[1]", "{", "[" * 100_000):
        assert ask(server, "api/twice", method="POST", body=body) == (400, '{"error":"the request is no JSON object."}')
    status, text = ask(server, "api/twice", method="POST", body=" " * (LARGEST_BODY + 1))
    assert status == 400 and "more than 8,388,608 bytes" in text


def test_a_bug_is_answered_without_its_text(server, capfd):
    status, text = ask(server, "api/fail", method="POST", body="{}")
    assert status == 500 and "secret" not in text and "ZeroDivisionError" in text
    assert "ZeroDivisionError: a bug" in capfd.readouterr().err


def test_two_servers_have_two_tokens(server):
    with PageServer(LocalPage({}, {})) as other:
        assert urlsplit(other.url).path != urlsplit(server.url).path
        assert ask(other, urlsplit(server.url).path)[0] == 401


def test_a_call_that_takes_longer_does_not_delay_the_end():
    begun, release = Event(), Event()

    def wait(values: dict) -> None:
        begun.set()
        release.wait(60)

    with PageServer(LocalPage({}, {"wait": wait})) as server:
        asking = Thread(target=lambda: suppress_errors(ask, server, "api/wait", method="POST", body="{}"))
        asking.start()
        assert begun.wait(10)
        begin = time.monotonic()
    assert time.monotonic() - begin < 10
    release.set()
    asking.join(10)


def suppress_errors(function, *args, **options):
    with suppress(OSError, http.client.HTTPException):
        function(*args, **options)


def test_a_used_port_is_refused(server, capsys):
    port = urlsplit(server.url).port
    assert main(["lab", "--port", str(port)]) == 2
    assert f"--port {port}: address already in use" in capsys.readouterr().err


def test_the_command_prints_its_url_and_ends_with_ctrl_c():
    words = [sys.executable, "-m", "shoal", "lab", "--no-browser", "--panel", "sharding?mesh=x=4&expression=A[I, Jx]"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        url = started.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/#sharding\?mesh=x=4&expression=A%5BI,%20Jx%5D", url)
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=60)
        connection.request("GET", urlsplit(url).path)
        assert b"shoal lab" in connection.getresponse().read()
        started.send_signal(signal.SIGINT)
        _, err = started.communicate(timeout=20)
    assert (started.returncode, err) == (0, "")
