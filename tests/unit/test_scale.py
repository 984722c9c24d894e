"""Laws of the scale simulator: closed forms where there are any, a brute-force cache, costs that are found again."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest
import scale
from hypothesis import given
from hypothesis import strategies as st
from scale_model import Costs, Fleet, Lru, Server, Workload, expected_hits, prompts_of, simulate

COSTS = Costs(prefill_s=0.002, decode_s=0.05)
ENDLESS = Fleet(pool_len=float("inf"))
WORKLOAD = Workload(num_requests=300)
STOCK, BLOCKS = Server(None), Server(0.1)


@pytest.mark.parametrize("zipf", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("server", [STOCK, BLOCKS], ids=["stock", "blocks"])
def test_one_replica_and_an_endless_cache_have_the_analytic_hit_rate(zipf, server):
    """One document per prompt: stock's prefixes and homes are the same thing."""
    fleet = dataclasses.replace(ENDLESS, running=1)
    runs = [
        Workload(num_requests=200, num_documents=40, per_prompt=1, zipf=zipf, seed=seed) for seed in range(60)
    ]
    found = [simulate(run, COSTS, fleet, server).document_hits for run in runs]
    # stock publishes a prefix when its request finishes, which is when the next one comes
    late = 1 / 200 if server is STOCK else 0.0
    error = 4 * statistics.stdev(found) / len(found) ** 0.5
    assert statistics.mean(found) == pytest.approx(expected_hits(runs[0]), abs=error + late)


def test_the_closed_form_is_the_sum_it_stands_for():
    workload = Workload(num_requests=7, num_documents=3, per_prompt=1, zipf=1.0)
    weights = [6 / 11, 3 / 11, 2 / 11]
    terms = [sum(p * (1 - (1 - p) ** k) for p in weights) for k in range(7)]
    assert expected_hits(workload) == pytest.approx(statistics.mean(terms))
    with pytest.raises(ValueError, match="one document per prompt"):
        expected_hits(WORKLOAD)


TOUCHES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), max_size=60)
SIZES = (3, 5, 8, 13, 21, 2, 1, 34)


def brute_force(cache: type[Lru], touches) -> bool:
    """Whether a cache does what a list does that is searched from the front; an action of 60 is a touch."""
    lru, model, capacity = cache(40), [], 40
    for key, action in touches:
        if action < 41:
            capacity = action
            lru.resize(capacity)
        else:
            if lru.touch(key, SIZES[key]) != (key in model):
                return False
            if key in model or SIZES[key] <= capacity:
                model = [k for k in model if k != key] + [key]
        while sum(SIZES[k] for k in model) > capacity:
            model.pop(0)
        if list(lru) != model or lru.used != sum(SIZES[k] for k in model):
            return False
    return True


@given(TOUCHES)
def test_the_cache_is_least_recently_used(touches):
    assert brute_force(Lru, touches)


def test_a_cache_that_forgets_to_touch_is_seen():
    class Fifo(Lru):
        def touch(self, key, size):
            return True if key in self else super().touch(key, size)

    assert not brute_force(Fifo, [(0, 60), (1, 60), (0, 60), (7, 60)])


def test_a_larger_cache_never_finds_less():
    found = [
        simulate(WORKLOAD, COSTS, Fleet(pool_len=pool), BLOCKS).document_hits
        for pool in (14_000, 20_000, 40_000, 80_000, float("inf"))
    ]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_no_pool_finds_nothing_and_computes_everything():
    outcome = simulate(WORKLOAD, COSTS, Fleet(pool_len=0), STOCK)
    assert outcome.document_hits == 0
    assert outcome.computed_per_request == WORKLOAD.prompt_len - WORKLOAD.system_len


@pytest.mark.parametrize("budget", [0.0, 0.05, 0.5])
def test_known_documents_cost_the_question_and_the_budget(budget):
    shown = dataclasses.replace(WORKLOAD, shown=True)
    outcome = simulate(shown, COSTS, ENDLESS, Server(budget))
    assert outcome.document_hits == 1
    blocks = WORKLOAD.prompt_len - WORKLOAD.question_len
    assert outcome.computed_per_request == WORKLOAD.question_len + int(budget * blocks)


def test_throughput_is_work_over_the_busiest_replica():
    shown = dataclasses.replace(WORKLOAD, shown=True)
    work = COSTS.prefill_s * WORKLOAD.question_len + COSTS.decode_s * WORKLOAD.answer_len
    one = simulate(shown, COSTS, ENDLESS, Server(0.0))
    assert one.throughput == pytest.approx(1 / work)
    four = simulate(shown, COSTS, dataclasses.replace(ENDLESS, replicas=4), Server(0.0))
    assert (four.throughput, four.imbalance) == (pytest.approx(4 / work), pytest.approx(1))


