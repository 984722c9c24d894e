"""Share state against a model, and every planted fault is detected."""

from __future__ import annotations

import pytest
from share_steps import CONSUMERS, NUM_LISTS, NUM_REQUESTS, PLAN, begin, fill, take_steps, writes_of
from sparse_world import make_plan

from sglang_blockreuse.layers.share_state import FIELDS, NotTheWriterError, ShareState, StaleShareState

NUM_STEPS = 5_000


def test_five_thousand_steps_agree_with_the_model():
    taken = take_steps(NUM_STEPS)
    print(f"{taken} steps without a mismatch")
    assert taken >= NUM_STEPS


def test_a_state_whose_steps_have_no_version_is_seen(monkeypatch):
    """Negative control of the machine: what a row left in an earlier step looks like its own."""
    original = ShareState.begin

    def same_version(state, *rows):
        original(state, *rows)
        state.expected.values_R3[:, 1] = 1

    monkeypatch.setattr(ShareState, "begin", same_version)
    with pytest.raises(AssertionError):
        take_steps(NUM_STEPS)


def sealed(*, strict=False):
    """A state in which rows 4, 0, 2 have just been written by every writer."""
    state = ShareState(PLAN, NUM_REQUESTS, NUM_LISTS, strict=strict)
    which = [4, 0, 2]
    begin(state, which, [11, 12, 13], [20, 30, 40])
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
            source(state, layer)[0].counts[0] += change
            self.check(state, layer, "digest")

    def test_of_two_rows_exchanged_with_their_stamps(self, layer):
        state = sealed()
        table, stamps = source(state, layer)
        for array in (*table, stamps):
            array[[0, 2]] = array[[2, 0]]
        fresh = state.take(layer)[1].fresh_R
        assert fresh.tolist() == [1, 0, 0]
        assert state.counts["stale_row"] == 2

    def test_of_two_rows_exchanged_without_their_stamps(self, layer):
        state = sealed()
        for array in source(state, layer)[0]:
            array[[0, 2]] = array[[2, 0]]
        assert state.take(layer)[1].fresh_R.tolist() == [1, 0, 0]

    def test_of_a_slot_that_changed_hands(self, layer):
        state = sealed()
        version = int(state.version_1)
        begin(state, [4, 0, 2], [11, 99, 13], [20, 30, 40])
        state.expected.values_R3[:, 1] = version  # as if it were the same step
        self.check(state, layer, "row")

    def test_of_a_row_rolled_back(self, layer):
        state = sealed()
        state.truncate(0, 29)
        state.truncate(4, 20)
        assert state.take(layer)[1].fresh_R.tolist() == [1, 0, 1]

    def check(self, state, layer, field):
        fresh = state.take(layer)[1].fresh_R
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
        assert state.take(layer)[1].fresh_R.tolist() == [1, 1, 1]


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
