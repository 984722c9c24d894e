"""Group distillation: the objective of equation (10), what it may see, and what training buys on the real model."""

from __future__ import annotations

import pytest
import torch

from sglang_blockreuse.kernels.reference_index import IndexMap
from sglang_blockreuse.layers.calibration import distil_run
from sglang_blockreuse.layers.calibration.distil import (
    Training,
    distil,
    divergence,
    principal_map,
    shuffled,
    student,
)
from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.calibration.samples import Samples, collect, groups_of
from sglang_blockreuse.layers.calibration.texts import HELD_OUT, Texts
from sglang_blockreuse.layers.plan_loader import load_plan, parse_plan

PLAN = """
version: 1
name: test
model: {num_layers: 30}
selection: {final_k: 64, sink: 4, window: 16}
layers:
  - {layers: 0-1, role: dense}
  - {layers: 2, role: full}
  - {layers: 3-4, role: reuse, anchor: 2}
  - {layers: 5-29, role: dense}
"""
B, R, N, Q, H, D, C = 3, 4, 90, 6, 2, 8, 6


def made_up(seed=0):
    """Three padded texts of 90, 60 and 75 keys."""
    g = torch.Generator().manual_seed(seed)
    at, lens = torch.arange(N), torch.tensor([90, 60, 75])
    rows = lens[:, None] - torch.tensor([9, 6, 3, 1])
    legal = (at >= 4) & (at <= rows[..., None] - 8)
    keys = torch.randn(B, N, H * D, generator=g) * (at < lens[:, None])[..., None]
    samples = Samples(torch.randn(B, R, Q, D, generator=g), keys, legal, torch.zeros(B, R, N))
    return Samples(samples.q_BRQD, keys, legal, samples.attention())


def test_the_mean_of_divergences_has_the_gradient_of_the_divergence_to_the_mean():
    """Equation (10): averaging teachers' probabilities, not their logits."""
    torch.manual_seed(0)
    logits = torch.randn(3, 50, dtype=torch.float64)
    teachers = logits.softmax(-1)

    def gradient(loss_of):
        theta = torch.linspace(-1, 1, 50, dtype=torch.float64, requires_grad=True)
        loss_of(theta.log_softmax(-1)).backward()
        return theta.grad

    def kl(p, log_q):
        return (p * (p.log() - log_q)).sum()

    mean_of_kl = gradient(lambda log_q: sum(kl(p, log_q) for p in teachers) / 3)
    kl_of_mean = gradient(lambda log_q: kl(teachers.mean(0), log_q))
    torch.testing.assert_close(mean_of_kl, kl_of_mean)
    of_mean_logits = gradient(lambda log_q: kl(logits.mean(0).softmax(-1), log_q))
    assert not torch.allclose(mean_of_kl, of_mean_logits, atol=1e-3)


class TestLegality:
    def test_a_teacher_is_a_distribution_over_legal_positions(self):
        samples = made_up()
        torch.testing.assert_close(samples.teacher_BRN.sum(-1), torch.ones(B, R))
        assert not samples.teacher_BRN[~samples.legal_BRN].any()

    def test_padding_and_hidden_positions_take_no_part(self):
        """Whatever stands in positions that no row may choose, the loss, the start and the result stay the same."""
        samples = made_up()
        hidden = ~samples.legal_BRN.any(1)
        poisoned = samples.k_BNM.masked_fill(hidden[..., None], 1e4)
        other = Samples(samples.q_BRQD, poisoned, samples.legal_BRN, samples.attention())
        training = Training(num_channels=C, num_steps=12)
        losses = {}
        for name, each in (("clean", samples), ("poisoned", other)):
            losses[name] = []
            losses[name].append(distil(each, training, lambda step, loss, to=losses[name]: to.append(loss)))
        *clean, first = losses["clean"]
        *dirty, second = losses["poisoned"]
        assert clean == dirty
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)

    def test_a_legal_position_does_take_part(self):
        """Negative control."""
        samples = made_up()
        changed = samples.k_BNM.clone()
        changed[0, 20] += 1
        index = principal_map(samples, C)
        other = Samples(samples.q_BRQD, changed, samples.legal_BRN, samples.teacher_BRN)
        assert divergence(samples, student(samples, index)) != divergence(other, student(other, index))


def test_training_lowers_the_divergence_and_order_is_what_was_learned():
    samples = made_up()
    start = principal_map(samples, C)
    index = distil(samples, Training(num_channels=C, num_steps=60))
    trained, before, mixed = (
        float(divergence(samples, student(samples, m))) for m in (index, start, shuffled(index))
    )
    assert trained < before < mixed
    assert float(divergence(samples, samples.teacher_BRN)) == 0.0


