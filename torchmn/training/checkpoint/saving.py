"""Saving: every rank says what it has, each thing is written once per disk, and then all of it appears at once."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from torchmn.training.checkpoint import entries, manifest, random_states, tensor_files
from torchmn.training.checkpoint.errors import CheckpointError
from torchmn.training.checkpoint.manifest import Contribution, Manifest
from torchmn.training.checkpoint.names import Place
from torchmn.training.checkpoint.site import Site

_log = logging.getLogger(__name__)


def save_step(site: Site, keep: int | None, step: int, extra: Any, objects: Mapping[str, Any]) -> None:
    """Save one checkpoint, then remove those that are not among the newest `keep` any more."""
    comm, library = site.comm, site.library
    random = random_states.capture(comm.device)
    tensors: dict[str, Tensor] = {}

    def contribute() -> tuple[Contribution, int, str]:
        trees, found = entries.flattened(objects, extra, random)
        tensors.update(found)
        digests = {path: tensor_files.digest(x) for path, x in tensors.items()}
        mine = Contribution({name: json.dumps(tree) for name, tree in trees.items()}, digests)
        return mine, library.last_number(), secrets.token_hex(8)

    told = comm.attempt("save", contribute, raises=CheckpointError)
    place = Place(max(number for _, number, _ in told) + 1, step)
    _write(site, place, told[0][2], [contribution for contribution, _, _ in told], tensors)
    _remove_old(site, keep)


def _write(
    site: Site, place: Place, identity: str, contributions: list[Contribution], tensors: Mapping[str, Tensor]
) -> None:
    """Write the new checkpoint on all disks; what was begun is removed if that fails on one of them."""
    comm, library, ranks = site.comm, site.library, site.disk_ranks
    where = manifest.tensors_on(ranks, contributions)
    begun = False

    def begin() -> None:
        nonlocal begun
        if site.leads:
            library.begin(place)
            begun = True

    def write() -> dict[str, int]:
        return library.write(place, manifest.files_of(comm.rank, ranks, where), tensors)

    def finish() -> None:
        if site.leads:
            trees = manifest.entries_on(ranks, contributions)
            about = (library.name, place.step, place.number, identity, comm.size, ranks)
            library.finish(place, Manifest(*about, trees, where, files))

    try:
        comm.attempt("save", begin, raises=CheckpointError)
        sizes = comm.attempt("save", write, raises=CheckpointError)
        files = {file: size for rank in ranks for file, size in sizes[rank].items()}
        comm.attempt("save", finish, raises=CheckpointError)
    except CheckpointError:
        if begun:
            with suppress(OSError):
                library.abandon(place)
        raise


def _remove_old(site: Site, keep: int | None) -> None:
    """Remove the checkpoints that all disks have, except for the newest `keep`.

    One that another disk lacks stays, because it does not count: it may be all that is left of a run. A damaged one
    does not count either, and goes when it is older than all that stay.
    """
    broken: dict[Place, str] = {}

    def look() -> set | None:
        if not site.leads:
            return None
        whole, found = site.library.look()
        broken.update(found)
        return set(whole) - site.spoiled

    found = site.comm.attempt("save", look, raises=CheckpointError)
    everywhere = set.intersection(*(whole for whole in found if whole is not None))
    places = sorted(place for place, _ in everywhere)
    kept = places if keep is None else places[-keep:]
    if site.leads and kept:
        debris = [] if keep is None else [place for place in broken if place < kept[0]]
        try:
            site.library.remove([*places[: len(places) - len(kept)], *debris])
        except OSError as error:
            _log.warning("torchmn: rank %d: an old checkpoint can not be removed: %s", site.comm.rank, error)
