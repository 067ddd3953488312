"""Ask the kubelet which pods hold which GPUs, over the gRPC socket of its pod-resources API.

``PodResourcesLister.List`` (k8s.io/kubelet/pkg/apis/podresources/v1) takes an empty message and
returns the pods of the node with the devices of their containers. gRPC is HTTP/2 with messages
behind five bytes; this client speaks what one such call needs and no more: no TLS, no compression,
one stream. Headers that come back are not read, since a call that fails has no message.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wattcast.core.errors import BadInput, MissingTool

SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
METHOD = "/v1.PodResourcesLister/List"
CALL_S = 2.0
LONGEST_ANSWER = 16 << 20  # byte; the kubelet's own limit
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_STREAM = 1
_WINDOW_BYTE = (1 << 31) - 1
_USUAL_WINDOW_BYTE = 65535
_INITIAL_WINDOW_SIZE = 4  # number of the setting
# Entries of HPACK's static table (RFC 7541, appendix A): :method POST and :scheme http are whole,
# the others are names.
_POST, _HTTP = 3, 6
_AUTHORITY, _PATH, _CONTENT_TYPE = 1, 4, 31


@dataclass(frozen=True)
class PodDevice:
    """Name who holds a device."""

    device: str  # such as "GPU-5f2b..."; parts of a shared card end in "::1"
    resource: str  # such as "nvidia.com/gpu"
    namespace: str
    pod: str
    container: str

    @property
    def uuid(self) -> str:
        """Return the UUID of the card, without the number of a share."""
        return self.device.split("::")[0]


def list_pod_devices(path: Path = SOCKET) -> list[PodDevice]:
    """Return the devices of all pods of the node; ``MissingTool`` where the kubelet does not
    answer.
    """
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(CALL_S)
            link.connect(str(path))
            message = _call(link)
    except (OSError, struct.error) as error:
        raise MissingTool(f"{path}: the kubelet does not tell its pods ({error}).") from None
    return list(_read_response(message))


def _call(link: socket.socket) -> bytes:
    """Make the call and return the message that answers it."""
    settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW_BYTE)
    more_window = struct.pack(">I", _WINDOW_BYTE - _USUAL_WINDOW_BYTE)
    empty_message = struct.pack(">BI", 0, 0)
    link.sendall(
        _PREFACE
        + _frame(_SETTINGS, 0, 0, settings)
        + _frame(_WINDOW, 0, 0, more_window)
        + _frame(_HEADERS, _END_HEADERS, _STREAM, _request_headers())
        + _frame(_DATA, _END_STREAM, _STREAM, empty_message)
    )
    answer = b""
    while True:
        kind, flags, stream, payload = _read_frame(link)
        if kind == _SETTINGS and not flags & _ACK:
            link.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            link.sendall(_frame(_PING, _ACK, 0, payload))
        elif kind in (_RESET, _GOAWAY):
            raise OSError("it ended the call")
        elif kind == _DATA and stream == _STREAM:
            answer += payload
            if len(answer) > LONGEST_ANSWER:
                raise OSError("its answer is too long")
        if stream == _STREAM and kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            return _unwrap_message(answer)


def _unwrap_message(answer: bytes) -> bytes:
    """Return the one message of an answer, without the five bytes before it."""
    if len(answer) < 5:
        raise OSError("it refused the call")
    is_compressed, length = struct.unpack(">BI", answer[:5])
    if is_compressed or length != len(answer) - 5:
        raise OSError("its answer is not one plain message")
    return answer[5:]


def _frame(
    kind: int,
    flags: int,
    stream: int,
    payload: bytes,
) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _read_frame(link: socket.socket) -> tuple[int, int, int, bytes]:
    """Return kind, flags, stream and payload of the next frame."""
    head = _read_exactly(link, 9)
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    return kind, flags, stream, _read_exactly(link, int.from_bytes(head[:3], "big"))


def _read_exactly(link: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = link.recv(min(count, 65536))
        if not part:
            raise OSError("it ended the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _request_headers() -> bytes:
    """Return the headers of the call, in HPACK's plainest form: no strings are compressed."""
    named = [
        (_PATH, METHOD),
        (_AUTHORITY, "localhost"),
        (_CONTENT_TYPE, "application/grpc"),
    ]
    block = bytes([0x80 | _POST, 0x80 | _HTTP])
    for entry, value in named:
        # Not to be indexed, with the name at `entry`: a prefix of four bits, 15 and the rest.
        prefix = bytes([entry]) if entry < 15 else bytes([15, entry - 15])
        block += prefix + bytes([len(value)]) + value.encode()
    return block + b"\x00" + b"\x02te" + b"\x08trailers"


def _read_response(message: bytes) -> Iterator[PodDevice]:
    """Yield the devices of a ``ListPodResourcesResponse``."""
    for _, pod in _read_fields(message, 1):
        fields = dict(_read_texts(pod))
        for _, container in _read_fields(pod, 3):
            name = dict(_read_texts(container)).get(1, "")
            for _, devices in _read_fields(container, 2):
                resource = dict(_read_texts(devices)).get(1, "")
                for _, device in _read_fields(devices, 2):
                    yield PodDevice(
                        device=_decode(device),
                        resource=resource,
                        namespace=fields.get(2, ""),
                        pod=fields.get(1, ""),
                        container=name,
                    )


def _read_texts(message: bytes) -> Iterator[tuple[int, str]]:
    """Yield the texts of fields 1 and 2, where they are texts."""
    for number in (1, 2):
        for _, value in _read_fields(message, number):
            try:
                yield number, value.decode()
            except UnicodeDecodeError:
                break


def _decode(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadInput("the kubelet names a device in no text.") from None


def _read_fields(message: bytes, wanted: int) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of one number that have a length (texts, bytes and messages)."""
    place = 0
    while place < len(message):
        key, place = _read_varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == 0:
            _, place = _read_varint(message, place)
        elif kind == 1:
            place += 8
        elif kind == 5:
            place += 4
        elif kind == 2:
            length, place = _read_varint(message, place)
            if place + length > len(message):
                raise BadInput("the kubelet's answer is torn.")
            if number == wanted:
                yield number, message[place : place + length]
            place += length
        else:
            raise BadInput("the kubelet's answer is no message.")


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            raise BadInput("the kubelet's answer is torn.")
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise BadInput("the kubelet's answer is no message.")
