"""A library on storage: it answers a restarted server, and nobody whose KV it is not."""

from __future__ import annotations

import pytest
from laws.host_memory import DOC_LEN, SYSTEM_LEN, logprobs
from laws.storage import AFTER, BEFORE, NUM_HOMES, fill, flags_of, generate, refusal
from looks import counts, state_of
from prompts import usage
from servers import lease, with_test_plugin
from tiny_models import talking_model
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def store(nursery, tmp_path_factory):
    """A folder that a server has filled, which is gone: it holds exact KV only."""
    folder = tmp_path_factory.mktemp("store")
    with nursery.server(
        talking_model(), *flags_of(folder), log=folder.parent / "first.log", env=with_test_plugin()
    ) as server:
        num_tokens = fill(server, folder)
    exact = SYSTEM_LEN + len(BEFORE) * DOC_LEN
    # beside the documents what stands before the prompt's first copy; a local path would be the prompt once more
    assert exact <= num_tokens < exact + 40
    return folder


@pytest.fixture(scope="module")
def server(nursery, store):
    with nursery.server(
        talking_model(), *flags_of(store), log=store.parent / "second.log", env=with_test_plugin()
    ) as running:
        yield running


def test_a_restarted_server_reuses_what_storage_has(server):
    told = generate(server, AFTER)
    with lease() as large:
        generate(large, BEFORE)
        want = generate(large, AFTER)
    found, would = usage(told), usage(want)
    assert (found["compiled_tokens"], found["storage_tokens"]) == (0, NUM_HOMES * DOC_LEN)
    assert found["reused_tokens"] == would["reused_tokens"]
    assert logprobs(told) == pytest.approx(logprobs(want), abs=FULL_PREFILL_LOGPROB)
    assert counts(server)["tier_tokens_total storage"] == NUM_HOMES * DOC_LEN


@pytest.mark.parametrize("key", ["cache_salt", "extra_key"])
def test_another_tenant_finds_nothing_on_storage(server, key):
    server.flush_cache()
    found = usage(generate(server, AFTER, **{key: "another"}))
    assert found["storage_tokens"] == 0
    assert found["compiled_tokens"] == NUM_HOMES * DOC_LEN


def test_flushing_the_cache_leaves_storage(server):
    server.flush_cache()
    pool = state_of(server)["pool"]
    assert (pool["free"], pool["host_free"]) == (pool["size"], pool["host_size"])
    assert usage(generate(server, AFTER))["storage_tokens"] == NUM_HOMES * DOC_LEN


def test_weights_are_not_updated_under_a_store_of_the_old_ones(server):
    said = refusal(server, "POST", "/update_weights_from_disk", model_path=str(talking_model()))
    assert "Detach it" in said
    server.flush_cache()
    assert usage(generate(server, AFTER))["storage_tokens"] == NUM_HOMES * DOC_LEN, "nothing has changed"