def test_ranks_share_the_work_and_their_pools():
    shown = dataclasses.replace(WORKLOAD, shown=True)
    two = dataclasses.replace(ENDLESS, tensor_parallel=2, efficiency=0.5)
    ratio = (
        simulate(shown, COSTS, two, BLOCKS).throughput / simulate(shown, COSTS, ENDLESS, BLOCKS).throughput
    )
    assert ratio == pytest.approx(1.5)
    halves, whole = Fleet(pool_len=20_000, tensor_parallel=2), Fleet(pool_len=40_000)
    found = [simulate(WORKLOAD, COSTS, fleet, BLOCKS).document_hits for fleet in (halves, whole)]
    assert found[0] == found[1]


def test_routing_by_blocks_finds_more_than_routing_in_turn():
    workload = dataclasses.replace(WORKLOAD, num_documents=300, num_requests=1000)
    found = {
        routing: simulate(workload, COSTS, Fleet(replicas=4, routing=routing), BLOCKS).document_hits
        for routing in ("round_robin", "blocks")
    }
    assert found["blocks"] > 1.1 * found["round_robin"]


def test_routing_by_prefix_needs_prefixes():
    """Shuffled documents share no more than their first; one document per prompt is all prefix."""
    shuffled = dataclasses.replace(WORKLOAD, num_documents=300, num_requests=1000)
    alone = dataclasses.replace(shuffled, per_prompt=1, doc_len=1500)

    def gain(workload):
        in_turn, by_prefix = (
            simulate(workload, COSTS, Fleet(replicas=4, pool_len=60_000, routing=routing), STOCK)
            for routing in ("round_robin", "prefix")
        )
        return by_prefix.document_hits - in_turn.document_hits

    assert gain(alone) > 0.1
    assert abs(gain(shuffled)) < 0.05


def test_the_same_seed_gives_the_same_requests():
    assert prompts_of(WORKLOAD) == prompts_of(dataclasses.replace(WORKLOAD, zipf=1.0))
    assert prompts_of(WORKLOAD) != prompts_of(dataclasses.replace(WORKLOAD, seed=1))


def made_run(noise=0.0):
    """A file of `bench serving` whose durations follow the cost model."""
    options = {"turns": 1, "unmarked_share": 0.0, "rate": "inf", "traffic": "warm", "requests": 24, "seed": 0}
    options |= {"documents": 50, "per_prompt": 6, "zipf": 1.0, "new_tokens": 16, "clients": 8}
    options |= {"max_total_tokens": 10**9, "budget": 0.1}
    rounds = []
    for number in range(2):
        for arm in ("stock", "seam"):
            repaired = 150 if arm == "seam" else 0
            computed = 24 * (repaired + 20) if arm == "seam" else 24 * 1400
            duration = COSTS.prefill_s * computed + COSTS.decode_s * 24 * 16
            tokens = {"prefix": 0, "reused": 0, "repaired": 24 * repaired, "fresh": 24 * 20}
            one = {
                "record": "round",
                "arm": arm,
                "round": number,
                "completed": 24,
                "total_input_tokens": 24 * 1565,
            }
            one |= {"duration": duration * (1 + noise * number), "hit_share": 1 - 1400 / 1565}
            rounds.append({**one, "blockreuse_tokens": tokens, "blockreuse_home_tokens": 0})
    return [{"record": "serving", "options": options}, *rounds]


def test_costs_are_found_again():
    found = made_run()
    costs = scale.fit(scale.rounds_of(found), 16)
    assert (costs.prefill_s, costs.decode_s) == (
        pytest.approx(COSTS.prefill_s),
        pytest.approx(COSTS.decode_s),
    )


def test_a_round_is_predicted_from_the_others():
    exact = [p for p in scale.validate(made_run()) if p.arm == "seam"]
    assert [abs(p.error) < 0.02 for p in exact] == [True, True]
    slower = [p for p in scale.validate(made_run(noise=1.0)) if p.arm == "seam"]
    assert slower[0].error < -0.4
    assert slower[1].error > 0.8


def test_a_run_that_cannot_tell_costs_apart_is_refused():
    found = [r for r in made_run() if r.get("arm") != "stock"]
    with pytest.raises(ValueError, match="stock and seam"):
        scale.fit(scale.rounds_of(found), 16)
    with pytest.raises(ValueError, match=r"serving\.jsonl"):
        scale.run_of([{"record": "quality"}])


def test_the_command_writes_its_page(tmp_path, capsys):
    costs = tmp_path / "serving.jsonl"
    costs.write_text("".join(json.dumps(record) + "\n" for record in made_run()))
    words = ["--requests", "40", "--documents", "20", "--pool-tokens", "30000", "--replicas", "1", "2"]
    assert scale.main(["--out", str(tmp_path / "out"), "--costs", str(costs), *words]) == 0
    shown = capsys.readouterr().out
    assert "Largest error of the throughput" in shown
    assert (tmp_path / "out" / "scale.md").read_text() in shown
    assert (tmp_path / "out" / "scale.png").stat().st_size > 10_000


def test_costs_must_come_from_somewhere(tmp_path, capsys):
    with pytest.raises(SystemExit):
        scale.main(["--out", str(tmp_path)])
    assert "--prefill-ms" in capsys.readouterr().err
