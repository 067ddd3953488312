"""A kubelet's pod-resources socket for tests: one gRPC call over plain HTTP/2, frame by frame.

Written apart from the client: what the kubelet sends was noted from grpcio 1.85, which serves the
same message (a settings frame, a window, a ping, headers, a message in one or several frames, and
trailers)."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# :status 200 (8 of the static table), then trailers that the client does not read
STATUS_OK = b"\x88"
TRAILERS = b"\x00\x0bgrpc-status\x010"
REFUSED = b"\x00\x0bgrpc-status\x0212"


def encode_varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number % 128 + 128)
        number //= 128
    out.append(number)
    return bytes(out)


def encode_field(number: int, value: bytes) -> bytes:
    return encode_varint(number * 8 + 2) + encode_varint(len(value)) + value


def encode_pods(pods: dict[tuple[str, str, str], list[str]]) -> bytes:
    """A ``ListPodResourcesResponse`` of (namespace, pod, container) -> devices, with fields that a
    later kubelet may add.
    """
    message = b""
    for (namespace, pod, container), devices in pods.items():
        held = encode_field(1, b"nvidia.com/gpu")
        held += b"".join(encode_field(2, device.encode()) for device in devices)
        held += encode_field(3, b"\x0a\x02\x08\x01")  # topology
        box = encode_field(1, container.encode()) + encode_field(2, held)
        box += encode_varint(3 * 8) + encode_varint(300)  # a CPU
        box += encode_varint(9 * 8 + 1) + bytes(8) + encode_varint(10 * 8 + 5) + bytes(4)
        message += encode_field(
            1,
            encode_field(1, pod.encode())
            + encode_field(2, namespace.encode())
            + encode_field(3, box),
        )
    return message


class FakeKubelet:
    """Answers ``List`` on a Unix socket until it is closed."""

    def __init__(self, path: Path, answer: bytes | None, piece: int = 1000) -> None:
        self.answer, self.piece = answer, piece
        self.asked: list[bytes] = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen(4)
        threading.Thread(target=self.serve, daemon=True).start()

    def close(self) -> None:
        self.listener.close()

    def serve(self) -> None:
        while True:
            try:
                link, _ = self.listener.accept()
            except OSError:
                return
            with link:
                self.attend(link)
                while link.recv(4096):  # the kubelet leaves the end to its clients
                    pass

    def attend(self, link: socket.socket) -> None:
        stream = link.makefile("rb")
        assert stream.read(len(PREFACE)) == PREFACE
        self.send(link, 4, 0, 0, struct.pack(">HI", 3, 100))
        self.send(link, 8, 0, 0, struct.pack(">I", 1 << 20))
        self.send(link, 6, 0, 0, b"12345678")
        is_asked = False
        while not is_asked:
            head = stream.read(9)
            kind, flags, number = struct.unpack(">BBI", head[3:])
            payload = stream.read(int.from_bytes(head[:3], "big"))
            if kind == 1:
                self.asked.append(payload)
            is_asked = kind == 0 and bool(flags & 1) and number == 1 and payload == bytes(5)
        if self.answer is None:
            self.send(link, 1, 5, 1, STATUS_OK + REFUSED)
            return
        self.send(link, 1, 4, 1, STATUS_OK)
        message = b"\x00" + struct.pack(">I", len(self.answer)) + self.answer
        for place in range(0, len(message), self.piece):
            self.send(link, 0, 0, 1, message[place : place + self.piece])
        self.send(link, 1, 5, 1, TRAILERS)

    def send(self, link: socket.socket, kind: int, flags: int, stream: int, payload: bytes) -> None:
        link.sendall(
            len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload
        )
