"""The options of an exploration: what varies, what is kept, and what is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from wattcast.core.option_declaration import Option
from wattcast.options.run_options import ModelOptions
from wattcast.options.setting_options import (
    CARD_SETTINGS,
    PriceOptions,
    SettingOptions,
)
from wattcast.options.verb_options import VerbOptions, part_of

_SAMPLE_PANEL = "How it is computed"


@dataclass(frozen=True)
class BestBound:
    """How slow the best point may be."""

    slowdown: Annotated[
        float | None, Option("Slowdown of the best point over the fastest, at most: 5%.", unit="")
    ] = None
    latency_s: Annotated[
        float | None, Option("Longest time of the best point: 50ms.", unit="s", above=0)
    ] = None


@dataclass(frozen=True)
class DesignSample:
    """Which points of a space of designs are evaluated and kept."""

    where: Annotated[
        Sequence[str], Option("Keep points that meet power_w<=400, latency<=50ms.")
    ] = ()
    sample: Annotated[
        str | None,
        Option("Take random:N or sobol:N points instead of the grid.", panel=_SAMPLE_PANEL),
    ] = None
    seed: Annotated[int, Option("Seed of random and Sobol samples.", panel=_SAMPLE_PANEL)] = 0
    hold: Annotated[
        str | None,
        Option("Hold the base's area|power."),
    ] = None


@dataclass(frozen=True)
class DesignOutput:
    """What a sweep of designs reports and writes."""

    front: Annotated[
        Sequence[str], Option("Columns that the Pareto front minimises.", commas=True)
    ] = (
        "latency_s",
        "power_w",
    )
    out: Annotated[
        str | Path | None,
        Option("Save every point in a .parquet, .csv or .json file, or a folder."),
    ] = None
    yes: Annotated[
        bool, Option("Run however many points there are.", panel="How it is computed")
    ] = False


EXPLORE = VerbOptions(
    "explore",
    BestBound,
    ModelOptions,
    part_of(SettingOptions, *CARD_SETTINGS, "bundle"),
    PriceOptions,
)
STUDY = VerbOptions(
    "explore_designs",
    DesignSample,
    ModelOptions,
    part_of(SettingOptions, *CARD_SETTINGS, "bundle"),
)
EXPLORE_DESIGNS = VerbOptions(
    "explore_designs",
    DesignSample,
    DesignOutput,
    ModelOptions,
    part_of(SettingOptions, *CARD_SETTINGS, "bundle"),
)
