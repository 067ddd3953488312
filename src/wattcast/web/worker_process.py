"""Answer framed requests from stdin on stdout until stdin ends: a worker of the server.

A frame is its length in four bytes, then the bytes. A request is two frames (kind, body), an answer two (a JSON
header with status and type, then the body). No pickle crosses the pipe. Memory is limited, so that a request that
asks for too much fails alone; the server ends a worker that takes too long.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
from typing import BinaryIO

MOST_MEMORY_BYTE = 6 << 30
READY = b"ready"


def main() -> int:
    """Answer until the pipe closes; the first frame says that everything is loaded."""
    _limit_memory()
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not reach the pipe
    from wattcast.web.answers import AnswerCache, warm_up

    warm_up()
    respond = AnswerCache()
    write_frame(answers, READY)
    while True:
        kind = read_frame(requests)
        body = read_frame(requests) if kind is not None else None
        if kind is None or body is None:
            return 0
        found = respond(kind.decode(), body)
        write_frame(answers, json.dumps({"status": found.status, "type": found.type}).encode())
        write_frame(answers, found.body)


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the next frame; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (length,) = struct.unpack("!I", head)
    data = stream.read(length)
    return data if len(data) == length else None


def write_frame(stream: BinaryIO, data: bytes) -> None:
    """Write one frame and send it at once."""
    stream.write(struct.pack("!I", len(data)) + data)
    stream.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every platform, not above a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTE, MOST_MEMORY_BYTE))


if __name__ == "__main__":
    sys.exit(main())
