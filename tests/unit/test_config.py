"""The configuration file: strict, frozen names, errors that say what to do."""

from __future__ import annotations

import json

import pytest

from sglang_blockreuse.config import CONFIG_ENV, BlocksConfig, Config, ConfigError, LayersConfig, load_config


def write(tmp_path, text: str):
    path = tmp_path / "blockreuse.yaml"
    path.write_text(text)
    return path


def test_the_keys_are_frozen():
    """A new key is a decision, not an accident."""
    assert Config.__struct_fields__ == ("blocks", "layers", "kernels", "strict")
    assert LayersConfig.__struct_fields__ == ("plan", "timing")
    assert sorted(BlocksConfig.__struct_fields__) == [
        "alpha",
        "auto",
        "beta",
        "budget",
        "company",
        "compile",
        "compile_prefix",
        "compile_prefix_text",
        "guard",
        "min_block_tokens",
        "num_true_sinks",
        "parts",
        "policy",
        "separator",
        "tau",
    ]


def test_yaml_and_json_read_alike(tmp_path):
    from_yaml = load_config(write(tmp_path, "blocks: {tau: 12, alpha: -0.5}\nlayers: {plan: full}\n"))
    from_json = load_config(
        write(tmp_path, json.dumps({"blocks": {"tau": 12, "alpha": -0.5}, "layers": {"plan": "full"}}))
    )
    assert from_yaml == from_json
    assert (from_yaml.blocks.tau, from_yaml.blocks.alpha, from_yaml.layers.plan) == (12, -0.5, "full")


def test_an_empty_file_means_the_defaults(tmp_path):
    assert load_config(write(tmp_path, "\n")) == Config()


def test_the_environment_names_the_file_and_the_flag_wins(tmp_path, monkeypatch):
    monkeypatch.setenv(CONFIG_ENV, str(write(tmp_path, "blocks: {budget: 0.1}")))
    assert load_config(None).blocks.budget == 0.1
    other = tmp_path / "other.yaml"
    other.write_text("blocks: {budget: 0.2}")
    assert load_config(other).blocks.budget == 0.2


def test_the_layer_plan_flag_wins_over_the_file(tmp_path):
    path = write(tmp_path, "layers: {plan: one}")
    assert load_config(path).layers.plan == "one"
    assert load_config(path, layer_plan="two").layers.plan == "two"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("blocks: {tua: 3}", "tua", id="mistyped key"),
        pytest.param("block: {}", "block", id="mistyped section"),
        pytest.param("blocks: {tau: many}", r"blocks\.tau", id="wrong type"),
        pytest.param("blocks: {tau: -1}", r"blocks\.tau is -1", id="negative tau"),
        pytest.param("blocks: {budget: 5}", r"blocks\.budget is 5", id="budget in percent"),
        pytest.param("blocks: {budget: 64.5}", r"blocks\.budget is 64\.5", id="budget of half a token"),
        pytest.param("blocks: {guard: 0}", r"blocks\.guard is 0", id="guard without a bound"),
        pytest.param("blocks: {policy: magic}", r"blocks\.policy is 'magic'", id="unknown policy"),
        pytest.param("blocks: {alpha: 1.0}", r"blocks\.alpha is 1\.0", id="alpha adds weight"),
        pytest.param("blocks: {beta: .nan}", r"blocks\.beta", id="beta not finite"),
        pytest.param("blocks: {compile: later}", r"blocks\.compile", id="unknown compile mode"),
        pytest.param("blocks: {separator: ''}", r"blocks\.separator is ''", id="empty separator"),
        pytest.param(
            'blocks: {separator: "\\n##"}', r"blocks\.separator.*white space", id="trimmed separator"
        ),
        pytest.param("blocks: {parts: 2}", r"blocks\.parts", id="parts is a switch"),
        pytest.param("blocks: {compile_prefix_text: ''}", r"compile_prefix_text", id="empty prefix"),
        pytest.param(
            "blocks: {compile_prefix_text: You, compile_prefix: bos}",
            r"compile_prefix is 'bos'.*compile_prefix_text",
            id="two compile prefixes",
        ),
        pytest.param(
            "blocks: {company: -1}", r"blocks\.company is -1.*counts documents", id="fewer than none"
        ),
        pytest.param("blocks: {company: 9}", r"blocks\.company is 9.*from 0 to 8", id="a crowd"),
        pytest.param("blocks: {company: ''}", r"blocks\.company is ''.*no company", id="empty company"),
        pytest.param("blocks: {company: true}", r"blocks\.company", id="company is no switch"),
        pytest.param("blocks: {min_block_tokens: 0}", r"blocks\.min_block_tokens is 0", id="empty blocks"),
        pytest.param("kernels: fast", "kernels", id="unknown kernels"),
        pytest.param("{", "neither YAML nor JSON", id="not YAML"),
        pytest.param("- 1", "object", id="not a mapping"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path, text, says):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_error_not_the_defaults(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*cannot be read"):
        load_config(tmp_path / "nowhere.yaml")
