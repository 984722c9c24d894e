"""Layer plans: what is accepted, what is refused and where, and what a fingerprint depends on."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_corruptions import CORRUPTIONS
from plan_strategies import raw_plans

from sglang_blockreuse.layers.plan import PlanError
from sglang_blockreuse.layers.plan_loader import load_plan, parse_plan, shipped_plans

EXAMPLE = """
version: 1
name: example
model: {architecture: LlamaForCausalLM, num_layers: 12}
selection: {final_k: 256, pool_size: 1024, sink: 4, window: 64, min_seq_len: 1024}
scorer: {kind: exact_qk, heads: layer}
layers:
  - {layers: 0-1,  role: dense}
  - {layers: 2,    role: full}
  - {layers: 3-6,  role: reindex, anchor: 2}
  - {layers: 7-11, role: reuse,   anchor: 2}
"""
# Golden: a change here means that KV published under a plan is no longer found.
EXAMPLE_FINGERPRINT = "0b1919735e16cd9c74753f7ae21382f7a006aaaa43b96e4d97ed524fc2464343"
FULL_FINGERPRINT = "7add35312e7baeeb58630f0199e5c21a39252dc47740cdbe7b256f4d82dd1ce3"


def parse(raw, source="plan.yaml"):
    return parse_plan(yaml.safe_dump(raw, sort_keys=False), source)


def edited(old, new):
    assert EXAMPLE.count(old) >= 1
    return EXAMPLE.replace(old, new, 1)


@given(num_layers=st.integers(1, 200), architecture=st.none() | st.text())
def test_full_is_dense_for_every_model(num_layers, architecture):
    bound = load_plan("full").bind(num_layers, architecture)
    assert bound.is_dense
    assert [layer.layer for layer in bound.layers] == list(range(num_layers))


@pytest.mark.parametrize("name", shipped_plans())
def test_every_shipped_plan_loads_under_its_own_name_and_says_its_evidence(name):
    plan = load_plan(name)
    assert plan.name == name
    assert plan.source == f"layer_plans/{name}.yaml"
    assert plan.spec.evidence


def test_a_bound_plan_knows_who_reads_what_a_layer_writes():
    bound = parse_plan(EXAMPLE, "plan.yaml").bind(12, "LlamaForCausalLM")
    assert "".join(layer.role[:3] for layer in bound.layers) == "den" * 2 + "ful" + "rei" * 4 + "reu" * 5
    assert bound.layers[2].pool_readers == (3, 4, 5, 6)
    assert bound.layers[2].index_readers == (7, 8, 9, 10, 11)
    assert not bound.is_dense
    assert [bound.rows_are_dense(n) for n in (256, 1023, 1024)] == [True, True, False]


def test_fingerprints_keep_their_golden_values():
    assert parse_plan(EXAMPLE, "plan.yaml").fingerprint == EXAMPLE_FINGERPRINT
    assert load_plan("full").fingerprint == FULL_FINGERPRINT


@pytest.mark.parametrize(
    "text",
    [
        edited("name: example", "name: other\nevidence: none yet"),
        edited("sink: 4, window: 64, ", ""),
        edited("name: example", "name: example\nprefill: dense"),
        edited("scorer: {kind: exact_qk, heads: layer}\n", ""),
        edited("heads: layer", "heads: layer, lend_heads: layer"),
        edited("  - {layers: 3-6,  role: reindex, anchor: 2}\n", "")
        + "  - {layers: 5-6, anchor: 2, role: reindex}\n  - {layers: 3 - 4, anchor: 2, role: reindex}\n",
        json.dumps(yaml.safe_load(EXAMPLE), indent=7, sort_keys=True),
    ],
    ids=[
        "name and evidence",
        "defaults left out",
        "dense prefill",
        "no scorer",
        "lent as attended",
        "ranges cut and moved",
        "JSON, sorted",
    ],
)
def test_spelling_is_no_part_of_the_fingerprint(text):
    assert parse_plan(text, "plan.yaml").fingerprint == EXAMPLE_FINGERPRINT


MEANINGS = [
    ("LlamaForCausalLM", "Qwen3ForCausalLM"),
    ("num_layers: 12", "trained_sharing: false"),
    ("final_k: 256", "final_k: 257"),
    ("pool_size: 1024", "pool_size: 1025"),
    ("sink: 4", "sink: 5"),
    ("window: 64", "window: 63"),
    ("min_seq_len: 1024", "min_seq_len: 1023"),
    ("exact_qk", "int4_keys"),
    ("heads: layer", "heads: kv_head"),
    ("heads: layer", "heads: kv_head, lend_heads: layer"),
    ("heads: layer", "scan_heads: fused"),
    ("heads: layer", "scan_heads: fused, rerank_heads: all"),
    ("layers: 2,    role: full", "layers: 2, role: full, attend: all"),
    ("reuse,   anchor: 2", "reuse, anchor: 3"),
    ("reuse,   anchor: 2", "reuse, anchor: 2, kv_from: 2"),
    ("reuse,   anchor: 2", "reuse, anchor: 2, kv_from: 2, own_window: 8"),
    ("reindex, anchor: 2", "reindex, anchor: 2, key_from: 2"),
    ("reindex, anchor: 2", "reuse, anchor: 2"),
    ("name: example", "name: example\nprefill: sparse"),
]


def test_every_meaning_has_its_own_fingerprint():
    found = [parse_plan(edited(old, new), "plan.yaml").fingerprint for old, new in MEANINGS]
    assert len({EXAMPLE_FINGERPRINT, *found}) == len(MEANINGS) + 1


@given(raw=raw_plans())
def test_writing_and_reading_a_plan_keeps_what_it_means(raw):
    plan = parse(raw)
    again = parse_plan(plan.to_yaml(), "again.yaml")
    as_json = parse_plan(json.dumps(raw), "plan.json")
    assert plan.fingerprint == again.fingerprint == as_json.fingerprint
    num_layers = raw["model"]["num_layers"]
    bound, bound_again = plan.bind(num_layers, None), again.bind(num_layers, None)
    assert bound.layers == bound_again.layers
    assert bound.prefill == bound_again.prefill == raw["prefill"]


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corruption: corruption.__name__)
@examples(40)
@given(data=st.data())
def test_one_corruption_is_refused_at_its_place(corrupt, data):
    raw = data.draw(raw_plans(every_role=True))
    parse_plan(json.dumps(raw), "plan.json")
    path = corrupt(raw)
    with pytest.raises(PlanError) as caught:
        parse_plan(json.dumps(raw), "plan.json")
    assert caught.value.path == path
    assert str(caught.value).startswith(f"plan.json: {path}: got ")


def test_an_error_says_file_place_value_rule_and_fix_and_survives_pickling():
    with pytest.raises(PlanError) as caught:
        parse_plan(edited("reuse,   anchor: 2", "reuse, anchor: 12"), "layer_plans/x.yaml")
    assert str(pickle.loads(pickle.dumps(caught.value))) == (
        "layer_plans/x.yaml: layers[3].anchor: got 12, but layer 7 takes the indices of its anchor and its source "
        "must lie before it (0..6). Name an earlier full layer or give layer 7 the role full."
    )


@pytest.mark.parametrize(
    ("text", "source", "words"),
    [
        ("version: 1\nversion: 1\n", "plan.yaml", ["line 2, column 1", "'version' stands twice"]),
        (edited("anchor: 2}", "anchor: 2, anchor: 2}"), "plan.yaml", ["line 10", "'anchor' stands twice"]),
        ('{"version": 1, "version": 1}', "plan.json", ["'version' stands twice"]),
        ("? [1]\n: 2", "plan.yaml", ["unhashable"]),
        ("name: 2024-99-99", "plan.yaml", ["not YAML", "month"]),
        ("name: \x00", "plan.yaml", ["not YAML"]),
        ("layers: &a [*a]", "plan.yaml", ["layers[0]: got [[", "a mapping"]),
        ("layers: [", "plan.yaml", ["line 1"]),
        ("{", "plan.json", ["line 1, column 2", "not JSON"]),
        ("", "plan.yaml", ["got None", "a mapping"]),
        ("- 1", "plan.yaml", ["got [1]", "a mapping"]),
        (edited("version: 1", "version: 1\n3: 4"), "plan.yaml", ["got 3", "every key is text"]),
        (edited("role: full", "role: ful"), "plan.yaml", ["layers[1].role", "'ful'", "Did you mean full."]),
        (edited("anchor: 2}", "anchr: 2}"), "plan.yaml", ["layers[2].anchr", "Did you mean anchor."]),
        (edited("final_k: 256", "final_k: '256'"), "plan.yaml", ["selection.final_k", "an integer"]),
        ("{version: 1, name: x, layers: []}", "plan.yaml", ["layers: got []", "every layer needs a role"]),
        (edited("version: 1", "version: 2"), "plan.yaml", ["version: got 2", "only 1 can stand here"]),
        (edited("3-6", "3-99999999"), "plan.yaml", ["layers[2].layers", "end at 1023"]),
    ],
)
def test_a_file_that_cannot_be_read_says_where(text, source, words):
    with pytest.raises(PlanError) as caught:
        parse_plan(text, source)
    for word in [source, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("num_layers", "architecture", "path"),
    [(11, None, "model.num_layers"), (12, "Qwen3ForCausalLM", "model.architecture")],
)
def test_a_plan_of_another_model_does_not_bind(num_layers, architecture, path):
    with pytest.raises(PlanError) as caught:
        parse_plan(EXAMPLE, "plan.yaml").bind(num_layers, architecture)
    assert caught.value.path == path


@pytest.mark.parametrize(("num_layers", "path"), [(11, "layers[3].layers"), (13, "layers")])
def test_a_plan_without_a_model_is_counted_when_it_binds(num_layers, path):
    plan = parse_plan(edited(", num_layers: 12", ""), "plan.yaml")
    assert plan.bind(12, None).num_layers == 12
    with pytest.raises(PlanError) as caught:
        plan.bind(num_layers, None)
    assert caught.value.path == path


def test_sharing_kv_or_keys_warns_unless_the_checkpoint_was_trained_for_it():
    text = edited("reuse,   anchor: 2", "reuse, anchor: 2, kv_from: 2").replace(
        "reindex,", "reindex, key_from: 2,"
    )
    kv, keys = parse_plan(text, "plan.yaml").bind(12, None).warnings
    assert kv.startswith("kv_from: layers [7, 8, 9, 10, 11]")
    assert keys.startswith("key_from: layers [3, 4, 5, 6]")
    trained = text.replace("num_layers: 12", "num_layers: 12, trained_sharing: true")
    assert parse_plan(trained, "plan.yaml").bind(12, None).warnings == ()
    assert parse_plan(EXAMPLE, "plan.yaml").bind(12, None).warnings == ()


def test_a_dense_plan_that_shares_kv_is_not_the_same_as_no_plan():
    text = "version: 1\nname: x\nlayers: [{layers: 0, role: dense}, {layers: 1, role: dense, kv_from: 0}]"
    assert not parse_plan(text, "plan.yaml").bind(2, None).is_dense


def test_a_path_loads_and_a_shipped_name_wins(tmp_path, monkeypatch):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(yaml.safe_load(EXAMPLE)))
    assert load_plan(file).fingerprint == load_plan(str(file)).fingerprint == EXAMPLE_FINGERPRINT
    monkeypatch.chdir(tmp_path)
    Path("full").write_text("not a plan")
    assert load_plan("full").fingerprint == FULL_FINGERPRINT


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ful", ["'ful'", "plans that ship: ", "full", "Did you mean full."]),
        ("no/such.yaml", ["'no/such.yaml'", "neither a file nor", "path of a plan file"]),
    ],
)
def test_an_unknown_name_lists_what_there_is(name, words):
    with pytest.raises(PlanError) as caught:
        load_plan(name)
    for word in words:
        assert word in str(caught.value)


def test_a_file_of_another_kind_or_encoding_is_refused(tmp_path):
    (tmp_path / "plan.txt").write_text(EXAMPLE)
    (tmp_path / "plan.yaml").write_bytes(b"name: \xff")
    with pytest.raises(PlanError, match=r"\.yaml, \.yml, \.json"):
        load_plan(tmp_path / "plan.txt")
    with pytest.raises(PlanError, match="not UTF-8"):
        load_plan(tmp_path / "plan.yaml")


def test_plans_need_neither_the_host_nor_torch():
    code = (
        "import sys, sglang_blockreuse.layers.presets, sglang_blockreuse.layers.plan_explain\n"
        "print([m for m in ('sglang', 'torch', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
