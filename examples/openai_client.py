"""The same documents in two orders, with the OpenAI client: the second request reuses what the first made known."""

import argparse

import openai

SEPARATOR = "<<<document>>>"  # as in blockreuse.yaml
DOCUMENTS = [
    "The bridge over the Orla was opened in 1911. It was designed by Ruth Imhof and carries two tracks. " * 4,
    "The contract about the mill was signed by Ada Moss. It runs for thirty years and names no heirs. " * 4,
    "The museum keeps a clock that was built without a single screw. It loses one second in a month. " * 4,
]


def ask(client: openai.OpenAI, documents: list[str], question: str):
    return client.chat.completions.create(
        model="default",
        messages=[
            {"role": "system", "content": "Answer from the documents."},
            {"role": "user", "content": SEPARATOR.join(["", *documents, question])},
        ],
        max_tokens=24,
        temperature=0,
        extra_body={"return_meta_info": True},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:30000")
    client = openai.OpenAI(base_url=parser.parse_args().url + "/v1", api_key="none")
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        choice = ask(client, documents, "Who signed the contract?").choices[0]
        (usage,) = choice.meta_info["blockreuse"]
        print(choice.message.content)
        print("  ", {kind: usage[f"{kind}_tokens"] for kind in ("prefix", "reused", "repaired", "fresh")})


if __name__ == "__main__":
    main()
