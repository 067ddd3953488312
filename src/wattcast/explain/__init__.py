"""What caused the difference between two predictions, or between a prediction and a measured run."""

from wattcast.explain.explanation import Explanation, explain
from wattcast.explain.side import Part, Side

__all__ = ["Explanation", "Part", "Side", "explain"]
