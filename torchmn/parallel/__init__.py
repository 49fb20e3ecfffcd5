"""parallelize: turns an ordinary model into one that runs on a grid of ranks and computes the same numbers.

parallelize.py       parallelize, and the choice of what is cut
splitting.py         which layers are replaced by slices of them (tensor parallel)
trace.py             dry_run: a forward on meta tensors, which finds out how each parameter is used
module.py            Parallelism: the forward of a parallel model
inputs.py            its inputs: how they are cut, and their comparison between ranks
serial_semantics.py  dropout and batch statistics of whole tensors as on one rank
functional_call.py   parameters that torch.func.functional_call puts into a parallel model
passes.py            optional passes that make forward faster (fusion)
events.py            events of a parallel model, and the table of guards that handle them
guards/              the guards: what would silently give other numbers raises an error
global_state.py      state dicts of models and optimizers with global tensors
clipping.py          clip_grad_norm_ by the norm over all ranks
summary.py           parallel_summary: which weights are sharded and which replicated
"""

from torchmn.parallel.clipping import clip_grad_norm_
from torchmn.parallel.clipping import gradient_norm as gradient_norm
from torchmn.parallel.events import GUARDS as GUARDS
from torchmn.parallel.global_state import GlobalModelState as GlobalModelState
from torchmn.parallel.global_state import full_state_dict, load_full_state_dict
from torchmn.parallel.parallelize import parallelize
from torchmn.parallel.summary import ParallelSummary, SummaryRow, parallel_summary

__all__ = [
    "ParallelSummary",
    "SummaryRow",
    "clip_grad_norm_",
    "full_state_dict",
    "load_full_state_dict",
    "parallel_summary",
    "parallelize",
]
