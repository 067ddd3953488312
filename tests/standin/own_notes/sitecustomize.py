"""Give the processes of one test a folder of notes of their own.

A machine has one folder of notes, whatever is asked for. Tests that run at the same time would meet
there: `manage status` and `manage restore` speak of all cards. Python imports this file when it
starts."""

import os
from pathlib import Path

if folder := os.environ.get("WATTCAST_TEST_NOTES"):
    from wattcast.control import card_notes

    card_notes.FOLDER = Path(folder)
