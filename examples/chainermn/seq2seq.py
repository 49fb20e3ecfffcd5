"""Train a translator, data parallel: an LSTM reads a sentence, another one writes its translation.

    mpiexec -n 4 python examples/chainermn/seq2seq.py --bleu -i wmt   # files wmt/{train,dev}.{en,fr}
    mpiexec -n 2 python examples/chainermn/seq2seq.py --bleu          # made-up sentences: number words, backwards

-b is the batch of *each* rank, as in ChainerMN. Only rank 0 reads the files.

What changed from ChainerMN's example, besides Chainer's words for PyTorch's:
- the optimizer is created with the model's parameters; the trainer is a loop, and `--stop` counts epochs or steps in it
- a batch of sentences is packed (`pack_sequence`) instead of a list of variables
- `comm.barrier()` in place of `comm.mpi_comm.Barrier()`, so that it also runs under torchrun
- BLEU is computed here (no nltk), from all ranks' counts: the score is that of the whole test set, not a mean of scores
"""

from __future__ import annotations

import argparse
import collections
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader

import torchmn as chainermn

EOS, UNK, NOTHING = 0, 1, -100  # the end of a sentence, an unknown word, and what cross_entropy ignores
Pair = tuple[Tensor, Tensor]


# -- data ----------------------------------------------------------------------------------------------------------


def read_pairs(folder: str | None, part: str) -> list[tuple[list[str], list[str]]]:
    """Returns the sentences of a part and their translations, as words."""
    if folder is None:
        return made_up({"train": 3000, "dev": 200}[part])
    sides = [Path(folder, f"{part}.{language}").read_text().splitlines() for language in ("en", "fr")]
    pairs = [(source.split(), target.split()) for source, target in zip(*sides, strict=True)]
    return [(source, target) for source, target in pairs if 0 < len(source) < 50 and 0 < len(target) < 50]


def made_up(sentences: int) -> list[tuple[list[str], list[str]]]:
    words = {"one": "un", "two": "deux", "three": "trois", "four": "quatre", "five": "cinq"}
    draw = random.Random(sentences)
    sources = [draw.choices(list(words), k=draw.randint(1, 4)) for _ in range(sentences)]
    return [(source, [words[word] for word in reversed(source)]) for source in sources]


def count_words(sentences: Sequence[list[str]], limit: int = 40_000) -> dict[str, int]:
    """Returns the numbers of the most frequent words."""
    counts = collections.Counter(word for sentence in sentences for word in sentence)
    return {word: number for number, (word, _) in enumerate(counts.most_common(limit), start=UNK + 1)}


def numbers(sentence: list[str], ids: dict[str, int]) -> Tensor:
    return torch.tensor([ids.get(word, UNK) for word in sentence])


# -- the model -----------------------------------------------------------------------------------------------------


