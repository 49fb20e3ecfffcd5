"""Writes an experiment as a YAML file that is easy to read: one line per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from torchmn.experiment.file.document import Dumper

COMPOSITE = ("list", "sequence", "branch")
"""Layers that contain layers. Elsewhere, `layers` may be a number (lstm), and a list may be an option (reshape)."""


def as_yaml(values: Mapping[str, object]) -> str:
    """Returns the text of an experiment file with these values, which `load` can read."""
    lines = []
    for key, value in values.items():
        if key == "model" and isinstance(value, dict):
            lines += ["model:", *_model(value)]
        else:
            lines.append(f"{key}: {_flow(value)}")
    return "\n".join(lines) + "\n"


def _model(model: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in model.items():
        if key == "layers":
            lines += ["  layers:", *_layers(value, "    ")]
        elif key == "cost" and isinstance(value, list):
            lines += ["  cost:", *(f"    - {_flow(cost)}" for cost in value)]
        else:
            lines.append(f"  {key}: {_flow(value)}")
    return lines


def _layers(layers: list[Any], indent: str) -> list[str]:
    lines = []
    for layer in layers:
        kind, options = next(iter(layer.items())) if isinstance(layer, dict) else (layer, {})
        inner = options.get("layers") if isinstance(options, dict) else options
        if isinstance(inner, list) and kind in COMPOSITE:
            lines += [f"{indent}- {kind}:", f"{indent}    layers:", *_layers(inner, f"{indent}      ")]
            others = {k: v for k, v in options.items() if k != "layers"} if isinstance(options, dict) else {}
            lines += [f"{indent}    {key}: {_flow(value)}" for key, value in others.items()]
        else:
            lines.append(f"{indent}- {kind}{f': {_flow(options)}' if options else ''}")
    return lines


def _flow(value: object) -> str:
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return text.strip().removesuffix("\n...").removesuffix("...").strip()
