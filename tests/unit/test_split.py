"""Where homes begin, which blocks have one, and that every home is compiled once."""

from __future__ import annotations

from array import array

import pytest

from sglang_blockreuse.blocks.compile import Compiler
from sglang_blockreuse.blocks.match import Namespace
from sglang_blockreuse.blocks.split import Front, compile_prefix, homes
from sglang_blockreuse.config import BlocksConfig
from sglang_blockreuse.types import Interval, Wait

PROMPT = array("q", range(1000, 1200))
SPANS = (Interval(10, 60), Interval(60, 110), Interval(120, 180))
PLAIN = Namespace(None, None)


class DictTree:
    """A tree that holds whole sequences; what the compiler asks of one."""

    def __init__(self) -> None:
        self.held: dict[Namespace, list[tuple[int, ...]]] = {}

    def publish(self, tokens, namespace=PLAIN) -> None:
        self.held.setdefault(namespace, []).append(tuple(tokens))

    def lookup(self, tokens, namespace):
        def common(a, b):
            return next(
                (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
            )

        return max((common(tokens, held) for held in self.held.get(namespace, [])), default=0), None


def homes_of(prompt=PROMPT, spans=SPANS, **config):
    settings = BlocksConfig(**config)
    prefix = compile_prefix(prompt, spans[0].start, config=settings, bos=7)
    return homes(prompt, spans, front=Front(prefix), min_block_tokens=settings.min_block_tokens)


def waiting(compiler, request_ids) -> Wait:
    wait = Wait()
    compiler.wait(wait, request_ids)
    return wait


@pytest.mark.parametrize(
    ("kind", "first_start", "expected"),
    [
        ("auto", 10, tuple(PROMPT[:10])),
        ("auto", 0, (7,)),
        ("leading", 10, tuple(PROMPT[:10])),
        ("leading", 0, ()),
        ("bos", 10, (7,)),
        ("none", 10, ()),
    ],
)
def test_the_compile_prefix(kind, first_start, expected):
    found = compile_prefix(PROMPT, first_start, config=BlocksConfig(compile_prefix=kind), bos=7)
    assert tuple(found) == expected


def test_a_model_without_bos_compiles_in_a_void():
    assert not compile_prefix(PROMPT, 0, config=BlocksConfig(), bos=None)


def test_a_home_is_the_compile_prefix_and_the_block():
    second = homes_of()[0]
    assert second.block == 1
    assert list(second.tokens) == [*PROMPT[:10], *PROMPT[60:110]]
    assert (second.prefix_len, second.delta) == (10, 50)


def test_the_block_behind_the_true_prefix_is_exact_and_needs_no_home():
    assert [h.block for h in homes_of()] == [1, 2]
    # compiled behind something else, it is not exact any more
    assert [h.block for h in homes_of(compile_prefix="bos")] == [0, 1, 2]


def test_short_blocks_have_no_home():
    assert [h.block for h in homes_of(min_block_tokens=51)] == [2]


def test_a_block_has_the_same_home_wherever_it_stands():
    moved = PROMPT[:10] + PROMPT[120:180] + PROMPT[60:110]
    found = homes_of(moved, (Interval(10, 70), Interval(70, 120)))
    assert found[0].tokens == homes_of()[0].tokens


def test_every_unseen_home_is_compiled_once():
    tree, compiler = DictTree(), Compiler()
    tree.publish(PROMPT[:10])
    jobs, waits_for = compiler.jobs_for(tree, homes_of(), PLAIN)
    assert [j.home.block for j in jobs] == [1, 2]
    again, waits_too = compiler.jobs_for(tree, homes_of(), PLAIN)
    assert again == []
    assert waits_too == waits_for == [j.request_id for j in jobs]
    for job in jobs:
        tree.publish(job.home.tokens)
        compiler.ended(job.request_id)
    assert waiting(compiler, waits_for).num_open == 0
    assert compiler.jobs_for(tree, homes_of(), PLAIN) == ([], [])


def test_the_first_home_computes_an_unseen_compile_prefix_for_the_others():
    first, second = Compiler().jobs_for(DictTree(), homes_of(), PLAIN)[0]
    assert first.waits_for == ()
    assert second.waits_for == (first.request_id,)


def test_an_aborted_home_is_compiled_again_by_the_next_request():
    tree, compiler = DictTree(), Compiler()
    jobs, waits_for = compiler.jobs_for(tree, homes_of(), PLAIN)
    compiler.ended(jobs[0].request_id, "aborted")
    assert waiting(compiler, waits_for).homes == [jobs[1].request_id]
    assert [j.home.block for j in compiler.jobs_for(tree, homes_of(), PLAIN)[0]] == [1]


@pytest.mark.parametrize("foreign", [Namespace("tenant", None), Namespace(None, "salt")])
def test_tenants_do_not_share_homes(foreign):
    tree, compiler = DictTree(), Compiler()
    for home in homes_of():
        tree.publish(home.tokens)
    assert compiler.jobs_for(tree, homes_of(), PLAIN)[0] == []
    assert len(compiler.jobs_for(tree, homes_of(), foreign)[0]) == 2


def test_the_same_text_twice_in_one_prompt_is_one_home():
    twice = PROMPT[:10] + PROMPT[120:180] + PROMPT[60:110] + PROMPT[60:110]
    found = homes_of(twice, (Interval(10, 70), Interval(70, 120), Interval(120, 170)))
    jobs, waits_for = Compiler().jobs_for(DictTree(), found, PLAIN)
    assert len(found) == 2
    assert len(jobs) == len(waits_for) == 1
