"""The Titan X file, where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattcast.lab.counter_models import gpmtool_files


@pytest.fixture(scope="session")
def titanx(reference: Path) -> gpmtool_files.UtilisationFile:
    """The Titan X clock plane."""
    path = reference / "titanx" / "micro_gtxtitanx.csv"
    if not path.is_file():
        pytest.skip("no Titan X measurements in the reference folder")
    return gpmtool_files.read_utilisations(path)
