"""How much less sure a prediction is of a kernel unlike those measured: learned by leaving measured ones out.

Two things widen an interval. *Distance*: the ends of a family, in logs, are those of a typical held-out row times

    a + b·(1 - min(near, c)),   near = exp(-r) of the nearest measured row in the coordinates of the learned factor,

so that they are narrow beside measured rows and wide far from them, the same 90 % in both places, and beside a row no
narrower than was seen of held-out rows; latency and power each have a line of their own. *Kind*: what was
never measured at all (a function, a kind of kernel, a number format, a size beyond the range) moves the ends out
further, in quadrature, by the half-width that held 90 % of the rows when such a thing was left out of the fit.

Rows are of operators that ran by themselves, over and over. *Among others*, where caches are not their own, they cost
more (:mod:`wattcast.timeline.cold`), and more or less than that says: by a share of their time and by seconds a
kernel that were seen of layers of models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from importlib.resources import files

import msgspec
import numpy as np

from wattcast.arrays import Array
from wattcast.errors import bad_value
from wattcast.files import from_yaml

Line = tuple[float, float, float]  # a, b, c
UNSCALED: Line = (1.0, 0.0, 1.0)
OUTWARD = np.array([-1.0, 1.0])  # of a low and a high end


class Why(StrEnum):
    """Why a kernel is outside what was measured."""

    KIND = "kind"  # no kernel of its kind, or too few functions of that kind to speak for another
    FORM = "form"  # its function, where many others of the same kernel were measured
    DTYPE = "dtype"  # its number format
    SIZE = "size"  # a size beyond the range


@dataclass(frozen=True)
class Apart:
    """Half-width in logs that the ends of an interval are moved out by, of latency and of power; from how many."""

    latency: float
    power: float
    rows: int  # left out, of bursts and sustained rows together
    kinds: int  # things left out in turn

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency), ("power", self.power)):
            if not 0.0 <= value < 5.0:
                raise bad_value(f"widening.{name}", "a half-width of logs, from 0 to below 5", value)


@dataclass(frozen=True)
class Among:
    """What layers took beyond what was predicted from their operators: low and high ends of 90 % of them."""

    share: tuple[float, float]  # of the operators' time
    kernel_s: tuple[float, float]  # a kernel
    layers: int

    def __post_init__(self) -> None:
        if not (-1.0 < self.share[0] <= self.share[1] and self.kernel_s[0] <= self.kernel_s[1]):
            raise bad_value("widening.among", "a low and a high end, shares above -1", (self.share, self.kernel_s))

    def logs(self, kernels: float, busy_s: Array, mixed: Array) -> Array:
        """Log-ends ``(*sweep, 2)`` of a workload: the nearer of share and seconds, by how mixed it is.

        ``mixed`` is 1 - Σ share², 0 of one kernel alone, which is what was measured.
        """
        share, kernel_s = self._outward
        seconds = kernels * kernel_s / np.maximum(busy_s, 1e-12)[..., np.newaxis]
        nearer = np.maximum(np.minimum(seconds, share), 0.0)
        return np.asarray(np.log1p(nearer * OUTWARD) * mixed[..., np.newaxis])

    @cached_property
    def _outward(self) -> tuple[Array, Array]:
        """Shares and seconds as distances from the prediction."""
        return np.array(self.share) * OUTWARD, np.array(self.kernel_s) * OUTWARD


@dataclass(frozen=True)
class Widening:
    """What distance from measured rows, things never measured and other kernels add to an interval."""

    near: Line  # of latency
    near_power: Line
    apart: Mapping[Why, Apart]
    source: str
    among: Among | None = None  # None: no layers were measured

    def __post_init__(self) -> None:
        for line in (self.near, self.near_power):
            if not (line[0] > 0.0 and line[1] >= 0.0 and 0.0 <= line[2] <= 1.0):
                raise bad_value("widening.near", "a above 0, b of 0 or more, c from 0 to 1", line)
        missing = [str(why) for why in Why if why not in self.apart]
        if missing:
            raise bad_value("widening.apart", "a half-width for every reason", f"none for {', '.join(missing)}")

    def scale(self, near: Array | None) -> Array | None:
        """By what log-ends of latency and of power are multiplied, ``(2, kernel)``; None: by nothing.

        ``near`` is that of each kernel, ``(2, kernel)``; where nothing was learned, ends stay as they are.

        >>> usual().scale(np.array([[0.5], [0.5]])) is None
        True
        """
        if near is None or self.near == self.near_power == UNSCALED:
            return None
        return scale_of(near, self._lines)

    @cached_property
    def _lines(self) -> Array:
        return np.array([self.near, self.near_power]).T[..., np.newaxis]


def scale_of(near: Array, line: Line | Array) -> Array:
    """a + b·(1 - min(near, c)), 1 where there is no nearness.

    >>> scale_of(np.array([1.0, 0.5, np.nan]), (0.5, 1.0, 0.75)).tolist()
    [0.75, 1.0, 1.0]
    """
    found = line[0] + line[1] * (1.0 - np.minimum(near, line[2]))
    return np.asarray(np.where(np.isnan(found), 1.0, found))


class AmongFile(msgspec.Struct, forbid_unknown_fields=True):
    """The same of :class:`Among`."""

    share: tuple[float, float]
    kernel_s: tuple[float, float]
    layers: int


class WideningFile(msgspec.Struct, forbid_unknown_fields=True):
    """As a bundle and ``widening.yaml`` write it."""

    near: Line
    apart: dict[str, dict[str, float]]
    source: str
    near_power: Line = UNSCALED
    among: AmongFile | None = None


def from_plain(plain: WideningFile) -> Widening:
    """A widening from its file."""
    unknown = sorted(set(plain.apart) - {str(why) for why in Why})
    if unknown:
        raise bad_value("widening.apart", f"reasons among {', '.join(Why)}", ", ".join(unknown))
    apart = {
        Why(name): Apart(v["latency"], v["power"], int(v.get("rows", 0)), int(v.get("kinds", 0)))
        for name, v in plain.apart.items()
    }
    among = None if plain.among is None else Among(**msgspec.structs.asdict(plain.among))
    return Widening(plain.near, plain.near_power, apart, plain.source, among)


def to_plain(widening: Widening) -> dict[str, object]:
    """The same as plain mappings; :func:`from_plain` takes them back."""
    plain: dict[str, object] = {
        "near": list(widening.near),
        "near_power": list(widening.near_power),
        "apart": {str(why): dict(vars(apart)) for why, apart in widening.apart.items()},
        "source": widening.source,
    }
    among = widening.among
    if among is not None:
        both = {"share": list(among.share), "kernel_s": list(among.kernel_s)}
        plain["among"] = {**both, "layers": among.layers}
    return plain


@cache
def usual() -> Widening:
    """What a bundle takes that was fitted on too little to learn its own."""
    data = files("wattcast.fitted").joinpath("widening.yaml").read_bytes()
    return from_plain(from_yaml(data, WideningFile, "widening.yaml"))
