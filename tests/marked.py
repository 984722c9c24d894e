"""Marked texts for the server tests, and the servers that read them."""

from __future__ import annotations

import itertools
import json
import random
import time

from servers import extended_server

SEP = "<<<document>>>"
FLAGS = ("--dtype", "float32", "--max-total-tokens", "12000", "--max-running-requests", "8")
FLAGS += ("--served-model-name", "small")
# SmolLM2's template, which in addition renders `documents` and cuts messages at a `limit`
TEMPLATE = (
    "{% if documents %}<|im_start|>system\nAnswer from the documents.\n"
    "{% for document in documents %}{{ document.title }}: {{ document.text }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content[:limit or message.content | length] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}


def text_of(seed: int, num_words: int = 70) -> str:
    rng = random.Random(seed)
    words = (
        "river",
        "bridge",
        "winter",
        "contract",
        "copper",
        "letter",
        "museum",
        "harbour",
        "signal",
        "under",
    )
    return f"Document {seed}. " + " ".join(rng.choice(words) for _ in range(num_words)) + ".\n"


DOCS = [text_of(seed) for seed in range(4)]
QUESTION = "Which documents speak of a bridge?"


def with_separators(order, leading="Answer from the documents.\n", question=QUESTION) -> str:
    return SEP.join([leading, *(DOCS[i] for i in order), question])


def start(model_path, tmp_path_factory, blocks, *flags):
    folder = tmp_path_factory.mktemp("marking")
    (folder / "config.json").write_text(json.dumps({"blocks": {"tau": 3, **blocks}}))
    (folder / "template.jinja").write_text(TEMPLATE)
    ours = ("--blockreuse-config", str(folder / "config.json"))
    ours += ("--chat-template", str(folder / "template.jinja"))
    return extended_server(model_path, *FLAGS, *ours, *flags, log=folder / "server.log")


def generate(server, text, *, stream=False, n=1, **custom_params):
    params = {**GREEDY, "n": n, "custom_params": custom_params or None}
    return server.generate(text=text, sampling_params=params, return_prompt_token_ids=True)


def counts(server):
    return server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]


def wait_until_idle(server, wait_s: float = 60.0) -> None:
    """Until background homes are prefilled."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        pool = server.get("/server_info")["internal_states"][0]["blockreuse"]["pool"]
        if pool["free"] + pool["evictable"] == pool["size"]:
            return
        time.sleep(0.25)
    raise AssertionError("the server is still busy")


def prompt_ids(answer):
    """Ids of a chat prompt, which the host reports beside or inside the choice."""
    return getattr(answer.choices[0], "prompt_token_ids", None) or answer.prompt_token_ids


def joined(pieces):
    return list(itertools.chain.from_iterable(pieces))
