"""The metrics and predictions of a neon experiment, by split."""

from __future__ import annotations

from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.tagged_value import TaggedValue, at, plain
from torchmn.experiment.neon.terms.values import METRICS, one_of

# neon's metrics for a file without any.
DEFAULT_METRIC = "misclassified_percentage"


def metrics_of(
    experiment: TaggedValue, model: TaggedValue, dataset: TaggedValue, units: tuple[int, int] | None, notes: list[str]
) -> dict[str, list[TaggedValue]] | None:
    """Returns the metrics of each split; neon's metrics at the end and after each epoch are combined."""
    by_split: dict[str, dict[str, TaggedValue]] = {}
    at_end = None if experiment.name == "FitExperiment" else experiment.get("metrics") or _inference_metrics(experiment)
    for found in (at_end, model.get("epoch_metrics")):
        for split, group in found.items() if found is not None else ():
            if split not in _splits(dataset):
                notes.append(f"{group.where}: metrics of {split} have no effect: there are no such samples")
                continue
            for metric in group.value if isinstance(group.value, list) else [group]:
                name, rank = one_of(METRICS, metric, "the metric"), metric.plain("error_rank", 1)
                options: dict[str, Any] = {"top": rank} if rank != 1 else {}
                if units is not None:
                    options["units"] = list(units)
                    options |= {"outputs": "probabilities"} if name.startswith("log_loss") else {}
                value = at(metric.where, {"name": name, **options} if options else name)
                by_split.setdefault(split, {}).setdefault(f"{name} {rank}", value)
    return {split: list(metrics.values()) for split, metrics in by_split.items()} or None


def default_metrics(
    experiment: TaggedValue,
    model: dict[str, Any],
    dataset: TaggedValue,
    units: tuple[int, int] | None,
    notes: list[str],
) -> dict[str, list[Any]] | None:
    """Returns the metrics of FitPredictErrorExperiment, unless metrics are given or the targets are not classes."""
    given = experiment.get("metrics") is not None or experiment.name == "FitExperiment"
    if given or model.get("target") == "inputs" or dataset.plain("name") in ("housing", "sparsenet"):
        return None
    metric = {"name": DEFAULT_METRIC, "units": list(units)} if units else DEFAULT_METRIC
    missing = [split for split in _inference_splits(experiment) if split not in _splits(dataset)]
    if missing:
        found = experiment.get("inference_sets") or experiment
        notes.append(f"{found.where}: inference_sets has no effect for {missing[0]}: there are no such samples")
    return {split: [metric] for split in _inference_splits(experiment) if split not in missing}


def predictions_of(experiment: TaggedValue, dataset: TaggedValue, notes: list[str]) -> list[str] | None:
    found = experiment.get("predictions")
    if found is None or experiment.name == "FitExperiment":
        return None
    splits = [plain(found)] if isinstance(plain(found), str) else plain(found)
    if not isinstance(splits, list):
        raise ExperimentError(f"{found.where}: expected predictions to be a list of splits, got {str(splits)[:60]!r}")
    missing = [split for split in splits if split not in _splits(dataset)]
    if missing:
        notes.append(f"{found.where}: predictions of {missing[0]} have no effect: there are no such samples")
    return [split for split in splits if split not in missing] or None


def _inference_splits(experiment: TaggedValue) -> list[str]:
    """Returns the splits of `inference_sets`; by default both."""
    found = experiment.get("inference_sets")
    splits = ["train", "test"] if found is None else plain(found)
    splits = [splits] if isinstance(splits, str) else splits
    if found is not None and (not isinstance(splits, list) or not all(isinstance(split, str) for split in splits)):
        raise ExperimentError(f"{found.where}: expected inference_sets to be a list of splits, got {str(splits)[:60]}")
    return splits


def _inference_metrics(experiment: TaggedValue) -> TaggedValue | None:
    """Returns the `metrics` that `inference_metrics` and `inference_sets` stand for."""
    found = experiment.get("inference_metrics")
    return None if found is None else at(found.where, dict.fromkeys(_inference_splits(experiment), found))


def _splits(dataset: TaggedValue) -> tuple[str, ...]:
    splits = ["train"]
    if dataset.get("validation") is not None:
        splits.append("validation")
    if dataset.plain("name") != "images":  # neon's Imageset has no test samples
        splits.append("test")
    return tuple(splits)
