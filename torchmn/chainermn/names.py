"""All public names of ChainerMN 7.8.1, and what each is here. docs/from-chainermn.md shows this table."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torchmn.other_spellings import OtherName, advice, module_names

_MODULES = ("communicators", "extensions", "global_except_hook", "links", "optimizers")

_COMMUNICATOR = (
    *("rank", "size", "intra_rank", "intra_size", "inter_rank", "inter_size", "split", "finalize"),
    *("send", "recv", "bcast", "gather", "allgather", "alltoall", "scatter", "allreduce"),
    *("send_obj", "recv_obj", "bcast_obj", "gather_obj", "allreduce_obj", "bcast_data", "multi_node_mean_grad"),
)
_COMMUNICATOR_NOTES = {
    "split": "`color=None` for a rank in no group; settings are inherited",
    "send": "does not wait for the receiver",
    "bcast": "also tensors",
    "allreduce": "also `op`",
    "recv_obj": "with tag 0, or the tag that you pass; `status=` gets source and tag",
    "bcast_obj": "any object, `None` too; `max_buf_len` has no effect",
    "bcast_data": "parameters and buffers",
}

NAMES: tuple[OtherName, ...] = (
    # -- the package
    OtherName("create_communicator", "create_communicator", "`batched_copy` has no effect"),
    OtherName("CommunicatorBase", "Communicator"),
    OtherName("create_multi_node_optimizer", "create_multi_node_optimizer", "of an optimizer of torch"),
    OtherName("create_multi_node_evaluator", "create_multi_node_evaluator", "exact: weighted by samples"),
    OtherName("create_multi_node_checkpointer", "create_multi_node_checkpointer", "call `save` and `maybe_load`"),
    OtherName("scatter_dataset", "scatter_dataset", "`max_buf_len` has no effect"),
    OtherName("scatter_index", "scatter_index"),
    OtherName("MultiNodeChainList", "MultiNodeChainList"),
    OtherName("DataSizeError", "DataSizeError", "not raised: any size can be sent"),
    OtherName("global_except_hook.add_hook", "global_except_hook.add_hook", "always on; `TORCHMN_ABORT=0`: off"),
    # -- communicators
    OtherName("communicators.create_communicator", "create_communicator"),
    OtherName("communicators.CommunicatorBase", "Communicator"),
    *(
        OtherName(f"CommunicatorBase.{name}", f"Communicator.{name}", _COMMUNICATOR_NOTES.get(name, ""))
        for name in _COMMUNICATOR
    ),
    OtherName("CommunicatorBase.allreduce_grad", "Communicator.multi_node_mean_grad"),
    OtherName("CommunicatorBase.broadcast_data", "Communicator.bcast_data"),
    OtherName("CommunicatorBase.mpi_comm", "Communicator.mpi_comm", "over MPI"),
    OtherName("CommunicatorBase.set_config", "Communicator.set_config", "`batched_copy` has no effect"),
    OtherName("CommunicatorBase.get_config", "Communicator.get_config"),
    OtherName("CommunicatorBase.batched_copy", "Communicator.batched_copy", "True"),
    OtherName("CommunicatorBase.allreduce_grad_dtype", "Communicator.allreduce_grad_dtype"),
    OtherName("CommunicatorBase.within_config_scope", "Communicator.within_config_scope", "False"),
    OtherName(
        "CommunicatorBase.config_scope", note="pass settings to create_communicator(grad_dtype=..., timeout=...)"
    ),
    # -- functions
    OtherName("functions.send", "functions.send", "the delegate is a 0-d tensor"),
    OtherName("functions.recv", "functions.recv"),
    OtherName("functions.pseudo_connect", "functions.pseudo_connect", "one variable: a tensor that unpacks to itself"),
    *(
        OtherName(f"functions.{name}", f"functions.{name}")
        for name in ("bcast", "gather", "scatter", "allgather", "alltoall")
    ),
    # -- links
    OtherName("links.MultiNodeChainList", "links.MultiNodeChainList"),
    OtherName(
        "links.MultiNodeBatchNormalization",
        "links.MultiNodeBatchNormalization",
        "`communication_backend` has no effect",
    ),
    OtherName("links.create_mnbn_model", "links.create_mnbn_model", "`communication_backend` has no effect"),
    OtherName(
        "links.create_multi_node_n_step_rnn",
        "links.create_multi_node_n_step_rnn",
        "of `nn.RNN`, `nn.GRU`, `nn.LSTM`: the output comes first, the delegate last",
    ),
    # -- optimizers
    OtherName("optimizers.create_multi_node_optimizer", "optimizers.create_multi_node_optimizer"),
    OtherName("MultiNodeOptimizer.actual_optimizer", "MultiNodeOptimizer.actual_optimizer"),
    OtherName("MultiNodeOptimizer.communicator", note="its attribute `comm`"),
    OtherName("MultiNodeOptimizer.target_params", note="`param_groups`, as of torch's optimizers"),
    OtherName("MultiNodeOptimizer.zero_fill", note="it is an argument of create_multi_node_optimizer only"),
    OtherName("MultiNodeOptimizer.wait", note="flush(), which runs a step with the last gradients"),
    OtherName(
        "MultiNodeOptimizer.setup",
        note="give the parameters to torch's optimizer, torch.optim.SGD(model.parameters(), lr=0.1)",
    ),
    OtherName("MultiNodeOptimizer.update", note="call zero_grad(), loss.backward(), then step()"),
    OtherName("MultiNodeOptimizer.target", note="keep a reference to the model"),
    OtherName(
        "MultiNodeOptimizer.add_hook",
        note="weight_decay= of torch's optimizer; to clip, synchronize(), then clip_grad_norm_, then step()",
    ),
    # -- checkpointers
    OtherName("MultiNodeCheckpointer.save", "MultiNodeCheckpointer.save", "`save(step, model=model)`: no trainer"),
    OtherName("MultiNodeCheckpointer.maybe_load", "MultiNodeCheckpointer.maybe_load", "`maybe_load(model=model)`"),
    OtherName("MultiNodeCheckpointer.get_stats", note="time save() and wait() yourself"),
    OtherName("MultiNodeCheckpointer.finalize", note="wait(); checkpoints are kept, remove their directory yourself"),
    # -- datasets
    OtherName("datasets.create_empty_dataset", "data.create_empty_dataset"),
    OtherName("datasets.scatter_dataset", "data.scatter_dataset"),
    OtherName("datasets.scatter_index", "data.scatter_index"),
    OtherName("datasets.DataSizeError", "DataSizeError"),
    OtherName("get_n_iterations_for_one_epoch", note="len(dataloader)"),
    OtherName("get_epoch_trigger", note="a loop over epochs, or an experiment file"),
    # -- iterators
    OtherName("iterators.create_multi_node_iterator", "iterators.create_multi_node_iterator", "of a `DataLoader`"),
    OtherName("iterators.create_synchronized_iterator", "iterators.create_synchronized_iterator", "of a `DataLoader`"),
    # -- extensions
    OtherName("extensions.create_multi_node_evaluator", "extensions.create_multi_node_evaluator"),
    OtherName("extensions.create_multi_node_checkpointer", "extensions.create_multi_node_checkpointer"),
    OtherName("extensions.GenericMultiNodeEvaluator", "extensions.GenericMultiNodeEvaluator"),
    OtherName("extensions.AllreducePersistent", "extensions.AllreducePersistent", "call it before an evaluation"),
    OtherName("extensions.ObservationAggregator", "extensions.ObservationAggregator", "call it in every step"),
    OtherName(
        "extensions.MultiNodeEarlyStoppingTrigger",
        "extensions.MultiNodeEarlyStoppingTrigger",
        "call it with the observation after each epoch; `verbose` and `suffix` have no effect",
    ),
    OtherName("extensions.multi_node_snapshot", note="torchmn.create_multi_node_checkpointer"),
    # -- the rest
    OtherName("testing.get_device", note="comm.device"),
    OtherName("nccl", note='create_communicator("nccl")'),
)


class DataSizeError(RuntimeError):
    """For scripts that catch it. Not raised, as in ChainerMN's last versions: objects of any size can be sent."""


def value(here: str) -> Any:
    """Returns the object that `OtherName.here` names; of a class, its attribute."""
    module, *names = ("torchmn", *here.split("."))
    found: Any = import_module(module)
    for name in names:
        found = getattr(found, name)
    return found


module_names["DataSizeError"] = module_names["datasets.DataSizeError"] = lambda: DataSizeError
module_names.update({name: partial(import_module, f"torchmn.{name}") for name in _MODULES})
for _entry in NAMES:
    _module, _, _name = _entry.name.rpartition(".")
    if not _entry.here:
        _owner = {"CommunicatorBase": "Communicator"}.get(_module, _module)
        advice[f"{_owner}.{_name}" if _owner else _name] = _entry.note
    elif _module in ("", "communicators", "datasets") and _entry.here != "DataSizeError":
        module_names[_entry.name] = partial(value, _entry.here)
advice["Communicator.mpi_comm"] = (
    "ranks that MPI does not connect have no MPI communicator; barrier() and the other operations are methods"
)
