"""Entries of a checkpoint: the state dicts of objects, flattened to save them, and checked before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchmn.errors import nearest
from torchmn.parallel.global_state import GlobalModelState
from torchmn.training.checkpoint import random_states
from torchmn.training.checkpoint.manifest import CheckpointError
from torchmn.training.checkpoint.state_tree import Flattener

EXTRA = "extra"
ITERATOR = "iterator"
_RESERVED = ("step", "from_rank")  # arguments of maybe_load
_SHOWN = 5  # problems in a message
# Keys of parameter groups that do not depend on the class of the optimizer.
_OF_NEWER_TORCH = {"maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


def objects_problem(objects: Mapping[str, Any], method: str) -> str | None:
    """Returns why these keyword arguments cannot be saved or loaded with `method`, or None."""
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
    """Returns the tree of each entry, and the tensors of all by path; raises `Unstorable`, naming the path."""
    flattener = Flattener()
    trees: dict[str, Any] = {}
    for name in sorted(objects):
        try:
            state = objects[name].state_dict()
        except Exception as error:  # user code may raise anything
            raise CheckpointError(f"{name}: state_dict: {type(error).__name__}: {error}") from error
        trees[name] = {"state": flattener.flatten(state, name)}
        shapes = parameter_shapes(objects[name])
        if shapes is not None:
            trees[name]["parameter shapes"] = shapes
    for name, state in {EXTRA: extra, **random}.items():
        trees[name] = {"state": flattener.flatten(state, name)}
    return trees, flattener.tensors


def parameter_shapes(obj: Any) -> list[list[list[int]]] | None:
    """Returns the shapes of an optimizer's parameters, by group; torch's `load_state_dict` does not compare them."""
    groups = getattr(obj, "param_groups", None)
    if isinstance(obj, nn.Module) or not isinstance(groups, list):
        return None
    return [[list(p.shape) for p in group["params"]] for group in groups]


def is_user_entry(name: str) -> bool:
    """Returns whether an entry is an object passed by keyword, not `extra` or a random state."""
    return name != EXTRA and not name.startswith(random_states.PREFIX)


def unknown_problem(objects: Mapping[str, Any], entries: Mapping[str, Any]) -> str | None:
    """Returns an error message if the checkpoint lacks one of the objects to load, or None."""
    saved = [name for name in entries if is_user_entry(name)]
    for name in sorted(objects):
        if name not in saved:
            return f"the checkpoint has no {name!r}. " + (nearest(name, saved) if saved else "It contains no objects.")
    return None


def fit_problem(name: str, obj: Any, state: Any, tree: Mapping[str, Any]) -> str | None:
    """Returns why the saved `state` does not fit `obj`, by tensor, or None."""
    problems = _module_problems(obj, state) if isinstance(obj, nn.Module) else _optimizer_problems(obj, state, tree)
    if not problems:
        return None
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    lines = "\n".join(f"  {problem}" for problem in problems[:_SHOWN] + more)
    return f"{name!r} does not fit the checkpoint (nothing was loaded):\n{lines}"


def load(obj: Any, state: Any) -> None:
    """Loads `state` into `obj`, bit for bit: 0-d tensors of an optimizer keep the dtype of the checkpoint.

    torch's `load_state_dict` casts them to the dtype of the parameter. NAdam, for example, would then continue with
    another precision than the run that was saved.
    """
    obj.load_state_dict(state)
    if not isinstance(obj, Optimizer):
        return
    saved_keys = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in obj.param_groups)
    for saved_key, parameter in zip(saved_keys, parameters, strict=True):
        saved, loaded = state["state"].get(saved_key, {}), obj.state.get(parameter, {})
        for name, x in saved.items():
            cast = loaded.get(name)
            if isinstance(x, Tensor) and isinstance(cast, Tensor) and x.dim() == cast.dim() == 0:
                loaded[name] = cast if cast.dtype == x.dtype else x.to(cast.device)


def copied_keys(obj: Any) -> list[str]:
    """Returns the keys of tensors in a state that `load` copies: the parameters and buffers of modules.

    Other objects, and the extra state of a module, may keep the tensors that they load.
    """
    module = obj.model if isinstance(obj, GlobalModelState) else obj
    if not isinstance(module, nn.Module):
        return []
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


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
    """Returns differences that torch's optimizers do not check in `load_state_dict`; none for other objects."""
    saved, here = tree.get("parameter shapes"), parameter_shapes(obj)
    if saved is None or here is None:
        return []
    class_problem = _class_problem(obj, state)
    if class_problem:
        return [class_problem]
    if [len(group) for group in saved] != [len(group) for group in here]:
        counts = ["+".join(str(len(group)) for group in groups) for groups in (saved, here)]
        return [f"parameters in groups: saved {counts[0]}, expected here {counts[1]}"]
    return [
        f"parameter {number} of group {group}: saved {tuple(saved_shape)}, expected here {tuple(shape)}"
        for group, (saved_shapes, shapes) in enumerate(zip(saved, here, strict=True))
        for number, (saved_shape, shape) in enumerate(zip(saved_shapes, shapes, strict=True))
        if saved_shape != shape
    ]


def _class_problem(optimizer: Any, state: Any) -> str | None:
    """Returns an error message if the keys of the groups show that an optimizer of another class was saved, or None."""
    needed = {*(getattr(optimizer, "defaults", None) or {})}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
        missing, unknown = needed - {*saved} - _OF_NEWER_TORCH, {*saved} - {*group} - _OF_SCHEDULERS
        if missing and unknown:
            return (
                f"another kind of optimizer was saved, with {', '.join(sorted(unknown))} in its groups; expected here: "
                f"{', '.join(sorted(missing))}"
            )
    return None
