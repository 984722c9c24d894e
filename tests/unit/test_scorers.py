"""What scores in place of the keys: every kind against the law, and copies that are of the keys they stand beside."""

from __future__ import annotations

import hashlib

import pytest
import torch
from sparse_checks import LENS, SELECTION, check, same
from sparse_world import D, G, H, World, make_plan
from tolerances import EXACT, SCORER_RECALL

from sglang_blockreuse.kernels import reference_select as law
from sglang_blockreuse.kernels.reference_index import (
    IndexMap,
    index_channels,
    index_codes,
    label_map,
    measured_ranges,
)
from sglang_blockreuse.layers.index_keys import Int4Copy
from sglang_blockreuse.layers.index_weights import IndexWeights, WeightsError, model_identity
from sglang_blockreuse.layers.share_state import StaleShareState

NUM_LEARNED = 32
CHANNELS = {"label_channels": 16, "learned": NUM_LEARNED}


def index_map(kind: str, q: torch.Tensor, k: torch.Tensor) -> IndexMap:
    """A map from samples: the label channels of Double Sparsity, or the keys' principal directions."""
    if kind == "label_channels":
        key, query = label_map(law.label_channels(q.float(), k.float(), CHANNELS[kind]), H * G, D)
    else:
        flat = k.float().flatten(1)
        basis = torch.linalg.eigh(flat.T @ flat).eigenvectors[:, -CHANNELS[kind] :].T.contiguous()
        key = basis[None]
        query = basis.view(-1, H, D).repeat_interleave(G, 1).transpose(0, 1).contiguous()
    unit = torch.ones(key.shape[:2])
    channels = index_channels(IndexMap(key, query, 0 * unit, unit), k)
    return IndexMap(key, query, *measured_ranges(channels))


def make_world(kind, tmp_path, pattern="DFXR", lens=LENS, dtype=torch.float32, model="m", **scorer):
    """A world whose plan has this scorer, with maps made from its own keys where it needs some."""
    plain = World(make_plan(pattern, **SELECTION), lens, dtype=dtype)
    words = {"kind": kind, **scorer}
    maps = {}
    if kind in CHANNELS:
        own = torch.cat([plain.table[request, :n] for request, n in zip(plain.requests, lens, strict=True)])
        scoring = [layer.layer for layer in plain.plan.layers if layer.scores]
        maps = {i: index_map(kind, plain.q[i], plain.k[i][own.long()]) for i in scoring}
        digest = IndexWeights(kind, model, maps).save(tmp_path / "w.safetensors")
        words |= {"weights": "w.safetensors", "weights_sha256": digest}
    world = World(make_plan(pattern, scorer=words, folder=tmp_path, **SELECTION), lens, dtype=dtype)
    world.maps = maps
    return world


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", ["FFF", "DFXRXR"])
@pytest.mark.parametrize("kind", ["int4_keys", "label_channels", "learned"])
def test_every_role_attends_to_what_the_law_selects(kind, pattern, dtype, tmp_path):
    world = make_world(kind, tmp_path, pattern, dtype=dtype)
    for layer, (got, expected) in enumerate(
        zip(world.run_all(world.decoder(strict=True)), world.expected(), strict=True)
    ):
        check(got, expected, dtype)
        assert not torch.isnan(got).any(), f"layer {layer} read a slot that no row owns"


@pytest.mark.parametrize("kind", ["int4_keys", "label_channels"])
def test_lists_per_kv_head(kind, tmp_path):
    world = make_world(kind, tmp_path, "FXR", heads="kv_head")
    for got, expected in zip(world.run_all(world.decoder(strict=True)), world.expected(), strict=True):
        check(got, expected, torch.float32)


@pytest.mark.parametrize("kind", ["exact_qk", "int4_keys", "label_channels"])
@pytest.mark.parametrize("rerank_heads", [None, "all"])
def test_fused_heads_scan_by_the_mean_query_of_a_kv_head(kind, rerank_heads, tmp_path):
    words = {"scan_heads": "fused"} | ({} if rerank_heads is None else {"rerank_heads": rerank_heads})
    (tmp_path / "plain").mkdir()
    world = make_world(kind, tmp_path, "FXRF", **words)
    plain = make_world(kind, tmp_path / "plain", "FXRF")
    got, other = world.run_all(world.decoder(strict=True)), plain.run_all(plain.decoder())
    for layer, expected in enumerate(world.expected()):
        check(got[layer], expected, torch.float32)
        assert not torch.equal(got[layer], other[layer]), "all heads would have chosen the same"


