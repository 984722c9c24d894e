"""Share state against a model: rows come, step, move, are rolled back and go; every planted fault is detected.

    python tests/unit/test_share_state.py [--steps 10000]

takes random steps until there are so many, and says how many there were; pytest takes MIN_STEPS.
"""

from __future__ import annotations

import argparse
import functools

import numpy as np
import pytest
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

from sglang_blockreuse.layers.share_state import FIELDS, NotTheWriterError, ShareState, StaleShareState

PLAN = make_plan("DFXRXRFR", final_k=6, pool_size=9, sink=1, window=2)
NUM_REQUESTS, NUM_LISTS = 6, 2
CONSUMERS = [layer for layer in PLAN.layers if layer.anchor is not None]
WRITES = [(layer, kind) for layer in PLAN.layers for kind in ("pool", "indices")]
MIN_STEPS = 10_000
SETTINGS = settings(
    max_examples=60,
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
    values = np.arange(NUM_LISTS * size).reshape(NUM_LISTS, size) * 7 + seed
    table.positions[request], table.slots[request], table.counts[request] = values, values + 3, size


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
        requests = np.array(which, np.int32)
        lens = [self.rows[slot] for slot in which]
        self.state.begin(requests, [self.generation[slot] for slot in which], lens)
        written = {}
        for number, (layer, kind) in enumerate(writes_of(self.state)):
            if number not in forgets:
                written[layer.layer, kind] = self._write(layer, kind, which)
        for layer in CONSUMERS:
            kind = "pool" if layer.role == "reindex" else "indices"
            table, fresh = self.state.take(layer)
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
        self.state.begin(np.array([slot], np.int32), [self.generation[slot]], [self.rows[slot]])
        for layer in CONSUMERS:
            assert self.state.take(layer)[1].tolist() == [0]

    @invariant()
    def no_float_and_nothing_sized_by_the_context(self):
        for table, stamps in (
            getattr(self, "state", None).written().values() if hasattr(self, "state") else ()
        ):
            assert {array.dtype for array in table} == {np.dtype(np.int32)}
            assert stamps.shape == (NUM_REQUESTS, len(FIELDS))


def take_steps(num_steps):
    """Run examples until they took `num_steps` steps; how many they took."""
    Rows.num_steps = 0
    while Rows.num_steps < num_steps:
        before = Rows.num_steps
        run_state_machine_as_test(Rows, settings=SETTINGS)
        assert Rows.num_steps > before
    return Rows.num_steps


def test_ten_thousand_steps_agree_with_the_model():
    taken = take_steps(MIN_STEPS)
    print(f"{taken} steps without a mismatch")
    assert taken >= MIN_STEPS


def test_a_state_whose_steps_have_no_version_is_seen(monkeypatch):
    """Negative control of the machine: what a row left in an earlier step looks like its own."""
    begin = ShareState.begin

    def same_version(state, *rows):
        begin(state, *rows)
        state._expected_R3[:, 1] = 1

    monkeypatch.setattr(ShareState, "begin", same_version)
    with pytest.raises(AssertionError):
        take_steps(MIN_STEPS)


def sealed(*, strict=False):
    """A state in which rows 4, 0, 2 have just been written by every writer."""
    state = ShareState(PLAN, NUM_REQUESTS, NUM_LISTS, strict=strict)
    which = [4, 0, 2]
    state.begin(np.array(which, np.int32), [11, 12, 13], [20, 30, 40])
    for number, (layer, kind) in enumerate(writes_of(state)):
        for slot in which:
            fill(state.table_to_write(layer, kind), slot, 100 * number + slot)
        state.seal(layer, kind)
    return state


@pytest.mark.parametrize("layer", CONSUMERS, ids=lambda layer: f"{layer.role}-{layer.layer}")
class TestFaults:
    """One row's fault is seen by every consumer, named, and costs no other row anything."""

    @pytest.mark.parametrize("field", FIELDS)
    def test_in_a_stamp(self, layer, field):
        state = sealed()
        _, stamps = source(state, layer)
        stamps[0, FIELDS.index(field)] += 1
        self.check(state, layer, field)

    @pytest.mark.parametrize("array", ["positions", "slots"])
    @pytest.mark.parametrize("change", [1, -1, 1 << 20])
    def test_in_a_table(self, layer, array, change):
        state = sealed()
        table, _ = source(state, layer)
        getattr(table, array)[0, 1, 3] += change
        self.check(state, layer, "digest")

    def test_in_a_count(self, layer):
        for change in (-1, 1, 1 << 20, -(1 << 20)):
            state = sealed()
            source(state, layer)[0].counts[0, 1] += change
            self.check(state, layer, "digest")

    def test_of_two_rows_exchanged_with_their_stamps(self, layer):
        state = sealed()
        table, stamps = source(state, layer)
        for array in (*table, stamps):
            array[[0, 2]] = array[[2, 0]]
        _, fresh = state.take(layer)
        assert fresh.tolist() == [1, 0, 0]
        assert state.counts["stale_row"] == 2

    def test_of_two_rows_exchanged_without_their_stamps(self, layer):
        state = sealed()
        for array in source(state, layer)[0]:
            array[[0, 2]] = array[[2, 0]]
        assert state.take(layer)[1].tolist() == [1, 0, 0]

    def test_of_a_slot_that_changed_hands(self, layer):
        state = sealed()
        version = state.version
        state.begin(np.array([4, 0, 2], np.int32), [11, 99, 13], [20, 30, 40])
        state._expected_R3[:, 1] = version  # as if it were the same step
        self.check(state, layer, "row")

    def test_of_a_row_rolled_back(self, layer):
        state = sealed()
        state.truncate(0, 29)
        state.truncate(4, 20)
        assert state.take(layer)[1].tolist() == [1, 0, 1]

    def check(self, state, layer, field):
        _, fresh = state.take(layer)
        assert fresh.tolist() == [1, 0, 1]
        assert dict(state.counts) == {f"stale_{field}": 1}
        state.strict = True
        with pytest.raises(StaleShareState, match=rf"layer {layer.layer} .* request slot 0: {field}"):
            state.take(layer)


def source(state, layer):
    return state.written()[layer.anchor, "pool" if layer.role == "reindex" else "indices"]


def test_without_a_fault_every_row_is_fresh():
    """Negative control of the faults."""
    state = sealed(strict=True)
    for layer in CONSUMERS:
        assert state.take(layer)[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("at", "kind"),
    [(0, "pool"), (0, "indices"), (1, "indices"), (2, "pool"), (3, "indices"), (6, "pool"), (4, "pool")],
)
def test_only_the_owner_writes(at, kind):
    """Dense and reuse layers own nothing, reindex layers no pool, and a full layer only what somebody reads."""
    state = sealed()
    for write in (state.table_to_write, state.seal):
        with pytest.raises(NotTheWriterError, match=f"layer {at} is {PLAN.layers[at].role}"):
            write(PLAN.layers[at], kind)


def test_a_dense_plan_has_no_share_state():
    with pytest.raises(ValueError, match="no sparse layer"):
        ShareState(make_plan("DD"), 2, 1)


def test_its_size_does_not_grow_with_the_context():
    """Positions and slots per list entry, a count and a stamp per row; the source's workspace of int32 positions."""
    state = ShareState(PLAN, 5, 1)
    entries = 9 + 6 * 3 + 6  # one pool, the lists of layers 2, 4 and 6, the own one
    assert state.num_bytes == 5 * (8 * entries + 4 * 5 + 48 * 4)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random steps of share state against its model.")
    parser.add_argument("--steps", type=int, default=MIN_STEPS)
    print(f"{take_steps(parser.parse_args().steps)} steps without a mismatch")
