"""Results that take minutes are kept in a folder of the test, never in the user's."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTCAST_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """Variables of a user without reference data."""
    return {"WATTCAST_CACHE": str(tmp_path / "cache"), "WATTCAST_REFERENCE": str(tmp_path / "none")}
