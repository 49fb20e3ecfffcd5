"""An ordinary model in, the same model on a grid of ranks out.

parallelize.py   the one line that users write
input_shape.py   for which images a model is made
dry_run.py       a run on tensors without values, which finds what can not be computed in parts
splitting.py     which layers are swapped for slices of them
running.py       what happens around the forward of a parallel model
inputs.py        its inputs: what is found in them, and what ranks compare of them
randomness.py    dropout and batch statistics as the serial run has them
events.py        events at which guards look
guards/          what would silently give other numbers is refused: a table
state.py         state dicts with global tensors
summary.py       which weights are cut, and which every rank has
"""

from torchmn.parallel.clipping import clip_grad_norm_
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
