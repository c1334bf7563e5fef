"""One page on 127.0.0.1, for one user: the address holds a random token, and other origins are refused."""

import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fairhead.errors import FairheadError, InputError
from fairhead.locate.live import Live
from fairhead.report.markup import fill

_HOST = "127.0.0.1"
_LARGEST = 100_000  # bytes of a request


def serve(live: Live, title: str, port: int = 0) -> "LiveServer":
    """A server that is ready to `serve_forever`; port 0 takes a free one.

    Raises:
        InputError: the port is in use, or not allowed.
    """
    try:
        return LiveServer(live, title, port)
    except OSError as error:
        raise InputError(
            f"port {port} of this machine cannot be used ({error.strerror or error}): name another with --port, or "
            "leave it out for a free one"
        ) from None


class LiveServer(ThreadingHTTPServer):
    """The page, and the three things that it asks."""

    daemon_threads = True

    def __init__(self, live: Live, title: str, port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.live, self.title, self.token = live, title, secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{_HOST}:{self.server_port}/{self.token}/"

    def answers(self) -> Mapping[str, Callable[..., Any]]:
        """By the last part of the address."""
        return {"edit": self.live.edit, "prove": self.live.prove, "save": self.live.save}


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "fairhead", ""

    def do_GET(self) -> None:
        """The page itself."""
        if self._name() == "":
            nonce = secrets.token_urlsafe(16)
            content = {"map": self.server.live.map, "kinds": self.server.live.kinds}
            page = fill("live.html", title=self.server.title, content=content, nonce=nonce)
            self._send(HTTPStatus.OK, str(page), "text/html; charset=utf-8", nonce)

    def do_POST(self) -> None:
        """An edit, a proof or a saved model."""
        name = self._name()
        if name is None:
            return
        if name not in self.server.answers():
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing at this address")
            return
        try:
            found = self._answer(name)
        except (FairheadError, ValueError, TypeError, OSError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, " ".join(str(error).split()))
        else:
            self._send(HTTPStatus.OK, json.dumps(found), "application/json")

    def _answer(self, name: str) -> Any:
        length = int(self.headers.get("Content-Length", "0"))
        if not 0 < length <= _LARGEST:
            raise InputError(f"a request of {length} bytes came; at most {_LARGEST} are taken")
        asked = json.loads(self.rfile.read(length))
        known = {"heads", "kind"} | ({"name"} if name == "save" else set())
        if not isinstance(asked, dict) or set(asked) != known or not isinstance(asked["heads"], list):
            raise InputError(f"expected {', '.join(sorted(known))}")
        return self.server.answers()[name](**asked)

    def _name(self) -> str | None:
        """The last part of the address; None, and an answer, where the token is wrong or another page asks."""
        host = self.headers.get("Host", "")
        own = {f"{name}:{self.server.server_port}" for name in (_HOST, "localhost")}
        origin = self.headers.get("Origin")
        token, _, name = self.path.partition("?")[0].strip("/").partition("/")
        if host not in own or (origin is not None and origin.removeprefix("http://") not in own):
            self._refuse(HTTPStatus.FORBIDDEN, "only the page that fairhead view opened may ask here")
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "the token in the address is wrong: open the address that was printed")
        else:
            return name
        return None

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, json.dumps({"error": why}), "application/json")

    def _send(self, status: HTTPStatus, text: str, kind: str, nonce: str | None = None) -> None:
        body = text.encode()
        allowed = (
            "" if nonce is None else f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        )
        self.send_response(status)
        for header, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"default-src 'none'; {allowed}base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'",
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
        }.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the token would stand in the log."""
