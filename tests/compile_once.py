"""Compile the package and the tests before workers start, which would each compile all of them.

In a clean clone that took each of three workers 15 s of a processor. What pytest keeps of a test
file, whose assertions it rewrites, only its own functions write; with a pytest that has other ones,
workers compile as ever.
"""

from __future__ import annotations

import compileall
import multiprocessing
import os
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def compile_all(config: pytest.Config) -> None:
    """Compile what has no bytecode, or one of another source, on all cores."""
    try:
        from _pytest.assertion.rewrite import (
            PYC_TAIL,
            _read_pyc,
            _rewrite_test,
            _write_pyc,
            assertstate_key,
            get_cache_dir,
        )
    except ImportError:
        return
    state = config.stash.get(assertstate_key, None)
    if state is None or config.getoption("assertmode") != "rewrite":
        return

    def compile_test(path: Path) -> None:
        folder = get_cache_dir(path)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / (path.stem + PYC_TAIL)
        if _read_pyc(path, kept) is None:
            source, code = _rewrite_test(path, config)
            _write_pyc(state, code, source, kept)

    tests = sorted((ROOT / "tests").rglob("*.py"))
    rewritten = [path for path in tests if path.name.startswith(("test_", "conftest"))]
    others = [path for path in tests if path not in set(rewritten)]
    others += sorted((ROOT / "src" / "wattcast").rglob("*.py"))
    compile_other = partial(compileall.compile_file, quiet=2)
    jobs = [(compile_test, path) for path in rewritten]
    jobs += [(compile_other, path) for path in others]

    # Forked processes know the jobs, which no pipe could carry.
    count = os.cpu_count() or 1
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=_run_jobs, args=(jobs[k::count],)) for k in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _run_jobs(jobs: list) -> None:
    for compile_path, path in jobs:
        compile_path(path)
