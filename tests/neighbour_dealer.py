"""Sends requests to a real server whose scheduler stands behind a gate, and reads what comes back."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import requests
from neighbour_cards import Body, Card
from plugin.blockreuse_gate import Cells
from servers import Server

ANSWER_S = 60.0  # a busy machine answers within seconds; what takes longer hangs
ARRIVAL_S = 5.0
IGNORED_S = 0.2  # the host drops aborts of what has ended


class ServerEnded(Exception):
    """The server under test is gone; the message carries what its log says last."""

    card: Card | None = None  # that ended it alone


class Dealer:
    """Sends requests to one server and steers its scheduler."""

    def __init__(self, server: Server, gate: Cells, pool: concurrent.futures.Executor) -> None:
        self.server, self.gate, self._pool = server, gate, pool
        self._connections: dict[int, http.client.HTTPConnection] = {}

    def post(self, path: str, body: Body | None = None, *, seat: int | None = None) -> Body:
        """{"status", "answer"}; an answer that never comes is a status of 0."""
        at = urlsplit(self.server.url)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=ANSWER_S)
        if seat is not None:
            self._connections[seat] = connection
        try:
            connection.request("POST", path, json.dumps(body or {}), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        except TimeoutError:
            return {"status": 0, "answer": f"no answer within {ANSWER_S:.0f} s"}
        except (OSError, http.client.HTTPException, AttributeError, ValueError) as error:
            return {"status": 0, "answer": f"connection lost: {type(error).__name__}"}
        finally:
            connection.close()
        return {"status": response.status, "answer": parse(text, bool((body or {}).get("stream")))}

    def send(self, body: Body, *, seat: int) -> concurrent.futures.Future[Body]:
        """Post in the background, and return when the scheduler has the request or an answer has come."""
        before = self.gate.received
        future = self._pool.submit(self.post, "/generate", body, seat=seat)
        wait_for(lambda: self.gate.received > before or future.done(), ARRIVAL_S)
        return future

    def let_pass(self, passes: int) -> None:
        self.gate.passes = passes
        wait_for(lambda: self.gate.passes == 0, ARRIVAL_S)

    def abort(self, seat: int, rid: str, how: str) -> None:
        if how == "disconnect":
            with contextlib.suppress(Exception):
                connection = self._connections[seat]
                assert connection.sock is not None
                connection.sock.shutdown(2)
            return
        before = self.gate.received
        self.post("/abort_request", {"rid": rid})
        wait_for(lambda: self.gate.received > before, IGNORED_S)

    def open(self) -> None:
        self.gate.passes = -1

    def close(self) -> None:
        self.gate.passes = 0

    def state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = self.server.get("/server_info", timeout_s=ANSWER_S)["internal_states"][0]
            return state["blockreuse"]  # type: ignore[no-any-return]
        except requests.RequestException as error:
            raise ServerEnded(last_error(self.server)) from error


def parse(text: str, stream: bool) -> Any:
    """JSON; of a stream its last piece, which holds the whole answer."""
    if stream and "data: " in text:
        pieces = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        text = next((p for p in reversed(pieces) if p != "[DONE]"), text)
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def wait_for(condition: Callable[[], bool], wait_s: float, poll_s: float = 0.001) -> bool:
    deadline = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def last_error(server: Server) -> str:
    lines = [line for line in server.log_text().splitlines() if re.search(r"\w+(Error|Exception)\b.*:", line)]
    return lines[-1] if lines else "its log holds no error"
