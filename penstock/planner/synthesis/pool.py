"""Pool: orders found so far, best first, none twice, as tables of starts in forward time."""

from dataclasses import dataclass

import numpy as np

from penstock.planner.synthesis.evaluate import Times, evaluate
from penstock.planner.synthesis.greedy import Runs
from penstock.planner.synthesis.rows import Floats, Ints, Rows
from penstock.planner.synthesis.shop import B, F, I, Shop, W, Word, Words


@dataclass(frozen=True)
class Pool:
    """Per order its length in the objective, when its passes start, and the how-manieth on its rank each one is."""

    rows: Rows
    lengths: Floats
    starts: Floats
    turns: Ints

    @classmethod
    def of(cls, rows: Rows, runs: Runs) -> "Pool":
        """The runs that got to their end, measured exactly; mirrored ones are turned round."""
        ended = np.isfinite(runs.lengths)
        lengths, starts, turns = runs.lengths[ended], runs.starts[ended], runs.turns[ended]
        if rows.is_mirrored:
            starts = rows.turned(starts, lengths)
            last = np.array([len(rows.of_rank[rank]) for rank in rows.rank]) * rows.shop.num_microbatches - 1
            turns = last[:, None] - turns[:, :, ::-1]
            rows = rows.mirrored()
        exact = [measure(rows.shop, evaluate(rows.shop, words_of_turns(rows, each))) for each in turns]
        return cls(rows, np.asarray(exact, dtype=np.float64), starts, turns)

    @classmethod
    def of_words(cls, rows: Rows, orders: list[Words]) -> "Pool":
        """Given orders; a full backward counts as its two parts, one after the other, unless its stage is whole."""
        shape = (len(orders), rows.num_rows, rows.shop.num_microbatches)
        lengths, starts, turns = np.zeros(len(orders)), np.zeros(shape), np.zeros(shape, dtype=np.int64)
        for nth, words in enumerate(orders):
            times = evaluate(rows.shop, words)
            for word, ends in zip(words, times.ends, strict=True):
                _enter(rows, word, ends, starts[nth], turns[nth])
            lengths[nth] = measure(rows.shop, evaluate(rows.shop, words_of_turns(rows, turns[nth])))
        return cls(rows, lengths, starts, turns)

    def joined(self, other: "Pool", size: int) -> "Pool":
        """The best of both, at most so many; of equal orders one is kept."""
        lengths = np.concatenate((self.lengths, other.lengths))
        turns = np.concatenate((self.turns, other.turns))
        starts = np.concatenate((self.starts, other.starts))
        _, first = np.unique(turns.reshape(len(turns), turns[0].size if len(turns) else 0), axis=0, return_index=True)
        kept = first[np.argsort(lengths[first], kind="stable")][:size]
        return Pool(self.rows, lengths[kept], starts[kept], turns[kept])

    def sample(self, size: int, seed: int) -> "Pool":
        """So many of the orders, or all, the same for the same seed."""
        count = min(size, len(self))
        kept = np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False))
        return Pool(self.rows, self.lengths[kept], self.starts[kept], self.turns[kept])

    @property
    def best(self) -> float:
        """The length of the best."""
        return float(self.lengths[0])

    def words(self, place: int = 0) -> Words:
        """The words of one order."""
        return words_of_turns(self.rows, self.turns[place])

    def __len__(self) -> int:
        return len(self.lengths)


def measure(shop: Shop, times: Times) -> float:
    """The length in the objective of the problem."""
    return times.span if shop.problem.objective == "span" else times.makespan


def _enter(rows: Rows, word: Word, ends: list[float], starts: Floats, turns: Ints) -> None:
    """Write the passes of one rank into the tables of starts and turns."""
    parts = {F: (0,), I: (1,), W: (2,), B: (1, 2)}
    done: dict[int, int] = {}
    turn = 0
    for code, end in zip(word, ends, strict=True):
        start = end - rows.shop.seconds[code]
        for row in (3 * (code >> 2) + part for part in parts[code & 3]):
            column = done.get(row, 0)
            starts[row, column], turns[row, column] = start, turn
            start, turn, done[row] = start + rows.seconds[row], turn + 1, column + 1
    for stage in rows.whole & {code >> 2 for code in word}:
        # What is not split has its second part at the end of the first.
        starts[3 * stage + 2] = starts[3 * stage + 1] + rows.seconds[3 * stage + 1]


def words_of_turns(rows: Rows, turns: Ints) -> Words:
    """The letters of every rank in their turns."""
    words = []
    for mine in rows.of_rank:
        letters = np.array([_letter(row, rows) for row in mine])
        sequence = np.argsort(turns[list(mine)], axis=None, kind="stable")
        word = np.repeat(letters, turns.shape[1])[sequence]
        words.append(word[word >= 0].tolist())
    return words


def _letter(row: int, rows: Rows) -> int:
    """The letter of a row's passes; -1 for the second part of a backward that has none."""
    stage, part = divmod(row, 3)
    if stage in rows.whole:
        return (stage << 2 | F, stage << 2 | B, -1)[part]
    return stage << 2 | (F, I, W)[part]
