"""What the server says of a marked prompt is of the prompt that it computes: its text, its tokens and their number."""

from __future__ import annotations

import json

import pytest
import requests
from marked import SEP, with_separators
from servers import lease

pytestmark = pytest.mark.engine
TEXT = with_separators((0, 1))
OTHER = with_separators((1,), leading="Look.\n")
PLAIN = TEXT.replace(SEP, " ")


@pytest.fixture
def server():
    with lease(blocks={"tau": 3, "separator": SEP}) as running:
        yield running


def complete(server, prompt, **more):
    body = {"model": "small", "prompt": prompt, "max_tokens": 2, "temperature": 0, "echo": True, **more}
    return server.post("/v1/completions", **body)


def stream(server, prompt, **more):
    """Text of each choice of a streamed completion."""
    body = {"model": "small", "prompt": prompt, "max_tokens": 2, "temperature": 0, "echo": True, **more}
    texts: dict[int, str] = {}
    with requests.post(
        server.url + "/v1/completions", json={**body, "stream": True}, stream=True, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def tokens(server, prompt, **more):
    return server.post("/v1/tokenize", model="small", prompt=prompt, **more)


def computed(server, text):
    """(ids that a request with this text computes, their number as the answer reports it)."""
    answer = server.generate(text=text, sampling_params={"max_new_tokens": 1}, return_prompt_token_ids=True)
    return answer["prompt_token_ids"], answer["meta_info"]["prompt_tokens"]


@pytest.mark.parametrize("prompt", [TEXT, PLAIN], ids=["marked", "without marks"])
def test_echoed_tokens_spell_the_echoed_text(server, prompt):
    (choice,) = complete(server, prompt, logprobs=1)["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["text"].startswith(prompt.replace(SEP, ""))


def test_every_prompt_and_choice_of_a_batch_is_echoed_without_separators(server):
    answer = complete(server, [TEXT, PLAIN, OTHER], n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    wanted = [text.replace(SEP, "") for text in (TEXT, PLAIN, OTHER) for _ in range(2)]
    assert all(got.startswith(want) for got, want in zip(texts, wanted, strict=True))
    assert not any(SEP in text for text in texts)


def test_a_stream_echoes_the_same(server):
    prompts = [TEXT, PLAIN]
    whole = [choice["text"] for choice in complete(server, prompts)["choices"]]
    streamed = stream(server, prompts)
    assert [streamed[i] for i in range(2)] == whole
    assert SEP not in streamed[0]


def test_ids_that_spell_a_separator_are_echoed_as_they_were_computed(server):
    """Control: a client's ids are not cut, so their text is whole."""
    ids = tokens(server, "Look here.")["tokens"] + [
        *tokens(server, SEP.replace("<<<", "<<"), add_special_tokens=False)["tokens"]
    ]
    for letters in (SEP[:3], SEP[3:]):
        ids += tokens(server, letters, add_special_tokens=False)["tokens"]
    assert SEP in complete(server, ids)["choices"][0]["text"]
    assert SEP in stream(server, ids)[0]


@pytest.mark.parametrize(
    "prompt", [TEXT, OTHER, PLAIN, f"{SEP}{SEP}What?"], ids=["two", "one", "none", "empty"]
)
def test_tokenize_gives_the_ids_that_a_request_computes(server, prompt):
    found = tokens(server, prompt)
    assert (found["tokens"], found["count"]) == computed(server, prompt)
    usage = complete(server, prompt)["usage"]
    assert usage["prompt_tokens"] == found["count"]


def test_tokenize_cuts_each_prompt_of_a_list(server):
    found = tokens(server, [TEXT, PLAIN])
    assert found["tokens"] == [tokens(server, prompt)["tokens"] for prompt in (TEXT, PLAIN)]
    assert found["count"] == [len(ids) for ids in found["tokens"]]


def test_tokenize_refuses_what_a_request_would_be_refused_for(server):
    answer = requests.post(
        server.url + "/v1/tokenize", json={"model": "small", "prompt": SEP + SEP}, timeout=60
    )
    assert answer.status_code == 400
    assert "nothing but separators" in answer.text


def test_tokenize_of_a_chat_gives_the_ids_that_the_chat_computes(server):
    messages = [{"role": "user", "content": TEXT}]
    found = server.post("/v1/tokenize", model="small", messages=messages)
    chat = server.post("/v1/chat/completions", model="small", messages=messages, max_tokens=1, temperature=0)
    assert found["count"] == len(found["tokens"]) == chat["usage"]["prompt_tokens"]
    counted = server.post("/v1/messages/count_tokens", model="small", messages=messages)
    assert counted["input_tokens"] == found["count"]
    plain = server.post("/v1/tokenize", model="small", messages=[{"role": "user", "content": PLAIN}])
    assert plain["tokens"] != found["tokens"], "control: it is seen how a text was cut"


def test_a_door_that_nobody_cuts_at_refuses_separators(server):
    """Its template goes from messages to ids at once; read as text, marks would reach the model."""

    def chat(text):
        body = {
            "model": "small",
            "stream": False,
            "messages": [{"role": "user", "content": text}],
            "options": {"num_predict": 1},
        }
        return requests.post(server.url + "/api/chat", json=body, timeout=120)

    refused = chat(TEXT)
    assert refused.status_code == 400
    assert "/v1/chat/completions" in refused.text
    assert chat(PLAIN).status_code == 200


def test_grpc_tokenize_counts_the_same(server):
    """In this process, on the server's own tokeniser: the native gRPC server needs an extension to be built."""
    from types import SimpleNamespace

    from sglang.srt.entrypoints.grpc_bridge import RuntimeHandle
    from transformers import AutoTokenizer

    from sglang_blockreuse.config import BlocksConfig
    from sglang_blockreuse.prompt_hooks import tokenize_grpc

    manager = SimpleNamespace(
        tokenizer=AutoTokenizer.from_pretrained(server.get("/model_info")["tokenizer_path"]),
        model_config=SimpleNamespace(context_len=1024),
        server_args=SimpleNamespace(radix_cache_backend="blockreuse"),
        _blockreuse_config=BlocksConfig(separator=SEP),
    )
    handle = SimpleNamespace(tokenizer_manager=manager)
    original = getattr(RuntimeHandle.tokenize, "__wrapped__", RuntimeHandle.tokenize)
    for text in (TEXT, PLAIN):
        said = json.loads(tokenize_grpc(original, handle, text))
        assert said["tokens"] == tokens(server, text)["tokens"]
        assert said["count"] == len(said["tokens"])
        assert said["input_text"] == text.replace(SEP, "")