@pytest.mark.parametrize("kind", ["int4_keys", "label_channels", "learned"])
def test_the_correction_is_gathered_along(kind, tmp_path):
    from sglang_blockreuse.kernels.cpu_attention import KeyBias

    world = make_world(kind, tmp_path)
    world.bias = KeyBias(world.tags, -0.7, -2.0)
    for got, expected in zip(world.run_all(world.decoder()), world.expected(), strict=True):
        check(got, expected, torch.float32)


@pytest.mark.parametrize("kind", ["int4_keys", "label_channels", "learned"])
def test_a_copy_holds_what_the_law_quantises(kind, tmp_path):
    world = make_world(kind, tmp_path, dtype=torch.bfloat16)
    decoder = world.decoder()
    world.run_all(decoder)
    for request, n in zip(world.requests, LENS, strict=True):
        slots = world.table[request, :n].long()
        copy, keys = decoder.keys.copies[1], world.k[1][slots]
        if kind == "int4_keys":
            expected = law.quantise_int4(keys)
            for got, want in zip(copy.keys, expected, strict=True):
                torch.testing.assert_close(got[slots], want, atol=EXACT[0], rtol=EXACT[1])
        else:
            # products of a map are summed in an order of their own, so a border between codes may fall either way
            assert not copy.differs(slots, keys).any()
            assert (copy.codes[slots] != index_codes(world.maps[1], keys)).float().mean() < 1e-3


@pytest.mark.parametrize("kind", ["exact_qk", "int4_keys"])
def test_key_from_scores_another_layers_keys_and_keeps_no_copy(kind):
    """The layer's own queries over its source's keys: one array, or one copy, for both."""
    scorer, sharing = {"kind": kind}, {2: 1, 3: 1}
    shared = World(make_plan("DFFXR", scorer=scorer, key_from=sharing, **SELECTION), LENS)
    own = World(make_plan("DFFXR", scorer=scorer, **SELECTION), LENS)
    decoder = shared.decoder(strict=True)
    got, other = shared.run_all(decoder), own.run_all(own.decoder())
    for layer, expected in enumerate(shared.expected()):
        check(got[layer], expected, torch.float32)
        if layer in sharing:
            assert not torch.equal(got[layer], other[layer]), "its own keys would have chosen the same"
    if kind == "int4_keys":
        assert set(decoder.keys.copies) == {1}


