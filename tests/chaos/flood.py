"""Large bodies with a wrong key, as fast as they are taken: `python -m tests.chaos.flood PORT PREFIX COUNT BYTES`.

Does: sixteen connections at a time, one body each; a line per body: its id, how it ended, what was said. Stops sending
when an answer comes, as a client that looks does. Does not: share a process with the callers that are measured.
"""

from __future__ import annotations

import http.client
import select
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.chaos.client import CHAT, WRONG_KEY, Outcome, head, read_reply

NUM_THREADS = 16
PIECE_BYTES = 256 * 1024


def send_one(port: int, request_id: str, body: memoryview) -> Outcome:
    outcome = Outcome(request_id, "left")
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sock.sendall(head(CHAT, request_id, len(body), key=WRONG_KEY))
            _send_until_answered(sock, body)
            reply = http.client.HTTPResponse(sock)
            reply.begin()
            read_reply(reply, outcome)
    except (OSError, http.client.HTTPException) as error:
        outcome.detail = f"{type(error).__name__}: {error}"  # cut off without an answer, which is not owed to it
    return outcome


def _send_until_answered(sock: socket.socket, body: memoryview) -> None:
    for start in range(0, len(body), PIECE_BYTES):
        readable, _, _ = select.select([sock], [], [], 0)
        if readable:
            return
        try:
            sock.sendall(body[start : start + PIECE_BYTES])
        except ConnectionError:  # it may have said why before
            return


def main(port: int, prefix: str, count: int, num_bytes: int) -> None:
    body = memoryview(b'{"model":"m","messages":[{"role":"user","content":"' + b"x" * (num_bytes - 55) + b'"}]}')
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for outcome in pool.map(lambda n: send_one(port, f"{prefix}-flood-{n}", body), range(count)):
            print(outcome.request_id, outcome.kind, outcome.detail, sep="\t", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]))