class Seq2seq(nn.Module):
    def __init__(self, layers: int, source_words: int, target_words: int, units: int):
        super().__init__()
        self.embed_x = nn.Embedding(source_words, units)
        self.embed_y = nn.Embedding(target_words, units)
        dropout = 0.1 if layers > 1 else 0.0
        self.encoder = nn.LSTM(units, units, layers, dropout=dropout)
        self.decoder = nn.LSTM(units, units, layers, dropout=dropout)
        self.W = nn.Linear(units, target_words)

    def encode(self, xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        packed = pack_sequence([x.flip(0) for x in xs], enforce_sorted=False)
        return self.encoder(packed._replace(data=self.embed_x(packed.data)))[1]

    def forward(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        """The mean loss of a word, given the right words before it."""
        eos = ys[0].new_tensor([EOS])
        ys_in = pad_sequence([torch.cat([eos, y]) for y in ys], padding_value=EOS)
        ys_out = pad_sequence([torch.cat([y, eos]) for y in ys], padding_value=NOTHING)
        output, _ = self.decoder(self.embed_y(ys_in), self.encode(xs))
        return cross_entropy(self.W(output).flatten(0, 1), ys_out.flatten(), ignore_index=NOTHING)

    @torch.no_grad()
    def translate(self, xs: Sequence[Tensor], max_length: int) -> list[list[int]]:
        """The most likely words, one after another."""
        states, words, written = self.encode(xs), xs[0].new_full((1, len(xs)), EOS), []
        for _ in range(max_length):
            output, states = self.decoder(self.embed_y(words), states)
            words = self.W(output).argmax(dim=2)
            written.append(words[0])
        rows = torch.stack(written, dim=1).tolist()
        return [row[: row.index(EOS)] if EOS in row else row for row in rows]


# -- BLEU ----------------------------------------------------------------------------------------------------------


def ngrams(sentence: list[int], n: int) -> collections.Counter:
    return collections.Counter(tuple(sentence[at : at + n]) for at in range(len(sentence) - n + 1))


def bleu_counts(references: list[list[int]], translations: list[list[int]]) -> dict[str, int]:
    """What BLEU is computed from: common and all n-grams, and lengths. The counts of ranks add up."""
    counts = {"reference": sum(map(len, references)), "translation": sum(map(len, translations))}
    for n in range(1, 5):
        pairs = [(ngrams(r, n), ngrams(t, n)) for r, t in zip(references, translations, strict=True)]
        counts[f"common {n}"] = sum((right & written).total() for right, written in pairs)
        counts[f"all {n}"] = sum(written.total() for _, written in pairs)
    return counts


def bleu(counts: dict[str, float]) -> float:
    precisions = [max(counts[f"common {n}"], 0.1) / max(counts[f"all {n}"], 1) for n in range(1, 5)]
    brevity = min(0.0, 1 - counts["reference"] / max(counts["translation"], 1))
    return math.exp(brevity + sum(map(math.log, precisions)) / 4)


class BleuEvaluator:
    """Counts on this rank's sentences; `create_multi_node_evaluator` adds up the counts of all ranks."""

    def __init__(self, model: Seq2seq, max_length: int):
        self.model, self.max_length = model, max_length

    def evaluate(self, pairs: Sequence[Pair], batch: int = 100) -> dict[str, chainermn.training.Sum]:
        self.model.eval()
        translations: list[list[int]] = []
        for start in range(0, len(pairs), batch):
            xs = [pairs[at][0] for at in range(start, min(start + batch, len(pairs)))]
            translations += self.model.translate(xs, self.max_length)
        self.model.train()
        counts = bleu_counts([pair[1].tolist() for pair in pairs], translations)
        return {name: chainermn.training.Sum(count) for name, count in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a translator on all ranks.")
    parser.add_argument("--batchsize", "-b", type=int, default=64, help="sentences per step on each rank")
    parser.add_argument("--bleu", action="store_true", help="report the BLEU score")
    parser.add_argument("--layer", type=int, default=3, help="layers of each LSTM")
    parser.add_argument("--unit", "-u", type=int, default=1024, help="units of each LSTM")
    parser.add_argument("--communicator", default="auto")
    parser.add_argument("-g", "--gpu", action="store_true", help="no effect: GPUs are used wherever there are any")
    parser.add_argument("--stop", "-s", default="15e", help='when to stop: "500i" steps, or "15e" epochs')
    parser.add_argument("--input", "-i", help="folder of the corpus; made-up sentences without it")
    parser.add_argument("--learnrate", "-l", type=float, default=0.001, help="of Adam")
    parser.add_argument("--out", "-o", default="result")
    args = parser.parse_args()

    comm = chainermn.create_communicator(args.communicator)
    log = chainermn.training.Logger(comm, json=Path(args.out, "log.jsonl"), formats={"bleu": ".4f"})
    log.print(f"{comm.size} rank(s), {args.unit} units, {args.batchsize} sentences per step on each")

    if comm.rank == 0:
        began = time.monotonic()
        train, test = read_pairs(args.input, "train"), read_pairs(args.input, "dev")
        source_ids = count_words([source for source, _ in train])
        target_ids = count_words([target for _, target in train])
        log.print(f"{len(train)} sentences read in {time.monotonic() - began:.1f} s")
        train_data = [(numbers(s, source_ids), numbers(t, target_ids)) for s, t in train]
        test_data = [(numbers(s, source_ids), numbers(t, target_ids)) for s, t in test]
    else:
        train_data, test_data, source_ids, target_ids = None, None, None, None
    source_ids = comm.bcast_obj(source_ids)
    target_ids = comm.bcast_obj(target_ids)
    train_data = chainermn.scatter_dataset(train_data, comm, shuffle=True, seed=0)
    test_data = chainermn.scatter_dataset(test_data, comm, force_equal_length=False)
    for rank in range(comm.size):
        if rank == comm.rank:
            print(f"rank {rank}: {comm.device}, {len(train_data)} sentences", flush=True)
        comm.barrier()

    torch.manual_seed(0)
    model = Seq2seq(args.layer, len(source_ids) + 2, len(target_ids) + 2, args.unit).to(comm.device)
    adam = torch.optim.Adam(model.parameters(), lr=args.learnrate)
    optimizer = chainermn.create_multi_node_optimizer(adam, comm, model=model)
    evaluator = chainermn.create_multi_node_evaluator(BleuEvaluator(model, max_length=50 if args.input else 6), comm)
    order = torch.Generator().manual_seed(comm.rank)
    loader = DataLoader(train_data, args.batchsize, shuffle=True, generator=order, collate_fn=list)

    count, unit = int(args.stop[:-1]), args.stop[-1]
    step = epoch = 0
    with log:
        while (step if unit == "i" else epoch) < count:
            total = 0.0
            for pairs in loader:
                optimizer.zero_grad()
                loss = model([x.to(comm.device) for x, _ in pairs], [y.to(comm.device) for _, y in pairs])
                loss.backward()
                optimizer.step()
                log.step(loss=loss.detach())
                total += loss.item()
                step += 1
                if unit == "i" and step == count:
                    break
            epoch += 1
            row = {"loss": comm.allreduce_obj(total) / comm.size / len(loader)}
            if args.bleu:
                row["bleu"] = bleu(evaluator.evaluate(test_data))
            log.epoch(epoch=epoch, **row)
    comm.finalize()


if __name__ == "__main__":
    main()
