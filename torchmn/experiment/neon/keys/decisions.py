"""The decision on each key of a class: it is read, checked, without effect, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AllowedValues:
    """Values of a key that have no effect; others are an error.

    Attributes:
        values: TorchMN's behaviour.
        reason: why other values are an error.
        replaced: values, or classes of an object, in whose place TorchMN's behaviour is used, with a note.
        note: why.
    """

    values: tuple[Any, ...]
    reason: str
    replaced: tuple[Any, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Keys:
    """The treatment of the keys of one class, or of one plain mapping.

    Attributes:
        read: keys that the converter uses.
        checked: keys that the converter compares with the expected value, or rejects.
        only: keys that are accepted with some values only.
        ignored: keys without effect, with the reason.
        refused: keys that are an error, with the reason.
        replaced: keys that a later neon replaced, with the new key, next to which they have no effect.
    """

    read: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    only: Mapping[str, AllowedValues] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.read, *self.checked, *self.only, *self.ignored, *self.refused)
