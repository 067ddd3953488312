"""Say how far the AccelWattch files of ``lab accelwattch`` are off, and on which measured watts.

``judged_files.yaml`` is made by ``python -m wattcast.lab.validate.public_checks.simulator_files``,
which says how; headers of files and ``gpus show --energies`` quote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import msgspec

from wattcast.core.strict_files import read_shipped_yaml
from wattcast.hardware.catalogue_reader import strip_board

# The card whose measured watts stand for those of another form of it
_SAME_CHIP = {"a100-sxm-80gb": "a100-pcie-40gb"}


@dataclass(frozen=True)
class FileJudgement:
    """The error of one card's file on measured watts, in percent."""

    gpu: str
    card: str  # in words
    rows_of: str  # what was measured
    counts: str  # where the counters of these rows come from
    rows: int = 0
    mape: float = 0.0  # mean absolute error
    bias: float = 0.0  # above zero is predicted too high
    has_own_watts: bool = False  # whether other watts of the card moved energies of its file


class _JudgedFiles(msgspec.Struct, forbid_unknown_fields=True):
    wattcast: str  # kind of file
    made_by: str
    judged: tuple[FileJudgement, ...]


@cache
def read_judgements() -> tuple[FileJudgement, ...]:
    """Return all judgements that ship."""
    return read_shipped_yaml(_JudgedFiles, "wattcast.lab.gpuwattch", "judged_files.yaml").judged


def find_judgements(gpu: str) -> tuple[FileJudgement, ...]:
    """Return the judgements of a card's own file; none where no watt of the card judges it.

    The first of cards with several is that with its own watts and with counted counters."""
    card = strip_board(gpu)
    named = _SAME_CHIP.get(card, card)
    of_card = [item for item in read_judgements() if item.gpu == named]
    best = [item for item in of_card if item.has_own_watts] or of_card
    counted = [item for item in best if item.counts != "predicted"] or best
    return tuple(counted)


def cards_left_out() -> tuple[FileJudgement, ...]:
    """Return the judgements of files that no watt of their card moved, one a set of rows."""
    return tuple(item for item in read_judgements() if not item.has_own_watts)


def worst_left_out() -> FileJudgement:
    """Return the file that is farthest off of those that no watt of their card moved."""
    return max(cards_left_out(), key=lambda item: item.mape)


def describe_judgement(gpu: str) -> str:
    """Return the error of a card's file in a sentence, and what it was judged on."""
    own = find_judgements(gpu)
    if own:
        said = "; ".join(_describe(item) for item in own)
        other_form = own[0].gpu != strip_board(gpu)
        where = f" on another form of the card, the {own[0].card}" if other_form else ""
        return f"judged{where}: {said}; counters: {own[0].counts}"
    others = ", ".join(f"{item.card} {item.mape:.1f} %" for item in _one_a_card(cards_left_out()))
    return (
        "forecast, judged on no row of this card; cards left out, whose files were made the same "
        f"way, are off by: {others}"
    )


def _one_a_card(judgements: Sequence[FileJudgement]) -> list[FileJudgement]:
    """Return the judgement of each card that is farthest off."""
    worst: dict[str, FileJudgement] = {}
    for item in judgements:
        if item.card not in worst or item.mape > worst[item.card].mape:
            worst[item.card] = item
    return list(worst.values())


def _describe(item: FileJudgement) -> str:
    return f"{item.mape:.1f} % off in the mean of {item.rows} rows (bias {item.bias:+.1f} %), {item.rows_of}"


def format_judgements(judgements: Sequence[FileJudgement]) -> str:
    """Return the shipped file."""
    lines = [
        "wattcast: judged files",
        "made_by: python -m wattcast.lab.validate.public_checks.simulator_files --write",
        "judged:",
    ]
    for item in judgements:
        fields = asdict(item)
        first, *others = (f"{name}: {_quote(value)}" for name, value in fields.items())
        lines.append(f"- {first}")
        lines += [f"  {line}" for line in others]
    return "\n".join(lines) + "\n"


def _quote(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
