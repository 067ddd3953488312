"""What the chip did: predicted, profiled or simulated, in one type."""

from wattcast.activity.activity import Activity, Source, events, merge, split

__all__ = ["Activity", "Source", "events", "merge", "split"]