class TestStaleCopies:
    KINDS = pytest.mark.parametrize("kind", ["int4_keys", "label_channels", "learned"])

    def rewritten(self, kind, tmp_path, *, announced, strict=False):
        """A world that was decoded, whose third row then got other keys in the slots of positions 20 to 60."""
        world = make_world(kind, tmp_path)
        decoder = world.decoder(strict=strict)
        world.run_all(decoder)
        slots = world.table[world.requests[2], 20:60].long()
        for pool in world.k:
            pool[slots] = torch.randn(len(slots), H, D) * 2
        world.indices.cache_clear()
        if announced:
            decoder.written(slots)
        return world, decoder

    @KINDS
    def test_an_announced_write_is_copied_before_it_is_scanned(self, kind, tmp_path):
        world, decoder = self.rewritten(kind, tmp_path, announced=True, strict=True)
        for got, expected in zip(world.run_all(decoder), world.expected(), strict=True):
            check(got, expected, torch.float32)

    @KINDS
    def test_an_unannounced_write_is_detected(self, kind, tmp_path):
        """Negative control: the copy is of the former key, the selection differs, and the audit says so."""
        world, decoder = self.rewritten(kind, tmp_path, announced=False, strict=True)
        with pytest.raises(StaleShareState, match=r"layer 1: slots .* were rewritten"):
            world.run_all(decoder)

    @pytest.mark.parametrize(
        "rewrite",
        [lambda k: 2 * k, lambda k: torch.cat((k[..., :1], k[..., 1:-1].flip(-1), k[..., -1:]), -1)],
        ids=["the range", "the codes"],
    )
    def test_an_unannounced_write_of_half_of_a_copy_is_detected(self, rewrite):
        """Twice the key has its codes, in another range; the inner channels turned round have its range."""
        copy, slots = Int4Copy(8, H, D), torch.arange(8)
        k = torch.randn(8, H, D)
        k[..., 0], k[..., -1] = -4, 4  # the ends of every range
        copy.write(slots, k)
        assert not copy.differs(slots, k).any()
        assert copy.differs(slots, rewrite(k)).all()

    @KINDS
    def test_it_is_mended_within_a_period_and_counted(self, kind, tmp_path, monkeypatch):
        monkeypatch.setattr("sglang_blockreuse.layers.index_keys.AUDIT_PERIOD", 8)
        world, decoder = self.rewritten(kind, tmp_path, announced=False)
        first = world.run_all(decoder)
        assert not torch.allclose(first[1][2].double(), world.expected()[1][2], atol=1e-3), (
            "it was noticed at once"
        )
        for _ in range(8):
            last = world.run_all(decoder)
        for got, expected in zip(last, world.expected(), strict=True):
            check(got, expected, torch.float32)
        assert decoder.metrics.counts["decode_stale_keys_total"] == 2 * 40, "once for each layer that scores"

    def test_a_copy_is_written_once(self, tmp_path, monkeypatch):
        world = make_world("int4_keys", tmp_path)
        decoder = world.decoder()
        written = []
        copy = decoder.keys.copies[1]
        write = copy.write
        monkeypatch.setattr(copy, "write", lambda slots, k: (written.append(len(slots)), write(slots, k)))
        first = world.run_all(decoder)
        again = world.run_all(decoder)
        assert written == [sum(LENS), 0]
        for a, b in zip(first, again, strict=True):
            same(a, b)

    def test_a_slot_that_two_rows_share_is_written_once(self, tmp_path):
        world = make_world("int4_keys", tmp_path, lens=[200, 200])
        world.table[world.requests[1], :150] = world.table[world.requests[0], :150]
        decoder = world.decoder()
        decoder.begin(world.batch())
        assert len(decoder.keys._absent_T) == 250
        assert len(decoder.keys._checked_T) == 0, "what is not there yet is nothing to check"

    def test_a_step_that_was_not_run_to_its_end_leaves_its_slots_absent(self, tmp_path):
        world = make_world("int4_keys", tmp_path)
        decoder = world.decoder()
        step = decoder.begin(world.batch())
        for layer in (0, 1):
            world.run(decoder, step, layer)
        for got, expected in zip(world.run_all(decoder), world.expected(), strict=True):
            check(got, expected, torch.float32)
        decoder.begin(world.batch())
        assert len(decoder.keys._absent_T) == 0


class TestWeights:
    def world(self, tmp_path, **options):
        return make_world("learned", tmp_path, **options)

    def test_a_file_for_another_model_is_refused(self, tmp_path):
        world = self.world(tmp_path, model="a" * 64)
        world.decoder(model_identity="a" * 64)
        with pytest.raises(
            WeightsError, match="was made for model aaaaaaaaaaaa, but the model served is bbbb"
        ):
            world.decoder(model_identity="b" * 64)

    def test_another_content_is_refused(self, tmp_path):
        world = self.world(tmp_path)
        file = tmp_path / "w.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(WeightsError, match="SHA-256"):
            world.decoder()
        file.unlink()
        with pytest.raises(WeightsError, match="cannot be read"):
            world.decoder()

    def test_a_file_of_other_layers_or_shapes_is_refused(self, tmp_path):
        world = self.world(tmp_path)
        layers = dict(world.maps)
        key = layers[1].key_ECM
        for changed, reason in (
            ({2: layers[2]}, r"no weights for layers \[1\]"),
            ({**layers, 1: layers[1]._replace(key_ECM=key[:, :, :-1])}, "layer 1: tensors are"),
            ({**layers, 1: layers[1]._replace(step_EC=0 * layers[1].step_EC)}, "steps not above 0"),
        ):
            digest = IndexWeights("learned", "m", changed).save(tmp_path / "w.safetensors")
            scorer = {"kind": "learned", "weights": "w.safetensors", "weights_sha256": digest}
            world.plan = make_plan("DFXR", scorer=scorer, folder=tmp_path, **SELECTION)
            with pytest.raises(WeightsError, match=reason):
                world.decoder()

    @pytest.mark.parametrize("content", [b"", b"no such format" * 9], ids=["empty", "text"])
    def test_a_file_of_another_format_is_refused(self, tmp_path, content):
        (tmp_path / "w.safetensors").write_bytes(content)
        scorer = {"kind": "learned", "weights": "w.safetensors"}
        scorer["weights_sha256"] = hashlib.sha256(content).hexdigest()
        world = World(make_plan("F", scorer=scorer, folder=tmp_path, **SELECTION), LENS)
        with pytest.raises(WeightsError, match="is no file of scorer weights"):
            world.decoder()

    def test_the_content_is_part_of_a_plans_fingerprint_and_the_name_is_not(self, tmp_path):
        def plan(name, content):
            digest = hashlib.sha256(content).hexdigest()
            scorer = {"kind": "learned", "weights": name, "weights_sha256": digest}
            return make_plan("FX", scorer=scorer, **SELECTION).fingerprint

        assert plan("a", b"1") == plan("b", b"1") != plan("a", b"2")

    def test_a_models_identity_follows_its_weights(self, tmp_path):
        from safetensors.torch import save_file

        def identity(weight, name="model.layers.0.self_attn.k_proj.weight"):
            save_file({name: weight}, str(tmp_path / "model.safetensors"))
            return model_identity(tmp_path)

        weight = torch.randn(192, 64, dtype=torch.bfloat16)
        changed = weight.clone()
        changed[3, 5] += 1
        assert identity(weight) == identity(weight) != identity(changed)
        with pytest.raises(WeightsError, match="no safetensors file with key projections"):
            identity(weight, "model.layers.0.self_attn.o_proj.weight")


