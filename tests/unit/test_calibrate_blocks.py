"""What the calibration of blocks makes of measurements."""

from __future__ import annotations

import math

import calibrate_blocks as calibrate
import pytest


def setting(policy="seam", budget=0.05, share=0.5, *, alpha=0.0, beta=0.0):
    return calibrate.Setting(alpha, beta, policy, budget, share, budget)


def test_the_smallest_budget_that_reaches_the_target_wins():
    settings = [
        setting(budget=0.1, share=0.9),
        setting(budget=0.05, share=0.8),
        setting(budget=0.025, share=0.6),
    ]
    assert calibrate.choose(settings, target=0.75, max_budget=0.1).budget == 0.05


def test_the_best_wins_where_nothing_reaches_the_target():
    settings = [setting(share=0.4), setting("head", share=0.6)]
    assert calibrate.choose(settings, target=0.75, max_budget=0.1).policy == "head"


def test_the_control_is_never_chosen():
    settings = [setting("random", share=0.99), setting("head", share=0.1)]
    assert calibrate.choose(settings, target=0.75, max_budget=0.1).policy == "head"


def test_nothing_beyond_the_largest_budget():
    with pytest.raises(ValueError, match=r"up to 0\.1"):
        calibrate.choose([setting(budget=0.2, share=1.0)], target=0.75, max_budget=0.1)


def test_the_section_is_a_valid_configuration(tmp_path):
    import yaml

    from sglang_blockreuse.config import load_config

    file = tmp_path / "blocks.yaml"
    chosen, watched = setting("head+query", beta=-1.0), calibrate.Watched((0.1, 0.25), (1.0, 2.0))
    file.write_text(yaml.safe_dump({"blocks": calibrate.section(chosen, watched)}))
    blocks = load_config(file).blocks
    assert (blocks.policy, blocks.budget, blocks.beta, blocks.guard) == ("head+query", 0.05, -1.0, 0.275)


def test_rank_correlation():
    assert calibrate.spearman([1, 2, 3], [10, 20, 90]) == pytest.approx(1.0)
    assert calibrate.spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert calibrate.ranks([5, 1, 5]) == [1.5, 0.0, 1.5]
    assert math.isnan(calibrate.spearman([1, 1], [1, 2]))


def test_what_the_user_gives_to_blocks_is_kept():
    rest = ["--seed", "3", "--blocks", "tau=4", "parts=true", "--quick"]
    assert calibrate._blocks(rest) == ["tau=4", "parts=true"]
    assert calibrate._without_blocks(rest) == ["--seed", "3", "--quick"]
