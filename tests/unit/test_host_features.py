"""What of the host reads a batch request by request: read again from the installed SGLang and held to our tables.

Whoever makes one of these fail has met a new reader. Decide whether folding carries it (then say how, and test it in
tests/engine/test_neighbours_hidden_states.py or beside it), whether the server must be refused (features.REFUSED), or
whether requests that use it are not folded (blocks/arrive.py).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_blockreuse.blocks.fields import FORWARD_BATCH, named
from sglang_blockreuse.commands.check import find_features
from sglang_blockreuse.features import CARRIED, REFUSED, UnsupportedServer, check_server

ROOT = Path(__file__).parents[2]
SRT = "sglang.srt."
KIND = {name: kind for kind in FORWARD_BATCH for name in named(FORWARD_BATCH, kind)}

# Where the host reads a ForwardBatch once the model has run and it is unfolded again, by module and function.
AFTER_THE_MODEL = {
    "managers.tp_worker": ("TpModelWorker.forward_batch_generation",),
    "model_executor.model_runner": (
        "ModelRunner.forward",
        "ModelRunner._preprocess_logits",
        "ModelRunner.sample",
        "ModelRunner.compute_logprobs_only",
    ),
    "beam_search.logits_capture": ("capture_pre_sample_logits",),
}
# ... and where it reads one that counts one entry per request by our hook.
FOR_LOGITS = {"layers.logits_processor": ("LogitsMetadata.from_forward_batch",)}
# What is read there though it counts rows or tokens, and why that is right.
EXCUSED = {
    "positions": "of decode steps only",
    "input_ids": "its device only",
    "kv_loc_plan": "handed to speculative workers only, which are refused",
    "mm_input_embeds": "handed to speculative workers only, which are refused",
}
# What the host's result carries to the requests, and why it is right behind a folded forward.
RESULTS = {
    "per request, of the logits": "next_token_logits next_token_logprobs next_token_top_logprobs_val "
    "next_token_top_logprobs_idx next_token_token_ids_logprobs_val next_token_token_ids_logprobs_idx "
    "sampling_mask_output next_token_sampling_mask_idx next_token_sampling_logprobs next_token_sampling_mask_status "
    "beam auxiliary_device_output customized_info",
    "per token whose log-probability is wanted, all of them computed": "input_token_logprobs input_top_logprobs_val "
    "input_top_logprobs_idx input_token_ids_logprobs_val input_token_ids_logprobs_idx input_logprobs_copy_done",
    "per computed token, counted by extend_input_len_per_req": "hidden_states",
    "read by speculative, diffusion or in-process consumers only": "hidden_states_token_indices last_hidden_states "
    "full_logits mm_input_embeds",
}


@functools.cache
def source(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(SRT + module)))


def attributes_read(module: str, functions: tuple[str, ...], variable: str) -> set[str]:
    """Attributes of a variable that some functions of a module read, those of functions inside them included."""
    found: set[str] = set()
    for wanted in functions:
        node: ast.AST = source(module)
        for part in wanted.split("."):
            node = next(
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and child.name == part
            )
        found |= {
            child.attr
            for child in ast.walk(node)
            if isinstance(child, ast.Attribute)
            and isinstance(child.value, ast.Name)
            and child.value.id == variable
            and isinstance(child.ctx, ast.Load)
        }
    return found


def fields_read(places: dict[str, tuple[str, ...]]) -> set[tuple[str, str]]:
    return {
        (module, name)
        for module, functions in places.items()
        for name in attributes_read(module, functions, "forward_batch")
        if name in KIND
    }


def test_what_is_read_after_the_model_counts_requests_again():
    """A field that still counts rows or computed tokens there would hand one request what is another's."""
    wrong = {
        (module, name)
        for module, name in fields_read(AFTER_THE_MODEL)
        if KIND[name] in ("row", "token", "logits") and name not in EXCUSED
    }
    assert not wrong, (
        f"{sorted(wrong)}: give it back per request in blocks/rows.py, or say in EXCUSED why not"
    )


def test_what_the_logits_processor_reads_counts_requests():
    allowed = ("logits", "request", "step", "given", "refused")
    wrong = {(m, n) for m, n in fields_read(FOR_LOGITS) if KIND[n] not in allowed and n not in EXCUSED}
    assert not wrong, f"{sorted(wrong)}: show it per request in hooks.logits_metadata"


