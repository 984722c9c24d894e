"""The roofline of a plan, against the hand-computed table for Llama-3.1-8B with k = 2048 and 16-bit KV."""

import json

import msgspec
import pytest

from sglang_blockreuse.kernels import reference_route
from sglang_blockreuse.layers import plan_explain
from sglang_blockreuse.layers.plan import Scorer, Selection
from sglang_blockreuse.layers.plan_explain import KVShape, explain
from sglang_blockreuse.layers.plan_loader import load_plan, parse_plan
from sglang_blockreuse.layers.presets import every, hybrid_oracle, index_cache, wide_pool, yoco

LLAMA_8B = KVShape(num_kv_heads=8, head_dim=128)
NUM_LAYERS = 32
COLUMNS = ("layers", "role", "anchor", "kv", "keys", "main", "scan", "rerank", "index", "total")
LENGTHS = (8192, 32768, 131072)
INT4 = Scorer(kind="int4_keys")


def reuse(step, scorer):
    return index_cache(NUM_LAYERS, every(NUM_LAYERS, step), Selection(final_k=2048), scorer=scorer)


def rerank(step, pool_size, scorer):
    selection = Selection(final_k=2048, pool_size=pool_size)
    return wide_pool(NUM_LAYERS, every(NUM_LAYERS, step), selection, scorer=scorer)


def megabytes(plan, num_tokens, batch=1):
    """KV and index keys of one step, index lists left out as in the table."""
    layers = explain(plan.bind(NUM_LAYERS, None), LLAMA_8B, num_tokens=num_tokens, batch=batch).layers
    return round(sum(cost.total_bytes - cost.index_bytes for cost in layers) / 1e6)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (load_plan("full"), (1074, 4295, 17180)),
        (reuse(1, Scorer()), (671, 2282, 8724)),
        (reuse(4, Scorer()), (369, 772, 2382)),
        (reuse(1, INT4), (419, 872, 2684)),
        (reuse(4, INT4), (306, 419, 872)),
        (rerank(4, 8192, INT4), (419, 533, 986)),
        (rerank(8, 16384, INT4), (419, 608, 835)),
        (reuse(1, Scorer(kind="page_minmax")), (336, 537, 1342)),
        (reuse(4, Scorer(kind="page_minmax")), (285, 336, 537)),
        (reuse(1, Scorer(kind="label_channels")), (285, 336, 537)),
        (reuse(1, Scorer(kind="model_indexer")), (303, 407, 822)),
        (reuse(4, Scorer(kind="model_indexer")), (277, 303, 407)),
    ],
    ids=[
        "dense",
        "exact every layer",
        "exact, a quarter full",
        "int4 every layer",
        "int4, a quarter full",
        "int4, a quarter full, pool 8192",
        "int4, an eighth full, pool 16384",
        "pages every layer",
        "pages, a quarter full",
        "label channels every layer",
        "one fp8 key every layer",
        "one fp8 key, a quarter full",
    ],
)
def test_bytes_equal_the_table(plan, expected):
    assert tuple(megabytes(plan, n) for n in LENGTHS) == expected


def test_batch_multiplies_every_part():
    plan = rerank(4, 8192, INT4).bind(NUM_LAYERS, None)
    one = explain(plan, LLAMA_8B, num_tokens=32768, batch=1)
    eight = explain(plan, LLAMA_8B, num_tokens=32768, batch=8)
    assert eight.total_bytes == 8 * one.total_bytes
    assert eight.ratio == one.ratio


@pytest.mark.parametrize("num_tokens", [1, 2047, 2048])
def test_a_history_within_final_k_costs_what_dense_costs(num_tokens):
    found = explain(reuse(4, INT4).bind(NUM_LAYERS, None), LLAMA_8B, num_tokens=num_tokens, batch=1)
    assert found.rows_are_dense
    assert found.total_bytes == found.dense_bytes
    assert "all rows run dense" in found.to_text()


def test_a_coarse_scan_makes_the_full_layer_rerank_its_own_pool():
    fused = Scorer(kind="int4_keys", scan_heads="fused", rerank_heads="all")
    plain, reranked = (
        explain(rerank(4, 8192, scorer).bind(NUM_LAYERS, None), LLAMA_8B, num_tokens=32768, batch=1)
        for scorer in (INT4, fused)
    )
    assert plain.layers[0].rerank_bytes == 0
    assert reranked.layers[0].rerank_bytes == reranked.layers[1].rerank_bytes == 8192 * 576


def test_an_oracle_scans_for_nothing_and_its_readers_add_their_window():
    plan = hybrid_oracle(4, [0], Selection(final_k=2048), own_window=128).bind(4, None)
    oracle, reader, *_ = explain(plan, LLAMA_8B, num_tokens=32768, batch=1).layers
    assert (oracle.main_bytes, oracle.scan_bytes) == (32768 * 4096, 0)
    assert reader.main_bytes == (2048 + 128) * 4096


