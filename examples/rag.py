"""A small RAG loop: pick the documents that share rare words with the question, ask, print what was reused.

Documents are a JSONL file of yours, one {"id": ..., "text": ...} per line. Questions come from the command line, or
line by line from standard input.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

import requests

SEPARATOR = "<<<document>>>"  # as in blockreuse.yaml
SYSTEM = "Answer from the documents, in one sentence."


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


class Library:
    """Documents, found by the inverse document frequency of the words they share with a question."""

    def __init__(self, file: Path) -> None:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        self.texts = {row["id"]: row["text"] for row in rows if "text" in row}
        counts = Counter(word for text in self.texts.values() for word in words(text))
        self.weights = {word: math.log(1 + len(self.texts) / count) for word, count in counts.items()}

    def find(self, question: str, num: int) -> list[str]:
        """Ids of the best `num` documents, best first."""

        def score(name: str) -> float:
            return sum(self.weights[word] for word in words(question) & words(self.texts[name]))

        return sorted(self.texts, key=score, reverse=True)[:num]


def ask(url: str, documents: list[str], question: str) -> dict:
    """The best document stands last, next to the question: order is free, because blocks are."""
    body = {
        "model": "default",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": SEPARATOR.join(["", *reversed(documents), question])},
        ],
        "max_tokens": 32,
        "temperature": 0,
        "return_meta_info": True,
    }
    response = requests.post(f"{url}/v1/chat/completions", json=body, timeout=600)
    response.raise_for_status()
    return response.json()["choices"][0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*")
    parser.add_argument("--documents", type=Path, default=Path(__file__).with_name("documents.jsonl"))
    parser.add_argument("--top", type=int, default=3, help="documents per prompt")
    parser.add_argument("--url", default="http://localhost:30000")
    options = parser.parse_args()
    library = Library(options.documents)
    for question in options.questions or map(str.strip, sys.stdin):
        names = library.find(question, options.top)
        choice = ask(options.url, [library.texts[name] for name in names], question)
        (usage,) = choice["meta_info"]["blockreuse"]
        known = usage["prefix_tokens"] + usage["reused_tokens"]
        computed = usage["repaired_tokens"] + usage["fresh_tokens"]
        print(f"{question}\n  {choice['message']['content'].strip()}")
        print(f"  from {', '.join(names)}; {known} tokens known, {computed} computed")


if __name__ == "__main__":
    main()
