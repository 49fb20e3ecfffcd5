"""Train a network that writes numbers backwards: its encoder is on rank 0, its decoder on rank 1.

    mpiexec -n 2 python examples/chainermn/seq2seq_model_parallel.py

The corpus is synthetic: digits of any length up to --length, and the same digits from right to left. Rank 0 reads a
number with an LSTM and sends the final states h and c to rank 1, whose LSTM starts with them; backward takes their
gradients back. Both ranks make the same corpus and go through it in the same order: only states travel.

What changed from ChainerMN's example, besides Chainer's words for PyTorch's:
- `create_multi_node_n_step_rnn` returns the output first and the delegate last, as torch's LSTM orders its results
- a batch of sentences is packed (`pack_sequence`) instead of a list of variables
- `actual_rnn` writes the words one after another, as there
- the corpus is synthetic, and accuracy takes the place of BLEU; the trainer is a loop on both ranks
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_sequence, pad_sequence

import torchmn
from torchmn.nn import create_multi_node_n_step_rnn

END, SYMBOLS, NOTHING = 10, 11, -100  # ten digits and the end of a number; what cross_entropy ignores


def corpus(numbers: int, length: int, seed: int, device: torch.device) -> list[Tensor]:
    """So many numbers of 1 to `length` digits, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (numbers,), generator=draw).tolist()
    return [torch.randint(0, 10, (digits,), generator=draw).to(device) for digits in lengths]


def batches(numbers: list[Tensor], size: int, seed: int) -> Iterator[list[Tensor]]:
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed)).tolist()
    for start in range(0, len(order), size):
        yield [numbers[n] for n in order[start : start + size]]


class Encoder(nn.Module):
    """Reads numbers; gives the delegate of the states that it sends."""

    def __init__(self, comm: torchmn.Communicator, units: int):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 32)
        self.rnn = create_multi_node_n_step_rnn(nn.LSTM(32, units), comm, rank_out=1)

    def forward(self, numbers: list[Tensor]) -> Tensor:
        digits = pack_sequence(numbers, enforce_sorted=False)
        _, _, delegate = self.rnn(digits._replace(data=self.embed(digits.data)))
        return delegate


class Decoder(nn.Module):
    """Writes numbers backwards, beginning with the states that it receives."""

    def __init__(self, comm: torchmn.Communicator, units: int):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 32)
        self.rnn = create_multi_node_n_step_rnn(nn.LSTM(32, units), comm, rank_in=0)
        self.symbol = nn.Linear(units, SYMBOLS)

    def forward(self, numbers: list[Tensor]) -> Tensor:
        """The loss: how unlikely each right symbol is, given the right ones before it."""
        right = backwards(numbers)
        before = torch.cat([right.new_full((1, right.shape[1]), END), right[:-1].clamp(min=0)])
        output, _, _ = self.rnn(self.embed(before))
        return cross_entropy(self.symbol(output).flatten(0, 1), right.flatten(), ignore_index=NOTHING)

    def write(self, numbers: list[Tensor]) -> Tensor:
        """For each number whether every symbol came out right; each follows from those written before it."""
        right = backwards(numbers)
        written = right.new_full((1, right.shape[1]), END)
        states, all_right = None, torch.ones_like(right[0], dtype=torch.bool)
        for symbols in right:
            if states is None:
                output, states, _ = self.rnn(self.embed(written))  # receives the encoder's states
            else:
                output, states = self.rnn.actual_rnn(self.embed(written), states)
            written = self.symbol(output).argmax(dim=2)
            all_right &= (written[0] == symbols) | (symbols == NOTHING)
        return all_right


def backwards(numbers: list[Tensor]) -> Tensor:
    """What the decoder should write: (symbol, number), each number reversed, its end, and then nothing."""
    return pad_sequence([torch.cat([x.flip(0), x.new_tensor([END])]) for x in numbers], padding_value=NOTHING)


@torch.no_grad()
def accuracy_of(model: nn.Module, numbers: list[Tensor]) -> float:
    """The share of numbers written without a mistake, on rank 1; 0 on rank 0, which only reads."""
    if isinstance(model, Decoder):
        return model.write(numbers).float().mean().item()
    model(numbers)
    return 0.0


def train(comm: torchmn.Communicator, options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    model = (Encoder(comm, options.units) if comm.rank == 0 else Decoder(comm, options.units)).to(comm.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
    training = corpus(options.numbers, options.length, 1, comm.device)
    test = corpus(500, options.length, 2, comm.device)
    steps = options.epoch * -(-len(training) // options.batchsize)
    formats = {"loss": ".6f", "test accuracy": ".2%"}
    with torchmn.training.Logger(comm, steps, json=options.out / "log.jsonl", formats=formats) as log:
        log.print(f"{len(training)} numbers of up to {options.length} digits, {comm.size} rank(s): encoder and decoder")
        for epoch in range(1, options.epoch + 1):
            total = 0.0
            for numbers in batches(training, options.batchsize, 1000 * options.seed + epoch):
                optimizer.zero_grad()
                loss = model(numbers)  # on rank 0, the delegate
                loss.backward()
                optimizer.step()
                total += loss.item() * len(numbers)
                log.step()
            # Rank 1 has the values; rank 0 prints.
            known = comm.bcast_obj((total / len(training), accuracy_of(model, test)), root=1)
            log.epoch(epoch=epoch, loss=known[0], **{"test accuracy": known[1]})


def demand_two_processes(comm: torchmn.Communicator) -> None:
    if comm.size != 2:
        raise SystemExit(
            f"rank {comm.rank} of {comm.size}: an encoder and a decoder need 2 processes, got {comm.size}: "
            f"mpiexec -n 2 python {' '.join(sys.argv)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an encoder and a decoder, each on a separate rank.")
    parser.add_argument("-b", "--batchsize", type=int, default=50, help="numbers per step")
    parser.add_argument("-e", "--epoch", type=int, default=8, help="how many times to go through the corpus")
    parser.add_argument("-u", "--units", type=int, default=128, help="units of each LSTM")
    parser.add_argument("-l", "--learning-rate", type=float, default=0.005)
    parser.add_argument("--length", type=int, default=6, help="digits of the longest numbers")
    parser.add_argument("--numbers", type=int, default=10_000, help="numbers in the corpus")
    parser.add_argument("--communicator", default="auto", help="auto, mpi, gloo, nccl, or one of ChainerMN's names")
    parser.add_argument("-g", "--gpu", action="store_true", help="no effect: GPUs are used wherever there are any")
    parser.add_argument("-o", "--out", type=Path, default=Path("result"), help="folder for the log")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="shorter numbers, a smaller network, two epochs")
    options = parser.parse_args()
    if options.quick:
        options.epoch, options.units, options.length, options.numbers = min(options.epoch, 2), 64, 4, 5000
        options.learning_rate = 0.01

    with torchmn.create_communicator(options.communicator) as comm:
        demand_two_processes(comm)
        if "OMP_NUM_THREADS" not in os.environ:  # the ranks of a machine share its cores
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.intra_size))
        train(comm, options)


if __name__ == "__main__":
    main()
