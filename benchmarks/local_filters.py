"""Local filters (a convolution with different weights at each position) and loops over positions, in one process.

    OMP_NUM_THREADS=1 mpiexec -n 1 python benchmarks/local_filters.py

The three layers of the MNIST autoencoder, forward and backward to the gradients of images and filters.
  loop          for each position, the patch of all images times the position's filters, written into the output
  stacked loop  the same products, combined at the end
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from results import Results, arguments
from timing import take_turns
from torch import Tensor

from torchmn.models import MNIST
from torchmn.nn import LocalFilter2d

BATCHES = (100, 1)


def loop(layer: LocalFilter2d, x: Tensor) -> Tensor:
    (rows, columns), (height, width) = layer.out_size, layer.kernel
    y = x.new_zeros(len(x), layer.out_maps, rows, columns)
    for r in range(rows):
        for q in range(columns):
            patch = x[:, :, r : r + height, q : q + width].flatten(1)
            y[:, :, r, q] = patch @ layer.weight[r, q].flatten(1).t()
    return y


def stacked_loop(layer: LocalFilter2d, x: Tensor) -> Tensor:
    """Without the copy of the output's gradient that `loop` makes at each position."""
    (rows, columns), (height, width) = layer.out_size, layer.kernel
    products = [
        x[:, :, r : r + height, q : q + width].flatten(1) @ layer.weight[r, q].flatten(1).t()
        for r in range(rows)
        for q in range(columns)
    ]
    return torch.stack(products, dim=2).view(len(x), layer.out_maps, rows, columns)


def forward_backward(
    forward: Callable[[LocalFilter2d, Tensor], Tensor], layer: LocalFilter2d, x: Tensor
) -> Callable[[], None]:
    torch.testing.assert_close(forward(layer, x), layer(x), rtol=1e-3, atol=1e-4)

    def run() -> None:
        x.grad = layer.weight.grad = None
        y = forward(layer, x)
        y.backward(torch.ones_like(y))

    return run


def main() -> None:
    options = arguments(__doc__, rounds=3).parse_args()
    torch.set_num_threads(1)
    results = Results("layer, images")
    forwards = {"TorchMN": LocalFilter2d.__call__, "loop": loop, "stacked loop": stacked_loop}
    for batch in BATCHES:
        for layer in (stack.filter for stack in MNIST.model().stacks):
            x = torch.rand(batch, layer.in_maps, *layer.in_size, requires_grad=True)
            contenders = {name: forward_backward(forward, layer, x) for name, forward in forwards.items()}
            case = f"{layer.in_maps} x {layer.in_size[0]}², {layer.kernel[0]}² kernel, {batch}"
            results.add(case, take_turns(contenders, options))
    results.finish(options)


if __name__ == "__main__":
    main()
