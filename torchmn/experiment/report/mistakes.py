"""Which classes are taken for which, and the surest mistakes."""

from __future__ import annotations

from html import escape

import numpy as np

from torchmn.datasets import Arrays
from torchmn.experiment.report.pictures import data_uri

MOST_CLASSES, MOST_MISTAKES = 30, 18


def confusion(outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """How many samples of each class (row) were taken for each class (column)."""
    classes = outputs.shape[1]
    counts = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(counts, (targets, outputs.argmax(axis=1)), 1)
    return counts


def confusion_table(counts: np.ndarray, names: tuple[str, ...]) -> str:
    """The matrix as a table whose cells are the stronger coloured the more samples they have."""
    labels = [names[k] if k < len(names) else str(k) for k in range(len(counts))]
    head = "".join(f"<th>{escape(label)}</th>" for label in labels)
    rows = []
    for k, label in enumerate(labels):
        total = max(int(counts[k].sum()), 1)
        cells = "".join(
            f'<td class="{"right" if j == k else "wrong"}" style="--share:{counts[k, j] / total:.3f}">'
            f"{counts[k, j] or ''}</td>"
            for j in range(len(labels))
        )
        rows.append(f"<tr><th>{escape(label)}</th>{cells}</tr>")
    return (
        '<div class="scroll"><table class="confusion"><caption>rows: what it is; columns: what it was taken for'
        f"</caption><tr><th></th>{head}</tr>{''.join(rows)}</table></div>"
    )


def surest_mistakes(data: Arrays, outputs: np.ndarray, targets: np.ndarray) -> str:
    """Pictures of the wrong samples whose wrong class had the largest lead over the right one."""
    predicted = outputs.argmax(axis=1)
    wrong = np.flatnonzero(predicted != targets)
    lead = outputs[wrong, predicted[wrong]] - outputs[wrong, targets[wrong]]
    chosen = wrong[np.argsort(-lead)][:MOST_MISTAKES]
    is_image = len(data.shape) == 3 and data.shape[0] in (1, 3)
    if not len(chosen):
        return "<p>No mistakes.</p>"
    names = data.classes
    items = []
    for row in chosen:
        right, taken = (names[k] if k < len(names) else str(k) for k in (int(targets[row]), int(predicted[row])))
        picture = ""
        if is_image:
            image = data.take(np.array([row]))[0][0].numpy()
            picture = f'<img alt="" src="{data_uri(image)}">'
        items.append(f"<li>{picture}<span>{escape(right)} → {escape(taken)}</span></li>")
    about = f"<p>The surest of {len(wrong)} mistakes (what it is → what it was taken for):</p>"
    return f'{about}<ul class="mistakes">{"".join(items)}</ul>'