def test_the_student_scores_as_the_served_law_does():
    """The map in training and `reference_index` with `pooled_scores`, over the same keys."""
    from sglang_blockreuse.kernels import reference_index as law
    from sglang_blockreuse.kernels.reference_select import pooled_scores

    samples = made_up()
    index = IndexMap(*(x.contiguous() for x in principal_map(samples, C)))
    legal = samples.legal_BRN[0, -1].nonzero()[:, 0]
    keys = samples.k_BNM[0, legal].view(-1, H, D)
    served = pooled_scores(
        law.index_queries(index, samples.q_BRQD[0, -1:]),
        law.index_keys(index, law.index_codes(index, keys)),
        torch.arange(len(legal)),
        torch.tensor([0, len(legal)]),
        scale=D**-0.5,
    )
    torch.testing.assert_close(served[0, 0] / Q, student(samples, index)[0, -1, legal])


def test_groups_are_the_layers_that_are_served():
    plan = load_plan("smollm2-135m-three-role").bind(30, None)
    groups = groups_of(plan)
    assert set(groups) == {layer.layer for layer in plan.layers if layer.scores}
    for layer in plan.layers:
        if layer.anchor is not None:
            assert layer.layer in groups[layer.anchor]


@pytest.fixture(scope="module")
def real(model_path):
    """Samples of layer 2 and its group on two short texts, and on another one."""
    model, texts = Llama(model_path), Texts(model_path)
    plan = parse_plan(PLAN, "test.yaml").bind(30, model.architecture)
    kinds = (("prose", 300), ("code", 260))
    train = collect(model, [texts.make(kind, 0, n) for kind, n in kinds], plan, 16)
    held_out = collect(model, [texts.make("prose", HELD_OUT, 300)], plan, 16)
    return train[2], held_out[2]


def mass(samples, scores):
    best = distil_run._best(scores, 16)
    return float((samples.teacher_BRN * best).sum(-1).mean())


def test_on_the_real_model_it_holds_more_of_the_group_than_where_it_began(real):
    train, held_out = real
    index = distil(train, Training(num_channels=16, num_steps=60))
    trained, before, mixed = (
        mass(held_out, student(held_out, m)) for m in (index, principal_map(train, 16), shuffled(index))
    )
    assert trained > before > mixed, "shuffled weights keep the recall"


def test_a_text_that_leaves_nothing_to_choose_is_refused(model_path):
    plan = parse_plan(PLAN, "test.yaml").bind(30, None)
    with pytest.raises(ValueError, match="a text of 30 tokens leaves nothing to choose"):
        collect(Llama(model_path), [list(range(30))], plan, 4)


def test_calibrate_writes_a_plan_that_its_model_serves_and_no_other(model_path, tmp_path, capsys):
    from sglang_blockreuse.cli import main
    from sglang_blockreuse.layers.index_weights import WeightsError, model_identity
    from sglang_blockreuse.layers.sparse_decode import SparseDecoder

    (tmp_path / "test.yaml").write_text(PLAN)
    out = tmp_path / "out"
    arguments = ["--distil", str(tmp_path / "test.yaml"), "--lengths", "220", "240", "--out", str(out)]
    assert main(["calibrate", str(model_path), *arguments, "--scorer", "label_channels"]) == 0
    assert "| label_channels | 24 |" in capsys.readouterr().out
    plan = load_plan(out / "plan.yaml")
    assert plan.fingerprint != load_plan(tmp_path / "test.yaml").fingerprint
    pools = [torch.zeros(8, 3, 64)] * 30
    bound = plan.bind(30, "LlamaForCausalLM")

    def decoder(identity):
        return SparseDecoder(bound, num_requests=2, num_q_heads=9, k_pools=pools, model_identity=identity)

    assert set(decoder(model_identity(model_path)).keys.copies) == {2}
    with pytest.raises(WeightsError, match="was made for model"):
        decoder("0" * 64)


def test_a_plan_without_scoring_layers_is_refused(model_path, tmp_path, capsys):
    from sglang_blockreuse.cli import main

    assert main(["calibrate", str(model_path), "--distil", "full", "--out", str(tmp_path)]) == 1
    assert "nothing to distil" in capsys.readouterr().err


def test_loss_under_a_scorer(real, model_path):
    """Exact scores are those of the plain case, 4 bits come close, and a shuffled map does not."""
    from msgspec.structs import replace

    from sglang_blockreuse.layers.calibration.case import Case, evaluate
    from sglang_blockreuse.layers.calibration.scored_case import ScoredCase
    from sglang_blockreuse.layers.plan import Scorer

    model, ids = Llama(model_path), Texts(model_path).make("copy", HELD_OUT, 300)
    plan = parse_plan(PLAN, "test.yaml").bind(30, None)
    case = ScoredCase(model, "copy", ids, 16)
    losses = {}
    maps = principal_map(real[0], 32)
    case.weights = {"mixed": {2: shuffled(maps)}}
    for name, kind in (("exact", "exact_qk"), ("int4", "int4_keys"), ("mixed", "learned")):
        judged = replace(plan, scorer=Scorer(kind=kind), weights_file=name)
        (figures,) = evaluate([case], judged)
        losses[name] = figures.kl
    assert losses["exact"] == Case(model, "copy", ids, 16).figures(plan).kl
    assert abs(losses["int4"] - losses["exact"]) < losses["mixed"] - losses["exact"]
