"""``wattcast serve`` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"


class Server:
    """``wattcast serve`` on a free port; what it said is in ``said``."""

    def __init__(self, *arguments: str, more: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "wattcast", "serve", "--port", "0", *arguments]
        paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stderr is not None
        self.said: list[str] = []
        found = None
        while found is None:
            line = self.process.stderr.readline()
            assert line, f"the server ended: {self.said}"
            self.said.append(line)
            found = re.search(r"http://\S+?:(\d+)/", line)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._reader = threading.Thread(
            target=lambda: self.said.extend(self.process.stderr or []), daemon=True
        )
        self._reader.start()

    def stop(self) -> int:
        """Interrupt it as Ctrl-C would, and wait."""
        self.process.send_signal(signal.SIGINT)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code
