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

from collections.abc import (
    Callable,
    Mapping,
    Sequence,
)
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
    if CUDA_LIST not in environ:
        visible = tuple(card.index for card in cards)
        return DeviceChoice(0, visible, _describe_choice(0, visible, cards))
    text = environ[CUDA_LIST]
    entries = [entry.strip() for entry in text.split(",")]
    visible, is_part = _list_visible_cards(entries, text, cards, find_mig_parent)
    if not visible:
        raise _refuse_list(CUDA_LIST, text, f"hides all {len(cards)} GPUs of this machine")
    is_counted = entries[0].lstrip("+").isdigit()
    if is_counted and not _counts_as_nvidia_smi(cards, environ):
        names = ", ".join(dict.fromkeys(card.name for card in cards))
        raise BadInput(
            f"{CUDA_LIST}={clip_text(text)}: CUDA numbers the fastest card first, and the cards of "
            f"this machine differ ({clip_text(names)}). Set {CUDA_ORDER}=PCI_BUS_ID for "
            "the program, "
            f"or name the card by its UUID. {OVERRIDE}."
        )
    flag = ""
    if is_part:
        flag = "MIG: the counter is that of the whole card, other instances included"
    index = visible[0]
    return DeviceChoice(index, visible, _describe_choice(index, visible, cards), flag)


def _list_visible_cards(
    entries: Sequence[str],
    text: str,
    cards: Sequence[ListedCard],
    find_mig_parent: Callable[[str], str | None],
) -> tuple[tuple[int, ...], bool]:
    """Return the cards that a list names, and whether one of its entries is a part of a card."""
    visible: list[int] = []
    has_part = False
    for entry in entries:
        index, is_mig = _find_nvidia_card(entry, cards, find_mig_parent)
        if index is None:
            break  # CUDA ignores this entry and all after it
        has_part = has_part or is_mig
        if index not in visible:
            visible.append(index)
        elif not is_mig:
            reason = f"names GPU {index} twice, and CUDA then shows none"
            raise _refuse_list(CUDA_LIST, text, reason)
    return tuple(visible), has_part


def choose_amd_card(cards: Sequence[ListedCard], environ: Mapping[str, str]) -> DeviceChoice:
    """Return the first card that a HIP program with this environment uses."""
    visible = list(cards)
    for names in ((ROCR_LIST,), HIP_LISTS):
        name = next((name for name in names if name in environ), None)
        if name is None:
            continue
        text = environ[name]
        chosen: list[ListedCard] = []
        for entry in text.split(","):
            card = _find_amd_card(entry.strip(), visible)
            if card is None:
                break
            chosen.append(card)
        if not chosen:
            raise _refuse_list(name, text, f"hides all {len(cards)} GPUs of this machine")
        visible = chosen
    if not visible:
        return DeviceChoice(0)
    numbers = tuple(card.index for card in visible)
    return DeviceChoice(numbers[0], numbers, _describe_choice(numbers[0], numbers, cards))


def _find_nvidia_card(
    entry: str,
    cards: Sequence[ListedCard],
    find_mig_parent: Callable[[str], str | None],
) -> tuple[int | None, bool]:
    """Return the number of the card that an entry names, and whether it names a part of it."""
    card: ListedCard | None = None
    is_part = entry.startswith("MIG-")
    if entry.isdigit():
        card = _find_numbered(entry, cards)
    elif entry.startswith("MIG-GPU-"):  # as drivers before 470 wrote it: MIG-GPU-uuid/instance/part
        parent = entry.removeprefix("MIG-").partition("/")[0]
        card = _match_uuid(parent, cards)
    elif is_part:
        parent_uuid = find_mig_parent(entry)
        if parent_uuid is not None:
            card = _match_uuid(parent_uuid, cards)
    elif entry.startswith("GPU-"):
        card = _match_uuid(entry, cards)
    return (None if card is None else card.index), is_part


def _find_amd_card(entry: str, cards: Sequence[ListedCard]) -> ListedCard | None:
    if entry.isdigit():
        return _find_numbered(entry, cards)
    return _match_uuid(entry, cards) if entry.startswith("GPU-") else None


def _find_numbered(digits: str, cards: Sequence[ListedCard]) -> ListedCard | None:
    """Return the card at a place of a list; None where the list is shorter."""
    if len(digits) > LONGEST_NUMBER or int(digits) >= len(cards):
        return None
    return cards[int(digits)]


def _match_uuid(text: str, cards: Sequence[ListedCard]) -> ListedCard | None:
    """Return the card whose UUID begins with ``text``; None where none or several do."""
    matching = [card for card in cards if card.uuid == text]
    if not matching:
        matching = [card for card in cards if card.uuid.startswith(text)]
    return matching[0] if len(matching) == 1 else None


def _counts_as_nvidia_smi(cards: Sequence[ListedCard], environ: Mapping[str, str]) -> bool:
    is_ordered = environ.get(CUDA_ORDER, "") == "PCI_BUS_ID"
    return is_ordered or len({card.name for card in cards}) <= 1


def _describe_choice(
    index: int,
    visible: Sequence[int],
    cards: Sequence[ListedCard],
) -> str:
    if len(visible) < 2:
        return ""
    numbers = ", ".join(map(str, visible[:MOST_NAMED]))
    if len(visible) > MOST_NAMED:
        numbers += ", ..."
    note = (
        f"the program may use GPUs {numbers}; only GPU {index} is measured (--device N for another)"
    )
    if len({card.name for card in cards}) > 1:
        note += f"; these differ, and CUDA's number 0 is the fastest unless {CUDA_ORDER}=PCI_BUS_ID"
    return note


def _refuse_list(
    name: str,
    text: str,
    why: str,
) -> BadInput:
    return BadInput(
        f"{name}={clip_text(text)!r} {why}, so the program uses no card that could be measured. "
        f"{OVERRIDE}, or measure the processor with --source rapl."
    )


MOST_NAMED = 8  # cards that a note lists one by one
LONGEST_NUMBER = 9  # digits: a longer number names no card
