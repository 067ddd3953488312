"""The same stand-in machine as the microbenchmarks'."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_path = Path(__file__).parent.parent / "microbench" / "conftest.py"
_spec = importlib.util.spec_from_file_location("microbench_conftest", _path)
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
import sys  # noqa: E402

sys.modules["microbench_conftest"] = _module
_spec.loader.exec_module(_module)
libraries, machine, rows = _module.libraries, _module.machine, _module.rows
