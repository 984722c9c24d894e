"""Without a server: `sglang.Engine` with block reuse. The configuration comes by the environment."""

import argparse
import os
from pathlib import Path

import sglang

SEPARATOR = "<<<document>>>"  # as in blockreuse.yaml
DOCUMENTS = [
    "The bridge over the Orla was opened in 1911. It was designed by Ruth Imhof and carries two tracks. " * 4,
    "The contract about the mill was signed by Ada Moss. It runs for thirty years and names no heirs. " * 4,
    "The museum keeps a clock that was built without a single screw. It loses one second in a month. " * 4,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    model = parser.parse_args().model
    os.environ.setdefault("SGLANG_BLOCKREUSE_CONFIG", str(Path(__file__).with_name("blockreuse.yaml")))
    engine = sglang.Engine(model_path=model, radix_cache_backend="blockreuse", attention_backend="blockreuse")
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        prompt = SEPARATOR.join(["Answer from the documents.\n", *documents, "\nWho signed the contract?"])
        answer = engine.generate(prompt, {"temperature": 0, "max_new_tokens": 16})
        print(answer["text"].strip())
        print("  ", answer["meta_info"]["blockreuse"][0])
    engine.shutdown()


# SGLang starts processes that import this file again
if __name__ == "__main__":
    main()
