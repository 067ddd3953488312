"""How long prompts and answers are: a log-normal distribution of token counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class LengthDistribution:
    """A log-normal distribution of token counts, cut at both ends."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(
        self,
        random: np.random.Generator,
        count: int,
    ) -> npt.NDArray[np.int64]:
        """Draw ``count`` lengths."""
        drawn = self.median * np.exp(self.sigma * random.standard_normal(count))
        return np.clip(np.rint(drawn), self.least, self.most).astype(np.int64)

    @property
    def mean(self) -> float:
        """Mean length, by a large sample: the cut has no short formula."""
        return float(self.draw(np.random.default_rng(0), 20_000).mean())