def test_the_hook_shows_the_logits_processor_what_the_table_says():
    from sglang_blockreuse import hooks

    code = ast.parse(inspect.getsource(hooks.logits_metadata))
    replaced = {
        keyword.arg for node in ast.walk(code) if isinstance(node, ast.Call) for keyword in node.keywords
    }
    assert replaced >= set(named(FORWARD_BATCH, "logits"))


def test_the_readers_are_found():
    """Negative control: the places exist and read what the tests above are about."""
    found = {name for _, name in fields_read(AFTER_THE_MODEL)}
    assert {"seq_lens", "req_pool_indices", "watermark_prompt_tail_ids", "sampling_info"} <= found
    assert {"extend_seq_lens", "extend_logprob_start_lens_cpu"} <= {n for _, n in fields_read(FOR_LOGITS)}
    assert (
        attributes_read("managers.tp_worker", ("TpModelWorker.forward_batch_generation",), "nobody") == set()
    )


def test_every_field_of_the_host_s_answer_is_known():
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    known = [name for names in RESULTS.values() for name in names.split()]
    fields = {field.name for field in dataclasses.fields(LogitsProcessorOutput)}
    assert set(known) == fields, (
        "a new field may count rows or computed tokens: decide, and say so in RESULTS"
    )
    assert len(known) == len(set(known))


def test_requests_are_cut_out_of_results_by_what_was_computed():
    """The only numbers by which the host walks over tokens of several requests are those that our hook replaces."""
    processor = "managers.scheduler_components.batch_result_processor"
    prefill = ("BatchResultProcessor.process_batch_result_prefill",)
    if not hasattr(importlib.import_module(SRT + processor), "BatchResultProcessor"):
        names = [n.name for n in source(processor).body if isinstance(n, ast.ClassDef)]
        prefill = tuple(f"{n}.process_batch_result_prefill" for n in names if "Processor" in n)
    assert {"extend_lens", "prefix_lens", "extend_logprob_start_lens", "seq_lens"}.isdisjoint(
        attributes_read(processor, prefill, "batch")
    )
    read = attributes_read(processor, prefill, "result")
    assert {"extend_input_len_per_req", "extend_logprob_start_len_per_req"} <= read


class TestTheTables:
    def test_names_are_unique_and_every_refusal_says_what_to_do(self):
        names = [feature.name for feature in (*CARRIED, *REFUSED)]
        assert len(names) == len(set(names))
        assert all(feature.fix.endswith(".") for feature in REFUSED)

    def test_every_switch_that_is_refused_is_a_switch_of_the_host(self):
        """A renamed flag would silently be allowed again."""
        from sglang.srt.server_args import ServerArgs

        flags = [f.name.strip("-").replace("-", "_") for f in REFUSED if f.name.startswith("--")]
        switches = [*flags, "dllm_algorithm"]
        assert len(switches) > 5
        assert [name for name in switches if not hasattr(ServerArgs, name)] == []

    @pytest.mark.parametrize(
        "name", ["enable_pdmux", "enable_two_batch_overlap", "enable_hisparse", "dllm_algorithm"]
    )
    def test_a_switch_is_refused_by_its_name(self, name):
        args = SimpleNamespace(server_args=SimpleNamespace(**{name: True}))
        off = SimpleNamespace(server_args=SimpleNamespace(**{name: False}))
        feature = next(f for f in REFUSED if name.replace("_", "-") in f.name)
        assert f"--{name.replace('_', '-')}" in feature.found(args)
        assert feature.found(off) is None

    def test_the_first_refusal_ends_the_start_with_what_why_and_what_to_do(self, monkeypatch):
        pools = next(f for f in REFUSED if "--is-embedding" in f.name)
        monkeypatch.setattr("sglang_blockreuse.features.REFUSED", (pools,))
        with pytest.raises(UnsupportedServer, match=r"pools the hidden states.*Serve it without"):
            check_server(SimpleNamespace(model_config=SimpleNamespace(is_generation=False)))
        check_server(SimpleNamespace(model_config=SimpleNamespace(is_generation=True)))

    def test_check_lists_every_feature(self):
        assert [f.name for f in find_features()] == [f.name for f in (*CARRIED, *REFUSED)]

    def test_the_limits_say_what_is_refused(self):
        limits = " ".join((ROOT / "docs" / "limits.md").read_text().split())
        assert [f.name for f in REFUSED if f.name not in limits] == []

    def test_the_operations_page_says_what_is_carried_and_how(self):
        page = (ROOT / "docs" / "operations.md").read_text()
        assert [f.name for f in CARRIED if f"| {f.name} | {f.how} |" not in page] == []
