"""Tables of the decisions in Markdown, for docs/from-neon.md."""

from __future__ import annotations

from collections.abc import Mapping

from torchmn.experiment.neon.keys.decisions import Keys


def ignored_table(kinds: Mapping[str, Mapping[str, Keys]]) -> str:
    """Returns the keys without effect and the reasons as a Markdown table, for docs/from-neon.md."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for group, tables in kinds.items():
        for name, keys in tables.items():
            values = {
                key: f"{', '.join(map(str, only.replaced))}: {only.note}"
                for key, only in keys.only.items()
                if only.note
            }
            for key, reason in (*keys.ignored.items(), *values.items()):
                found.setdefault((key, reason), {}).setdefault(group, []).append(name)
    rows: dict[tuple[str, str], list[str]] = {}
    for (key, reason), groups in found.items():
        owners = [
            group if len(names) > 3 else ", ".join(f"`{name}`" for name in names) for group, names in groups.items()
        ]
        rows.setdefault((", ".join(owners), reason), []).append(f"`{key}`")
    lines = ["| key | of | reason |", "|---|---|---|"]
    return "\n".join(lines + [f"| {', '.join(keys)} | {of} | {reason} |" for (of, reason), keys in rows.items()])


def used_table(kinds: Mapping[str, Mapping[str, Keys]]) -> str:
    """Returns for each class the keys that are used, and those that are an error, as a Markdown table."""
    rows: dict[tuple[str, str], list[str]] = {}
    for tables in kinds.values():
        for name, keys in tables.items():
            used = (*keys.read, *keys.checked, *(key for key, only in keys.only.items() if not only.note))
            errors = (f"`{key}`: {reason}" for key, reason in keys.refused.items())
            columns = ", ".join(f"`{key}`" for key in sorted(used)), "; ".join(errors)
            if any(columns):
                rows.setdefault(columns, []).append(f"`{name}`")
    lines = ["| class or mapping | used | error |", "|---|---|---|"]
    return "\n".join(lines + [f"| {', '.join(names)} | {used} | {errors} |" for (used, errors), names in rows.items()])