def test_recall_of_attention_mass_against_exact_scores(tmp_path):
    """On keys with a few strong directions, as models have them; SCORER_RECALL says what each kind must keep."""
    torch.manual_seed(1)
    strength = torch.logspace(0.5, -1.0, D)[torch.randperm(D)]
    found = {}
    for kind in ("exact_qk", "int4_keys", "label_channels"):
        world = make_world(kind, tmp_path, "F", lens=[3000])
        own = world.table[world.requests[0], :3000].long()
        world.k[0][own] = torch.randn(3000, H, D, generator=torch.manual_seed(2)) * strength
        world.q[0] = torch.randn(1, H * G, D, generator=torch.manual_seed(3))
        if kind in CHANNELS:
            world.maps[0] = index_map(kind, world.q[0], world.k[0][own])
            digest = IndexWeights(kind, "m", world.maps).save(tmp_path / "w.safetensors")
            scorer = {"kind": kind, "weights": "w.safetensors", "weights_sha256": digest}
            world.plan = make_plan("F", scorer=scorer, folder=tmp_path, **SELECTION)
        decoder = world.decoder()
        world.run_all(decoder)
        found[kind] = set(decoder.state.own.positions[world.requests[0], 0].tolist())
    exact = found.pop("exact_qk")
    for kind, positions in found.items():
        assert len(exact & positions) / len(exact) >= SCORER_RECALL[kind], kind


def test_memory_is_accounted(tmp_path):
    from sglang_blockreuse.layers.plan_explain import KVShape, explain

    for kind, num_channels in (("int4_keys", None), ("label_channels", 16), ("learned", NUM_LEARNED)):
        world = make_world(kind, tmp_path, **({} if num_channels is None else {"num_channels": num_channels}))
        keys = world.decoder().keys
        shape = KVShape(num_kv_heads=H, head_dim=D)
        cost = explain(world.plan, shape, num_tokens=1000, batch=1)
        assert keys.num_bytes == cost.copy_bytes_per_token * len(world.k[0]), kind
        assert "index keys keep" in cost.to_text()
    pages = World(make_plan("DFXRF", scorer={"kind": "page_minmax"}, **SELECTION), LENS)
    index = pages.decoder().keys
    cost = explain(
        pages.plan, KVShape(num_kv_heads=H, head_dim=D, kv_element_bytes=4), num_tokens=1000, batch=1
    )
    assert index.num_bytes == pytest.approx(cost.copy_bytes_per_token * len(pages.k[0]), rel=1e-2)
    exact = explain(make_plan("F", **SELECTION), shape, num_tokens=1000, batch=1)
    assert exact.copy_bytes_per_token == 0
    assert "index keys" not in exact.to_text()


def test_rows_get_the_same_bits_whatever_shares_their_batch(tmp_path):
    world = make_world("int4_keys", tmp_path, dtype=torch.bfloat16)
    together = world.run_all(world.decoder())
    for r in range(len(LENS)):
        alone = world.run_all(world.decoder(), order=[r])
        for layer in range(1, world.plan.num_layers):
            same(alone[layer], together[layer][r : r + 1])
