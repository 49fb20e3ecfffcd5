"""TorchMN: PyTorch across processes and machines, with the same numbers at any number of ranks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmn import data, datasets, experiment, functions, geometry, graph, iterators, models, nn, optim, training
    from torchmn.communicators.communicator import Communicator
    from torchmn.communicators.creation.create import create_communicator
    from torchmn.communicators.creation.default_group import init_process_group
    from torchmn.communicators.creation.run_threads import run_threads
    from torchmn.communicators.process_grid import ProcessGrid
    from torchmn.data import create_empty_dataset, scatter_dataset, scatter_index
    from torchmn.errors import (
        ArgumentError,
        ComponentError,
        DelegateError,
        ExperimentError,
        GraphError,
        HaloError,
        LaunchError,
        MismatchError,
        ParallelizeError,
        PeerError,
        RecomputeError,
        ThreadError,
        TorchMNError,
        WaitTimeout,
    )
    from torchmn.functions.halo.global_array import GlobalArray
    from torchmn.graph import MultiNodeChainList, describe, draw
    from torchmn.nn import create_mnbn_model
    from torchmn.optim import create_multi_node_optimizer
    from torchmn.parallel import (
        clip_grad_norm_,
        full_state_dict,
        load_full_state_dict,
        parallel_summary,
    )
    from torchmn.parallel.parallelize import parallelize  # for mypy, torchmn.parallel.parallelize is the module
    from torchmn.training import create_multi_node_evaluator, load_weights
    from torchmn.training.checkpoint import create_multi_node_checkpointer

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Communicator",
    "ComponentError",
    "DelegateError",
    "ExperimentError",
    "GlobalArray",
    "GraphError",
    "HaloError",
    "LaunchError",
    "MismatchError",
    "MultiNodeChainList",
    "ParallelizeError",
    "PeerError",
    "ProcessGrid",
    "RecomputeError",
    "ThreadError",
    "TorchMNError",
    "WaitTimeout",
    "__version__",
    "clip_grad_norm_",
    "create_communicator",
    "create_empty_dataset",
    "create_mnbn_model",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "data",
    "datasets",
    "describe",
    "draw",
    "experiment",
    "full_state_dict",
    "functions",
    "geometry",
    "graph",
    "init_process_group",
    "iterators",
    "load_full_state_dict",
    "load_weights",
    "models",
    "nn",
    "optim",
    "parallel_summary",
    "parallelize",
    "run_threads",
    "scatter_dataset",
    "scatter_index",
    "training",
]

# Modules of the public names, which are imported on first use: `torchmn run` and `torchmn --help` import this package,
# too, and must not wait for torch.
_SUBPACKAGES = (
    *("data", "datasets", "experiment", "functions", "geometry", "graph", "iterators", "models", "nn", "optim"),
    "training",
)
_MODULES = {
    "Communicator": "communicators.communicator",
    "create_communicator": "communicators.creation.create",
    "init_process_group": "communicators.creation.default_group",
    "run_threads": "communicators.creation.run_threads",
    "create_empty_dataset": "data",
    "scatter_dataset": "data",
    "scatter_index": "data",
    **dict.fromkeys((name for name in __all__ if name.endswith("Error") or name == "WaitTimeout"), "errors"),
    "create_mnbn_model": "nn",
    "create_multi_node_optimizer": "optim",
    "GlobalArray": "functions.halo.global_array",
    "MultiNodeChainList": "graph",
    "ProcessGrid": "communicators.process_grid",
    "describe": "graph",
    "draw": "graph",
    "clip_grad_norm_": "parallel",
    "full_state_dict": "parallel",
    "load_full_state_dict": "parallel",
    "load_weights": "training",
    "parallel_summary": "parallel",
    "parallelize": "parallel",
    "create_multi_node_evaluator": "training",
    "create_multi_node_checkpointer": "training.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in (*_SUBPACKAGES, "testing"):
        return import_module(f"torchmn.{name}")
    if name not in _MODULES:
        from torchmn.other_spellings import module_name

        value_of = None if name.startswith("_") else module_name(name)  # Python and its tools look up such names often
        if value_of is not None:
            return value_of()
        raise AttributeError(f"torchmn has no {name!r}. {_advice(name)}")
    value = getattr(import_module(f"torchmn.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def _advice(name: str) -> str:
    """Returns where a name is instead, or similar names."""
    from torchmn.errors import nearest
    from torchmn.other_spellings import advice_for

    if not name.startswith("_"):
        instead = advice_for(name)
        if instead is not None:
            return f"Instead: {instead}."
        for package in _SUBPACKAGES:
            if name in getattr(import_module(f"torchmn.{package}"), "__all__", ()):
                return f"It is torchmn.{package}.{name}."
    return nearest(name, __all__)


def __dir__() -> list[str]:
    return __all__
