"""`images`: image files in one folder per class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from torchmn.datasets import cache
from torchmn.datasets.arrays import Arrays, labels
from torchmn.datasets.formats.files import entries_of, expanded, open_regular, reading, size_of
from torchmn.errors import DatasetError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".webp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "WEBP", "TIFF")
"""Names of Pillow. It recognizes the content, and has formats that start other programs."""
MODES = {1: "L", 3: "RGB"}
MOST_PIXELS = 1 << 24
"""Of an image; of a larger one, if its file is large enough for real pixels."""
PIXELS_PER_BYTE = 64


def images(
    root: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    classes: tuple[str, ...] = (),
) -> Arrays:
    """Returns the images in the folders of `root`; each folder is a class, in the order of their names.

    Args:
        root: directory with a folder for each class.
        size: (height, width) to which images are resized; None if all have the same size.
        channels: 1 for grey, 3 for RGB.
        classes: names of the classes, if another split has determined them; by default the names of the folders.

    Returns:
        Inputs (count, channels, height, width), bytes, and labels (count,).

    Raises:
        DatasetError: if there are no images, an image cannot be read, sizes differ, or a folder is not a class.
    """
    root = expanded(root)
    found = class_folders(root)
    names = classes or tuple(folder.name for folder in found)
    unknown = [folder.name for folder in found if folder.name not in names]
    if unknown:
        raise DatasetError(
            f"{root}: the folder {unknown[0]!r} is not a class of the training images: {', '.join(names)}."
        )
    files = [(path, names.index(folder.name)) for folder in found for path in image_files(folder)]
    if not files:
        raise DatasetError(f"no images in the folders of {str(root)!r}; looked for {', '.join(ENDINGS)}.")
    paths = [path for path, _ in files]
    key = cache.digest(paths, "images", size, channels)
    pixels = cache.cached(key, lambda: np.stack(_same_size([_decoded(path, size, channels) for path in paths], paths)))
    return Arrays(f"images {root.name}", pixels, labels([label for _, label in files]), 1 / 255, names)


def class_folders(root: Path) -> list[Path]:
    """Returns the folders of the classes, sorted by name, without hidden ones."""
    if not os.path.isdir(root):
        raise DatasetError(f"{str(root)!r} is not a folder; expected one folder of images for each class in it.")
    folders = [path for path in entries_of(root) if os.path.isdir(path) and not path.name.startswith(".")]
    if not folders:
        raise DatasetError(f"{str(root)!r} contains no folders; expected one folder of images for each class.")
    return folders


def image_files(folder: Path) -> list[Path]:
    """Returns the image files in a folder, sorted by name."""
    return [path for path in entries_of(folder) if path.suffix.lower() in ENDINGS]


def _decoded(path: Path, size: tuple[int, int] | None, channels: int) -> np.ndarray:
    image: Any
    try:
        from PIL import Image
    except ImportError as error:
        raise DatasetError(f"{path.name}: reading images needs Pillow: pip install pillow") from error
    with reading(path, "an image"), open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
        most = max(MOST_PIXELS, size_of(file) * PIXELS_PER_BYTE)
        if image.width * image.height > most:
            raise DatasetError(
                f"{path}: this image announces {image.height} x {image.width} pixels: expected at most {most} of a "
                f"file of {size_of(file)} bytes."
            )
        image = image.convert(MODES[channels])
        if size is not None and image.size != (size[1], size[0]):
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _same_size(decoded: list[np.ndarray], paths: list[Path]) -> list[np.ndarray]:
    for image, path in zip(decoded, paths, strict=True):
        if image.shape != decoded[0].shape:
            first, here = (f"{a.shape[1]} x {a.shape[2]}" for a in (decoded[0], image))
            raise DatasetError(
                f"{path}: this image is {here}, but {paths[0].name} is {first}. Pass the size for all images."
            )
    return decoded
