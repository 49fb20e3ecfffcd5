"""Checks the keys of an experiment by the decisions of `tables.KEYS`; no key is ignored silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.tagged_value import TaggedValue, plain
from torchmn.experiment.neon.keys.decisions import Keys
from torchmn.experiment.neon.keys.rule_types import rule_type


def check_keys(root: TaggedValue, kinds: Mapping[str, Mapping[str, Keys]], anchor_keys: tuple[str, ...]) -> list[str]:
    """Checks all keys of an experiment.

    Args:
        root: the experiment.
        kinds: `tables.KEYS`.
        anchor_keys: keys of an experiment in which neon's files define anchors.

    Returns:
        A line for each key without effect.

    Raises:
        ExperimentError: for a key that is unsupported or unknown.
    """
    checker = _KeyChecker({name: keys for group in kinds.values() for name, keys in group.items()}, anchor_keys)
    checker.experiment(root)
    return checker.notes()


class _KeyChecker:
    def __init__(self, tables: Mapping[str, Keys], anchor_keys: tuple[str, ...]):
        self.tables, self.anchor_keys = tables, anchor_keys
        self.seen: set[int] = set()
        self.places: dict[tuple[str, str], list[str]] = {}

    def experiment(self, root: TaggedValue) -> None:
        table = self.tables[root.name] if root.kind else self.tables["FitPredictErrorExperiment"]
        known = {key: value for key, value in root.items() if key in table.all}
        reached = {id(tagged) for value in known.values() for tagged in _subtree(value)}
        for key, value in root.items():
            if key not in known and value.value is not None and not any(id(s) in reached for s in _subtree(value)):
                if key not in self.anchor_keys:
                    raise ExperimentError(
                        f"{value.where}: {root.kind or 'the experiment'} has no key {key!r}, and no alias refers to "
                        f"it. {nearest(key, (*table.all, *self.anchor_keys))}"
                    )
                self.note(key, "no alias refers to it", value)
        self.visit(TaggedValue(known, root.where, root.kind), "FitPredictErrorExperiment")

    def visit(self, tagged: TaggedValue, role: str) -> None:
        """Checks the keys of a value, and of the values of keys that are read or checked."""
        if isinstance(tagged.value, list):
            for item in tagged.value:
                self.visit(item, role)
        if not isinstance(tagged.value, dict) or id(tagged) in self.seen:
            return
        self.seen.add(id(tagged))
        table = self.tables.get(tagged.name or role)
        if table is None:
            return  # the converter rejects the class, or checks the values itself
        for key, value in tagged.items():
            if value.value is not None:
                owner = tagged.kind or role.partition(" of ")[0]
                newer = table.replaced.get(key)
                if newer is not None and tagged.get(newer) is not None:
                    self.note(key, f"{newer} replaces it", value)
                else:
                    self.check(owner, key, value, table)
        for key in (*table.read, *table.checked):
            if (value := tagged.get(key)) is not None:
                self.visit(value, _role(tagged, key, value))

    def check(self, owner: str, key: str, value: TaggedValue, table: Keys) -> None:
        if key in table.ignored:
            self.note(key, table.ignored[key], value)
        elif key in table.refused:
            raise ExperimentError(f"{value.where}: {owner}: the key {key!r} is not supported: {table.refused[key]}")
        elif key in table.only:
            only, stated = table.only[key], value.kind or plain(value)
            if stated in only.replaced:
                self.note(key, only.note, value)
            elif stated not in only.values:
                raise ExperimentError(
                    f"{value.where}: {owner}: {key} is supported as {' or '.join(map(str, only.values))} only, got "
                    f"{str(plain(value))[:60]}: {only.reason}"
                )
        elif key not in table.all:
            known = (*table.read, *table.checked, *table.only) or table.all
            raise ExperimentError(f"{value.where}: {owner} has no key {key!r}. {nearest(key, known)}")

    def note(self, key: str, reason: str, value: TaggedValue) -> None:
        places = self.places.setdefault((key, reason), [])
        if value.where not in places:
            places.append(value.where)

    def notes(self) -> list[str]:
        more = {1: "", 2: " (and in one more place)"}
        return [
            f"{places[0]}: {key} has no effect: {reason}"
            f"{more.get(len(places), f' (and in {len(places) - 1} more places)')}"
            for (key, reason), places in self.places.items()
        ]


def _subtree(tagged: TaggedValue) -> Iterator[TaggedValue]:
    """Yields a value and all values inside it, each once."""
    waiting, seen = [tagged], {id(tagged)}
    while waiting:
        value = waiting.pop()
        yield value
        items = value.value.values() if isinstance(value.value, dict) else value.value
        for item in items if isinstance(value.value, dict | list) else ():
            if id(item) not in seen:
                seen.add(id(item))
                waiting.append(item)


def _role(tagged: TaggedValue, key: str, value: TaggedValue) -> str:
    """Returns the name of a plain mapping in `tables.KEYS`."""
    if key == "lr_params":
        return f"lr_params of {rule_type(tagged)}"
    if key in ("momentum_params", "momentum"):
        return f"momentum_params of {value.plain('type', 'constant')}"
    if key == "weight_init":
        return f"weight_init of {value.plain('type', 'uniform')}"
    if key in ("learning_rule", "brule_init"):
        return "lrule_init"
    return "metrics" if key == "epoch_metrics" else key
