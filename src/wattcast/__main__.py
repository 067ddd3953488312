"""``python -m wattcast``."""

from wattcast.cli.main import entry

if __name__ == "__main__":
    entry()
