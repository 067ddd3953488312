"""Find the card that a program will use from ``CUDA_VISIBLE_DEVICES`` and its relatives.

NVML and amdsmi number all cards of a machine, whatever a program is allowed to see. A program under
``CUDA_VISIBLE_DEVICES=1`` works on another card than number 0, and that one is to be measured.

- NVIDIA: a list of numbers, of UUIDs (``GPU-8932f937``, as long as needed to be unique) or of MIG
  instances (``MIG-...``). The list ends at the first entry that names no card. Numbers count as
  CUDA counts: in the order of nvidia-smi with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, and otherwise the
  fastest card first, which is the same order only where all cards are alike.
- AMD: ``ROCR_VISIBLE_DEVICES`` hides cards, and ``HIP_VISIBLE_DEVICES`` (or
  ``CUDA_VISIBLE_DEVICES``, which HIP reads too) numbers those that are left.

A MIG instance has no energy counter of its own: the whole card is measured, and that is flagged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wattcast.core.errors import BadInput, clip_text

CUDA_LIST = "CUDA_VISIBLE_DEVICES"
CUDA_ORDER = "CUDA_DEVICE_ORDER"
HIP_LISTS = ("HIP_VISIBLE_DEVICES", CUDA_LIST)
ROCR_LIST = "ROCR_VISIBLE_DEVICES"
OVERRIDE = "Name the card with --device N, as nvidia-smi numbers it"


@dataclass(frozen=True)
class ListedCard:
    """A card of this machine, as its driver lists it."""

    index: int
    name: str
    uuid: str = ""


@dataclass(frozen=True)
class DeviceChoice:
    """The card to measure, and what a user should know about the choice."""

    index: int
    visible: tuple[int, ...] = ()  # all cards that a program may use
    note: str = ""
    flag: str = ""  # why what is measured is not what the program takes


def choose_nvidia_card(
    cards: Sequence[ListedCard],
    environ: Mapping[str, str],
    find_mig_parent: Callable[[str], str | None] = lambda uuid: None,
) -> DeviceChoice:
    """Return the first card that a CUDA program with this environment uses.

    ``find_mig_parent`` returns the UUID of the card that a MIG instance belongs to.
    """
    everything = tuple(card.index for card in cards)
    if CUDA_LIST not in environ:
        return DeviceChoice(0, everything, _describe_choice(0, everything, cards))
    text = environ[CUDA_LIST]
    entries = [entry.strip() for entry in text.split(",")]
    chosen: list[int] = []
    is_part = False
    for entry in entries:
        index, is_mig = _find_nvidia_card(entry, cards, find_mig_parent)
        if index is None:
            break  # CUDA ignores this entry and all after it
        if index in chosen and not is_mig:
            raise _refuse_list(
                CUDA_LIST, text, f"names GPU {index} twice, and CUDA then shows none"
            )
        is_part = is_part or is_mig
        if index not in chosen:
            chosen.append(index)
    if not chosen:
        raise _refuse_list(CUDA_LIST, text, f"hides all {len(cards)} GPUs of this machine")
    is_counted = entries[0].lstrip("+").isdigit()
    if is_counted and not _counts_as_nvidia_smi(cards, environ):
        names = ", ".join(dict.fromkeys(card.name for card in cards))
        raise BadInput(
            f"{CUDA_LIST}={clip_text(text)}: CUDA numbers the fastest card first, and the cards of "
            f"this machine differ ({clip_text(names)}). Set {CUDA_ORDER}=PCI_BUS_ID for the program, "
            f"or name the card by its UUID. {OVERRIDE}."
        )
    flag = "MIG: the counter is that of the whole card, other instances included" if is_part else ""
    return DeviceChoice(
        chosen[0], tuple(chosen), _describe_choice(chosen[0], tuple(chosen), cards), flag
    )


def choose_amd_card(cards: Sequence[ListedCard], environ: Mapping[str, str]) -> DeviceChoice:
    """Return the first card that a HIP program with this environment uses."""
    visible = [card.index for card in cards]
    for names in ((ROCR_LIST,), HIP_LISTS):
        name = next((name for name in names if name in environ), None)
        if name is None:
            continue
        text = environ[name]
        chosen: list[int] = []
        for entry in text.split(","):
            index = _find_amd_card(entry.strip(), [cards[i] for i in visible])
            if index is None:
                break
            chosen.append(index)
        if not chosen:
            raise _refuse_list(name, text, f"hides all {len(cards)} GPUs of this machine")
        visible = chosen
    if not visible:
        return DeviceChoice(0)
    return DeviceChoice(visible[0], tuple(visible), _describe_choice(visible[0], visible, cards))


def _find_nvidia_card(
    entry: str, cards: Sequence[ListedCard], find_mig_parent: Callable[[str], str | None]
) -> tuple[int | None, bool]:
    """Return the number of the card that an entry names, and whether it names a part of it."""
    if entry.isdigit():
        number = int(entry) if len(entry) < 10 else len(cards)
        return (cards[number].index if number < len(cards) else None), False
    if entry.startswith("MIG-GPU-"):  # as drivers before 470 wrote it: MIG-GPU-uuid/instance/part
        parent = entry.removeprefix("MIG-").partition("/")[0]
        return _match_uuid(parent, cards), True
    if entry.startswith("MIG-"):
        parent_uuid = find_mig_parent(entry)
        return (None if parent_uuid is None else _match_uuid(parent_uuid, cards)), True
    return (_match_uuid(entry, cards) if entry.startswith("GPU-") else None), False


def _find_amd_card(entry: str, cards: Sequence[ListedCard]) -> int | None:
    if entry.isdigit():
        number = int(entry) if len(entry) < 10 else len(cards)
        return cards[number].index if number < len(cards) else None
    return _match_uuid(entry, cards) if entry.startswith("GPU-") else None


def _match_uuid(text: str, cards: Sequence[ListedCard]) -> int | None:
    """Return the card whose UUID begins with ``text``; None where none or several do."""
    exact = [card.index for card in cards if card.uuid == text]
    matching = exact or [card.index for card in cards if card.uuid.startswith(text)]
    return matching[0] if len(matching) == 1 else None


def _counts_as_nvidia_smi(cards: Sequence[ListedCard], environ: Mapping[str, str]) -> bool:
    is_ordered = environ.get(CUDA_ORDER, "") == "PCI_BUS_ID"
    return is_ordered or len({card.name for card in cards}) <= 1


def _describe_choice(index: int, visible: Sequence[int], cards: Sequence[ListedCard]) -> str:
    if len(visible) < 2:
        return ""
    numbers = ", ".join(map(str, visible[:8])) + (", ..." if len(visible) > 8 else "")
    told = (
        f"the program may use GPUs {numbers}; only GPU {index} is measured (--device N for another)"
    )
    if len({card.name for card in cards}) > 1:
        told += f"; these differ, and CUDA's number 0 is the fastest unless {CUDA_ORDER}=PCI_BUS_ID"
    return told


def _refuse_list(name: str, text: str, why: str) -> BadInput:
    return BadInput(
        f"{name}={clip_text(text)!r} {why}, so the program uses no card that could be measured. "
        f"{OVERRIDE}, or measure the processor with --source rapl."
    )
