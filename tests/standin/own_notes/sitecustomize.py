"""Give the processes of one test a folder of notes of their own.

A machine has one folder of notes, whatever is asked for. Tests that run at the same time would meet
there: `manage status` and `manage restore` speak of all cards. Python imports this file when it
starts, and the module of notes is changed when a process imports it: most programs under control
never do."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

MODULE = "wattcast.control.card_notes"


class OwnNotes:
    """Import the module of notes as usual, and then set its folder."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        self.usual = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec):
        return self.usual.create_module(spec)

    def exec_module(self, module):
        self.usual.exec_module(module)
        module.FOLDER = self.folder


if folder := os.environ.get("WATTCAST_TEST_NOTES"):
    sys.meta_path.insert(0, OwnNotes(folder))
