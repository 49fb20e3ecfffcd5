"""What becomes of each key of each neon class: read, checked, without meaning today, or refused. Nothing else.

`tables.KEYS` has the decisions; this file applies them to a file, so that no key is dropped without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.neon.tagged_value import Said, plain


@dataclass(frozen=True)
class Only:
    """Values that say what happens here anyway; every other value is refused, with the reason."""

    values: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class Keys:
    """The decisions on the keys of one class, or of one plain mapping.

    read: it changes the experiment. checked: the converter compares it with what it must be, or refuses it.
    only: accepted with some values. meaningless, refused: with the reason. replaced: by which key a later neon replaced
    one that is refused: beside that, neither looks at it.
    """

    read: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    only: Mapping[str, Only] = field(default_factory=dict)
    meaningless: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.read, *self.checked, *self.only, *self.meaningless, *self.refused)


def check_keys(root: Said, kinds: Mapping[str, Mapping[str, Keys]], holders: tuple[str, ...]) -> list[str]:
    """Raises an ExperimentError for a key that is refused or unknown; a line for each that has no meaning today.

    Args:
        root: the experiment.
        kinds: `tables.KEYS`.
        holders: keys of an experiment that neon's files use to hold anchors.
    """
    walk = _Walk({name: keys for group in kinds.values() for name, keys in group.items()}, holders)
    walk.experiment(root)
    return walk.notes()


class _Walk:
    def __init__(self, tables: Mapping[str, Keys], holders: tuple[str, ...]):
        self.tables, self.holders = tables, holders
        self.seen: set[int] = set()
        self.places: dict[tuple[str, str], list[str]] = {}

    def experiment(self, root: Said) -> None:
        table = self.tables[root.name] if root.kind else self.tables["FitPredictErrorExperiment"]
        known = {key: value for key, value in root.items() if key in table.all}
        reached = {id(said) for value in known.values() for said in _inside(value)}
        for key, value in root.items():
            if key not in known and value.value is not None and not any(id(s) in reached for s in _inside(value)):
                if key not in self.holders:
                    raise ExperimentError(
                        f"{value.where}: {root.kind or 'the experiment'} has no key {key!r} that is known here, and "
                        f"nothing in it is referred to. {nearest(key, (*table.all, *self.holders))}"
                    )
                self.note(key, "nothing refers to what it holds", value)
        self.visit(Said(known, root.where, root.kind), "FitPredictErrorExperiment")

    def visit(self, said: Said, role: str) -> None:
        """Decides on the keys of `said`, and of what stands under those that are read."""
        if isinstance(said.value, list):
            for item in said.value:
                self.visit(item, role)
        if not isinstance(said.value, dict) or id(said) in self.seen:
            return
        self.seen.add(id(said))
        table = self.tables.get(said.name or role)
        if table is None:
            return  # the converter refuses the class, or looks at the values itself
        for key, value in said.items():
            if value.value is not None:
                what = said.kind or role.partition(" of ")[0]
                newer = table.replaced.get(key)
                if newer is not None and said.get(newer) is not None:
                    self.note(key, f"there is {newer}, which took its place", value)
                else:
                    self.decide(what, key, value, table)
        for key in (*table.read, *table.checked):
            if (value := said.get(key)) is not None:
                self.visit(value, _role(said, key, value))

    def decide(self, what: str, key: str, value: Said, table: Keys) -> None:
        if key in table.meaningless:
            self.note(key, table.meaningless[key], value)
        elif key in table.refused:
            raise ExperimentError(f"{value.where}: {what}: the key {key!r} is not supported: {table.refused[key]}")
        elif key in table.only:
            only = table.only[key]
            if plain(value) not in only.values:
                raise ExperimentError(
                    f"{value.where}: {what}: {key} is supported as {' or '.join(map(str, only.values))} only, got "
                    f"{str(plain(value))[:60]}: {only.reason}"
                )
        elif key not in table.all:
            known = (*table.read, *table.checked, *table.only) or table.all
            raise ExperimentError(f"{value.where}: {what} has no key {key!r} that is known here. {nearest(key, known)}")

    def note(self, key: str, reason: str, value: Said) -> None:
        places = self.places.setdefault((key, reason), [])
        if value.where not in places:
            places.append(value.where)

    def notes(self) -> list[str]:
        more = {1: "", 2: " (and in one more place)"}
        return [
            f"{places[0]}: {key} has no meaning today: {reason}"
            f"{more.get(len(places), f' (and in {len(places) - 1} more places)')}"
            for (key, reason), places in self.places.items()
        ]


def _inside(said: Said) -> Iterator[Said]:
    """A value and all that stands in it, each once."""
    waiting, seen = [said], {id(said)}
    while waiting:
        one = waiting.pop()
        yield one
        inner = one.value.values() if isinstance(one.value, dict) else one.value if isinstance(one.value, list) else ()
        for item in inner:
            if id(item) not in seen:
                seen.add(id(item))
                waiting.append(item)


def _role(said: Said, key: str, value: Said) -> str:
    """Under which name `tables.KEYS` has a plain mapping."""
    if key == "lr_params":
        return f"lr_params of {rule_type(said)}"
    if key in ("momentum_params", "momentum"):
        return f"momentum_params of {value.plain('type', 'constant')}"
    if key == "weight_init":
        return f"weight_init of {value.plain('type', 'uniform')}"
    if key in ("learning_rule", "brule_init"):
        return "lrule_init"
    return "metrics" if key == "epoch_metrics" else key


RULE_CLASSES = {
    "GradientDescent": "gradient_descent", "GradientDescentPretrain": "gradient_descent_pretrain",
    "GradientDescentMomentum": "gradient_descent_momentum",
    "GradientDescentMomentumWeightDecay": "gradient_descent_momentum_weight_decay", "AdaDelta": "adadelta",
    "RMSProp": "rmsprop",
}  # fmt: skip


def rule_type(rule: Said) -> str | None:
    """The type of a learning rule: `{type: adadelta, ...}`, or before the release `!obj:...AdaDelta {...}`."""
    return rule.word("type") if rule.kind is None else RULE_CLASSES.get(rule.name, rule.kind)


def meaningless_table(kinds: Mapping[str, Mapping[str, Keys]]) -> str:
    """The keys that have no meaning today with the reasons, as a table of Markdown."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for group, tables in kinds.items():
        for name, keys in tables.items():
            for key, reason in keys.meaningless.items():
                found.setdefault((key, reason), {}).setdefault(group, []).append(name)
    rows: dict[tuple[str, str], list[str]] = {}
    for (key, reason), groups in found.items():
        owners = [
            group if len(names) > 3 else ", ".join(f"`{name}`" for name in names) for group, names in groups.items()
        ]
        rows.setdefault((", ".join(owners), reason), []).append(f"`{key}`")
    lines = ["| key | of | why it is not read |", "|---|---|---|"]
    return "\n".join(lines + [f"| {', '.join(keys)} | {of} | {reason} |" for (of, reason), keys in rows.items()])
