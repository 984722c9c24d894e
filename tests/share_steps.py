"""The state that layers share against its model: random steps, rows that come, step, move, are rolled back and go.

    python tests/share_steps.py [--steps 100000]

takes random steps until there are so many, and says how many there were.
"""

from __future__ import annotations

import argparse
import functools

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sparse_world import make_plan

from sglang_blockreuse.layers.share_state import FIELDS, ShareState

PLAN = make_plan("DFXRXRFR", final_k=6, pool_size=9, sink=1, window=2)
NUM_REQUESTS, NUM_LISTS = 6, 2
CONSUMERS = [layer for layer in PLAN.layers if layer.anchor is not None]
WRITES = [(layer, kind) for layer in PLAN.layers for kind in ("pool", "indices")]
SETTINGS = settings(
    phases=[
        Phase.generate,
        Phase.shrink,
    ],  # no replay of earlier failures: the control below has one each time
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def writes_of(state):
    return [(layer, kind) for layer, kind in WRITES if (layer.layer, kind) in state.written()]


def fill(table, request, seed):
    """Content that says whose it is."""
    size = table.positions.shape[2]
    values = torch.arange(NUM_LISTS * size, dtype=torch.int32).view(NUM_LISTS, size) * 7 + seed
    table.positions[request], table.slots[request], table.counts[request] = values, values + 3, size


def begin(state, requests, row_ids, lens):
    """A step of these rows."""
    int32, int64 = torch.int32, torch.int64
    state.begin(
        torch.tensor(requests, dtype=int32),
        torch.tensor(row_ids, dtype=int64),
        torch.tensor(lens, dtype=int32),
    )


def counted_rule(**arguments):
    """A rule whose calls count once they ended without a mismatch."""

    def decorate(method):
        @functools.wraps(method)
        def counted(self, **given):
            method(self, **given)
            Rows.num_steps += 1

        return rule(**arguments)(counted)

    return decorate


class Rows(RuleBasedStateMachine):
    """The model: per request slot the identity of its row, its length, and the step in which it last wrote."""

    num_steps = 0  # of all examples

    @initialize()
    def start(self):
        self.state = ShareState(PLAN, NUM_REQUESTS, NUM_LISTS)
        self.generation = [0] * NUM_REQUESTS
        self.rows: dict[int, int] = {}  # request slot -> keys
        self.batch: list[int] = []
        self.seed = 0

    # -- what the host does ------------------------------------------------------------------

    @precondition(lambda self: len(self.rows) < NUM_REQUESTS)
    @counted_rule(length=st.integers(1, 50))
    def admit(self, length):
        slot = next(slot for slot in range(NUM_REQUESTS) if slot not in self.rows)
        self.generation[slot] += 1
        self.rows[slot] = length
        self.batch.append(slot)  # merged at the end, as the host does

    @precondition(lambda self: self.batch)
    @counted_rule(data=st.data(), tells=st.booleans())
    def end(self, data, tells):
        """Finished, retracted or aborted; the state may or may not be told."""
        slot = data.draw(st.sampled_from(self.batch))
        self.batch.remove(slot)
        del self.rows[slot]
        if tells:
            self.state.invalidate([slot])

    @precondition(lambda self: len(self.batch) > 1)
    @counted_rule(data=st.data())
    def reorder(self, data):
        self.batch = data.draw(st.permutations(self.batch))

    @precondition(lambda self: self.batch)
    @counted_rule(data=st.data())
    def roll_back(self, data):
        slot = data.draw(st.sampled_from(self.batch))
        self.rows[slot] = data.draw(st.integers(1, self.rows[slot]))
        self.state.truncate(slot, self.rows[slot])

    @precondition(lambda self: self.batch)
    @counted_rule(data=st.data())
    def step(self, data):
        """A decode step of some rows, in layer order; some writers leave out some rows, as an error would."""
        which = data.draw(st.lists(st.sampled_from(self.batch), min_size=1, unique=True))
        forgets = data.draw(st.sets(st.integers(0, len(writes_of(self.state)) - 1), max_size=1))
        for slot in which:
            self.rows[slot] += 1
        lens = [self.rows[slot] for slot in which]
        begin(self.state, which, [self.generation[slot] for slot in which], lens)
        written = {}
        for number, (layer, kind) in enumerate(writes_of(self.state)):
            if number not in forgets:
                written[layer.layer, kind] = self._write(layer, kind, which)
        for layer in CONSUMERS:
            kind = "pool" if layer.role == "reindex" else "indices"
            table, (fresh, *_) = self.state.take(layer)
            expected = written.get((layer.anchor, kind))
            assert fresh.tolist() == [expected is not None] * len(which)
            for slot in which if expected else ():
                assert table.positions[slot, 0, 0] == expected + slot

    def _write(self, layer, kind, which):
        self.seed += 100
        for slot in which:
            fill(self.state.table_to_write(layer, kind), slot, self.seed + slot)
        self.state.seal(layer, kind)
        return self.seed

    @precondition(lambda self: self.batch)
    @counted_rule(data=st.data())
    def look_without_writing(self, data):
        """The same rows at the same lengths in a new step: nothing of an older step may be taken."""
        slot = data.draw(st.sampled_from(self.batch))
        begin(self.state, [slot], [self.generation[slot]], [self.rows[slot]])
        for layer in CONSUMERS:
            assert self.state.take(layer)[1].fresh_R.tolist() == [0]

    @invariant()
    def no_float_and_nothing_sized_by_the_context(self):
        for table, stamps in (
            getattr(self, "state", None).written().values() if hasattr(self, "state") else ()
        ):
            assert {array.dtype for array in table} == {torch.int32}
            assert stamps.shape == (NUM_REQUESTS, len(FIELDS))


def take_steps(num_steps: int) -> int:
    """Run examples until they took `num_steps` steps; how many they took."""
    Rows.num_steps, num_examples = 0, num_steps // SETTINGS.stateful_step_count
    while Rows.num_steps < num_steps:
        before = Rows.num_steps
        # a fixed seed begins with the same examples again, so ask for more of them
        num_examples *= 2
        run_state_machine_as_test(Rows, settings=settings(SETTINGS, max_examples=num_examples))
        assert Rows.num_steps > before
    return Rows.num_steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random steps of share state against its model.")
    parser.add_argument("--steps", type=int, default=10_000)
    print(f"{take_steps(parser.parse_args().steps)} steps without a mismatch")