def test_lists_per_kv_head_cost_positions_and_no_keys():
    """K = 2048 of 8 KV heads: 4 bytes for each position that is written, read, lent or taken."""
    finer = Scorer(heads="kv_head", lend_heads="layer")
    plain, lists = (
        explain(rerank(4, 8192, scorer).bind(NUM_LAYERS, None), LLAMA_8B, num_tokens=32768, batch=1).layers
        for scorer in (Scorer(), finer)
    )
    for one, other in zip(plain, lists, strict=True):
        assert (one.main_bytes, one.scan_bytes, one.rerank_bytes) == (
            other.main_bytes,
            other.scan_bytes,
            other.rerank_bytes,
        )
    assert plain[1].index_bytes == 4 * (2 * 2048 + 8192)
    assert lists[1].index_bytes == 4 * (2 * 8 * 2048 + 8192)


def test_dense_attention_over_shared_kv_reads_what_dense_reads():
    found = explain(yoco(8, 4).bind(8, None), LLAMA_8B, num_tokens=4096, batch=1)
    assert found.total_bytes == found.dense_bytes


def test_the_table_and_the_dict_say_the_same():
    found = explain(rerank(8, 16384, INT4).bind(NUM_LAYERS, None), LLAMA_8B, num_tokens=131072, batch=2)
    as_dict = json.loads(json.dumps(found.to_dict()))
    assert as_dict["total_bytes"] == sum(layer["total_bytes"] for layer in as_dict["layers"])
    assert [layer["layer"] for layer in as_dict["layers"]] == list(range(NUM_LAYERS))
    lines = found.to_text().splitlines()
    assert lines[1].split() == list(COLUMNS)
    assert [line.split()[0] for line in lines[2:-2]] == [
        "0",
        "1-7",
        "8",
        "9-15",
        "16",
        "17-23",
        "24",
        "25-31",
    ]
    assert lines[-2].endswith(f"{as_dict['ratio']:.1f} times less")
    assert lines[-1] == "index keys keep 18,433 bytes per token beside 131,072 of KV (14.1%)"


@pytest.mark.parametrize(("num_tokens", "batch"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(num_tokens, batch):
    with pytest.raises(ValueError, match="at least 1"):
        explain(load_plan("full").bind(1, None), LLAMA_8B, num_tokens=num_tokens, batch=batch)


SELECTED = Selection(final_k=2048, pool_size=8192, sink=4, window=64)
KEY = 8 * 128 * 2  # bytes of one layer's key of LLAMA_8B


def costs(scorer, num_tokens=131072, **selection):
    """The one full layer of a plan, and the reindex layer behind it."""
    chosen = msgspec.structs.replace(SELECTED, **selection)
    plan = wide_pool(2, [0], chosen, scorer=scorer).bind(2, None)
    return explain(plan, LLAMA_8B, num_tokens=num_tokens, batch=1).layers


class TestPages:
    PAGES = Scorer(kind="page_minmax")

    def test_a_scan_reads_bounds_and_pools_are_ranked_by_keys(self):
        full, reindex = costs(self.PAGES)
        assert full.scan_bytes == KEY * 131072 * 2 / 16
        # the full layer ranks its own pool too, so that attention fetches only V of what either selected
        for layer in (full, reindex):
            assert (layer.rerank_bytes, layer.main_bytes) == (KEY * 8192, KEY * 2048)

    def test_pages_of_another_size_and_steps_between_scans(self):
        full, _ = costs(Scorer(kind="page_minmax", page_size=64), refresh_every=4)
        assert full.scan_bytes == KEY * (131072 * 2 / 64 + 3 * 8192) / 4

    def test_without_a_pool_attention_reads_keys_and_values(self):
        (full, *_) = explain(
            reuse(4, self.PAGES).bind(NUM_LAYERS, None), LLAMA_8B, num_tokens=131072, batch=1
        ).layers
        assert (full.rerank_bytes, full.main_bytes) == (0, 2 * KEY * 2048)


class TestRoutedHeads:
    def sample(self, num_columns):
        return 68 + -(-(num_columns - 68) // 16)

    @pytest.mark.parametrize("residual", [False, True])
    def test_a_sample_is_read_besides_what_is_scored(self, residual):
        scorer = Scorer(scan_heads="routed", num_routed_heads=8, residual=residual)
        full, reindex = costs(scorer)
        assert full.scan_bytes == KEY * (131072 + self.sample(131072))
        assert reindex.rerank_bytes == KEY * (8192 + self.sample(8192))

    def test_only_where_heads_are_routed(self):
        full, reindex = costs(Scorer(scan_heads="routed", num_routed_heads=8, rerank_heads="all"))
        assert full.scan_bytes == KEY * (131072 + self.sample(131072))
        assert full.rerank_bytes == reindex.rerank_bytes == KEY * 8192

    def test_the_stride_is_the_laws(self):
        assert plan_explain.ROUTE_STRIDE == reference_route.STRIDE


def test_sparse_repair_is_told():
    plans = [reuse(4, INT4), parse_plan(reuse(4, INT4).to_yaml() + "prefill: sparse\n", "plan.yaml")]
    dense, sparse = (
        explain(plan.bind(NUM_LAYERS, None), LLAMA_8B, num_tokens=32768, batch=1) for plan in plans
    )
    assert (dense.to_dict()["prefill"], sparse.to_dict()["prefill"]) == ("dense", "sparse")
    assert "repair" not in dense.to_text()
    assert "tokens that repair reused blocks attend under this plan" in sparse.to_text()
    assert [cost.total_bytes for cost in dense.layers] == [cost.total_bytes for cost in sparse.layers]
