"""Entries of a checkpoint: an object's `state_dict` on its way out, and back in with checks that name the tensor."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchmn.errors import nearest
from torchmn.training.checkpoint import random_states
from torchmn.training.checkpoint.manifest import CheckpointError
from torchmn.training.checkpoint.state_tree import Flattener

EXTRA = "extra"
ITERATOR = "iterator"
_RESERVED = ("step", "from_rank")  # of maybe_load
_SHOWN = 5
# Values of a group that say nothing of the optimizer's class.
_OF_NEWER_TORCH = {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


def objects_problem(objects: Mapping[str, Any], method: str) -> str | None:
    """Why these keyword arguments can not be saved or loaded with `method`, or None."""
    for name, obj in objects.items():
        if not name.isidentifier() or name in _RESERVED:
            return f"expected keywords that are identifiers, and none of {', '.join(_RESERVED)}, got {name!r}"
        if not callable(getattr(obj, method, None)):
            return (
                f"expected {name}= to have a method {method}, got an object of type {type(obj).__name__}"
                + (": save plain values with extra={...}" if method == "state_dict" else "")
                + (": after loading they are in checkpointer.extra" if name == EXTRA else "")
            )
    return None


def flattened(
    objects: Mapping[str, Any], extra: Any, random: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The tree of each entry, and the tensors of all; raises `Unstorable`, naming the path."""
    flattener = Flattener()
    trees: dict[str, Any] = {}
    for name in sorted(objects):
        try:
            state = objects[name].state_dict()
        except Exception as error:  # it is the user's, and may raise anything
            raise CheckpointError(f"{name}: state_dict: {type(error).__name__}: {error}") from error
        trees[name] = {"state": flattener.flatten(state, name)}
        shapes = parameter_shapes(objects[name])
        if shapes is not None:
            trees[name]["parameter shapes"] = shapes
    for name, state in {EXTRA: extra, **random}.items():
        trees[name] = {"state": flattener.flatten(state, name)}
    return trees, flattener.tensors


def parameter_shapes(obj: Any) -> list[list[list[int]]] | None:
    """The shapes of an optimizer's parameters, by group: `load_state_dict` of torch does not compare them."""
    groups = getattr(obj, "param_groups", None)
    if isinstance(obj, nn.Module) or not isinstance(groups, list):
        return None
    return [[list(p.shape) for p in group["params"]] for group in groups]


def is_user_entry(name: str) -> bool:
    """Whether an entry was passed by keyword (and is no extra, no random state)."""
    return name != EXTRA and not name.startswith(random_states.PREFIX)


def unknown_problem(objects: Mapping[str, Any], entries: Mapping[str, Any]) -> str | None:
    """Which of the objects to load the checkpoint does not have, or None."""
    saved = [name for name in entries if is_user_entry(name)]
    for name in sorted(objects):
        if name not in saved:
            return f"the checkpoint has no {name!r}. " + (
                nearest(name, saved) if saved else "It has no objects at all."
            )
    return None


def fit_problem(name: str, obj: Any, state: Any, tree: Mapping[str, Any]) -> str | None:
    """Why the saved `state` can not be loaded into `obj`, tensor by tensor, or None."""
    problems = _module_problems(obj, state) if isinstance(obj, nn.Module) else _optimizer_problems(obj, state, tree)
    if not problems:
        return None
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    lines = "\n".join(f"  {problem}" for problem in problems[:_SHOWN] + more)
    return f"{name!r} is not what was saved (nothing was loaded):\n{lines}"


def load(obj: Any, state: Any) -> None:
    """Load `state` into `obj`, bit for bit: single numbers of an optimizer's state keep the dtype of the checkpoint.

    `load_state_dict` of torch's optimizers turns them into the parameter's, and NAdam for one then goes on with
    another precision: in a parameter of float64, with products of momenta that were rounded to float32 before.
    """
    obj.load_state_dict(state)
    if not isinstance(obj, Optimizer):
        return
    places = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in obj.param_groups)
    for place, parameter in zip(places, parameters, strict=True):
        saved, here = state["state"].get(place, {}), obj.state.get(parameter, {})
        for key, number in saved.items():
            now = here.get(key)
            if isinstance(number, Tensor) and isinstance(now, Tensor) and number.dim() == now.dim() == 0:
                here[key] = now if now.dtype == number.dtype else number.to(now.device)


def _module_problems(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    problems = []
    current = module.state_dict()
    for key, x in current.items():
        if key not in state:
            problems.append(f"{key}: not in the checkpoint")
        elif isinstance(x, Tensor) and isinstance(state[key], Tensor) and not is_lazy(x):
            here, saved = (x.dtype, tuple(x.shape)), (state[key].dtype, tuple(state[key].shape))
            if here != saved:
                problems.append(f"{key}: saved {saved[1]} {saved[0]}, expected here {here[1]} {here[0]}")
    return problems + [f"{key}: in the checkpoint, but not here" for key in state if key not in current]


def _optimizer_problems(obj: Any, state: Any, tree: Mapping[str, Any]) -> list[str]:
    """What `load_state_dict` of torch's optimizers does not look at; nothing of other objects."""
    saved, here = tree.get("parameter shapes"), parameter_shapes(obj)
    if saved is None or here is None:
        return []
    other_kind = _other_kind(obj, state)
    if other_kind:
        return [other_kind]
    if [len(group) for group in saved] != [len(group) for group in here]:
        counts = ["+".join(str(len(group)) for group in groups) for groups in (saved, here)]
        return [f"parameters in groups: saved {counts[0]}, expected here {counts[1]}"]
    return [
        f"parameter {place} of group {group}: saved {tuple(one)}, expected here {tuple(other)}"
        for group, (ones, others) in enumerate(zip(saved, here, strict=True))
        for place, (one, other) in enumerate(zip(ones, others, strict=True))
        if one != other
    ]


def _other_kind(optimizer: Any, state: Any) -> str | None:
    """Whether an optimizer of another class was saved: one with other values in its groups."""
    needed = {*(getattr(optimizer, "defaults", None) or {})}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        missing, unknown = needed - {*saved} - _OF_NEWER_TORCH, {*saved} - {*group} - _OF_SCHEDULERS
        if missing and unknown:
            return (
                f"another kind of optimizer was saved, with {', '.join(sorted(unknown))} in its groups, where "
                f"expected here are {', '.join(sorted(missing))}"
            )
    return None
