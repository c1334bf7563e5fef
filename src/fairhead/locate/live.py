"""Heads tried out by hand: what an edit of them changes, at once from stored parts, or in a full forward pass.

One page on 127.0.0.1 asks, for one user: the address holds a random token, and other origins are refused.
"""

import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from fairhead.errors import FairheadError, InputError
from fairhead.heads.sites import check_heads
from fairhead.locate.edits import parsed
from fairhead.locate.head_maps import Head
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.located import finite
from fairhead.locate.question import Question
from fairhead.locate.studies import Edited, layer_matched
from fairhead.report.form import is_head
from fairhead.report.markup import fill
from fairhead.report.wording import head_name, is_share, metric_name

_DRAWS = 40  # control sets of an edit that is answered at once
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HOST = "127.0.0.1"
_LARGEST = 100_000  # bytes of a request


class Live:
    """A question that is held open: heads in, figures of the reporting half out.

    Edited models are saved to `folder`; the heads that `locate` has `chosen` are marked on the map.
    """

    def __init__(
        self, question: Question[Any], plan: LocatePlan, folder: Path, chosen: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.question, self.plan, self.folder, self.chosen = question, plan, folder, tuple(chosen)
        self.rows = self.question.rows.take(self.question.reported)
        self.shown = self.question.located.in_table  # the figures that the report of such a question tells
        self.kinds = tuple(kind for kind in self.question.kinds if kind != "resample")
        self._direct: dict[str, Edited] = {}
        self._one_at_a_time = threading.Lock()  # the model

    @cached_property
    def map(self) -> Mapping[str, Any]:
        """Each head's direct contribution to the gap of the reporting half, [L, H], and which heads were selected."""
        question = self.question
        found = question.direct_map(~question.choosing & question.comparable, self.plan.level)
        return {
            "measure": found.to_dict()["measure"],
            "values": found.value.tolist(),
            "share": found.share.tolist(),
            "significant": (found.p_adjusted <= 0.05).tolist(),
            "chosen": [list(head) for head in self.chosen],
            "rows": len(self.rows),
        }

    def edit(self, heads: Sequence[Sequence[int]], kind: str) -> dict[str, Any]:
        """Every figure before and after, by the direct effect alone, beside that of random heads of the same layers."""
        chosen = self._heads(heads, kind)
        sets: Sequence[tuple[Head, ...]] = ()
        note = None
        if chosen:
            try:
                sets = layer_matched(chosen, self.question.shape[1], draws=_DRAWS, seed=self.plan.seed).sets
            except InputError as error:
                note = str(error)
        found = self.rows.figures(self._effects(kind)([(), chosen, *sets]))
        figures = [
            {
                "metric": metric,
                "name": metric_name(metric),
                "percent": is_share(metric),
                "before": float(values[0]),
                "after": float(values[1]),
                "controls": None if np.isnan(values[2:]).all() else np.nanquantile(values[2:], (0.05, 0.95)).tolist(),
            }
            for metric, values in found.items()
            if metric in self.shown
        ]
        return {"heads": [head_name(*head) for head in chosen], "figures": figures, "controls": len(sets), "note": note}

    def prove(self, heads: Sequence[Sequence[int]], kind: str) -> dict[str, Any]:
        """The same in a full forward pass, paired, with intervals."""
        chosen = self._heads(heads, kind, some=True)
        with self._one_at_a_time:
            before, after = self.question.forward(self.question.reported, kind)([(), chosen])
        changes = self.rows.compare(before, after, self.plan).differences
        return {
            "heads": [head_name(*head) for head in chosen],
            "figures": [
                {
                    "metric": change.metric,
                    "name": metric_name(change.metric),
                    "percent": is_share(change.metric),
                    "before": change.a,
                    "after": change.b,
                    "value": change.value,
                    "low": change.low,
                    "high": change.high,
                    "significant": change.p_adjusted is not None and change.p_adjusted <= 0.05,
                }
                for change in changes
                if change.metric in self.shown
            ],
            "rows": len(self.rows),
        }

    def save(self, heads: Sequence[Sequence[int]], kind: str, name: str) -> dict[str, Any]:
        """Bake the edit into the weights, in a folder of that name beside the head map."""
        chosen = self._heads(heads, kind, some=True)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InputError(f"{str(name)[:70]!r} is no name for a folder here: use letters, digits, - and _")
        place = self.folder / name
        with self._one_at_a_time:
            if place.exists():
                raise InputError(f"{place} is there already: choose another name")
            self.question.save(place, chosen, kind)
        return {"folder": str(place)}

    def _effects(self, kind: str) -> Edited:
        if kind not in self._direct:
            found = self.question.direct(kind, self.plan.seed)
            if found is None:
                raise InputError(f"{kind} has no direct effect here: prove it in a forward pass")
            self._direct[kind] = found
        return self._direct[kind]

    def _heads(self, heads: Sequence[Sequence[int]], kind: str, some: bool = False) -> tuple[Head, ...]:
        """Heads that there are, each once, and an edit that is known; where `some` are needed, none is refused."""
        if some and not heads:
            raise InputError("no head is chosen: choose some on the map")
        if not isinstance(kind, str) or parsed(kind)[0] not in self.kinds:
            raise InputError(f"the edit is {str(kind)[:40]!r}; here it is {', '.join(self.kinds)}")
        for head in heads:
            if not is_head(head):
                raise InputError(f"{str(head)[:40]} is no head; expected [layer, head]")
        found = [Head(*head) for head in heads]
        check_heads(found, [self.question.shape[1]] * self.question.shape[0])
        return tuple(dict.fromkeys(found))


def serve(live: Live, title: str, port: int = 0) -> "LiveServer":
    """A server that is ready to `serve_forever`; port 0 takes a free one."""
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
        # By the last part of the address
        self.answers: Mapping[str, Callable[..., Any]] = {"edit": live.edit, "prove": live.prove, "save": live.save}

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{_HOST}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "fairhead", ""

    def do_GET(self) -> None:
        """The page itself."""
        name = self._name()
        if name:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing at this address")
        elif name == "":
            nonce = secrets.token_urlsafe(16)
            content = finite({"map": self.server.live.map, "kinds": self.server.live.kinds})
            page = fill("live.html", title=self.server.title, content=content, nonce=nonce)
            self._send(HTTPStatus.OK, str(page), "text/html; charset=utf-8", nonce)

    def do_POST(self) -> None:
        """An edit, a proof or a saved model."""
        name = self._name()
        if name is None:
            return
        if name not in self.server.answers:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing at this address")
            return
        try:
            found = self._answer(name)
        except (FairheadError, ValueError, TypeError, OSError, RecursionError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, " ".join(str(error).split()))
        else:
            self._send(HTTPStatus.OK, json.dumps(finite(found)), "application/json")

    def _answer(self, name: str) -> Any:
        length = int(self.headers.get("Content-Length", "0"))
        if not 0 < length <= _LARGEST:
            raise InputError(f"a request of {length} bytes came; at most {_LARGEST} are taken")
        asked = json.loads(self.rfile.read(length))
        known = {"heads", "kind"} | ({"name"} if name == "save" else set())
        if not isinstance(asked, dict) or set(asked) != known or not isinstance(asked["heads"], list):
            raise InputError(f"expected {', '.join(sorted(known))}")
        return self.server.answers[name](**asked)

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
