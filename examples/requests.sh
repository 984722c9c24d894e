#!/usr/bin/env bash
# Three requests to a server that was started with examples/blockreuse.yaml. URL: its address.
set -euo pipefail
URL="${URL:-http://localhost:30000}"

bridge="The bridge over the Orla was opened in 1911 after four years of work. It was designed by Ruth Imhof, who \
counted every rivet herself. Two trains cross it every hour, one in each direction, and a path for walkers was added in 1968."
contract="The contract about the mill was signed by Ada Moss on a Tuesday in March. It runs for thirty years. The miller \
keeps a tenth of the flour, the town keeps the wheel in repair, and disputes go to the judge of the next district."

post() {
    curl --silent --show-error --fail-with-body "$URL$1" -H 'Content-Type: application/json' -d "$2"
    echo
}

# A separator: what stands before the first is the leading text, what stands behind the last the question.
post /generate '{
  "text": "Answer from the documents.\n<<<document>>>'"$bridge"'<<<document>>>'"$contract"'<<<document>>>\nWho signed the contract?",
  "sampling_params": {"max_new_tokens": 16, "temperature": 0}
}'

# Content parts of a chat message: the documents in the other order, which are known by now only if what stands
# in front of the first is the same; in a chat the template decides that.
post /v1/chat/completions '{
  "model": "default",
  "max_tokens": 16,
  "temperature": 0,
  "messages": [
    {"role": "system", "content": "Answer from the documents."},
    {"role": "user", "content": [{"type": "text", "text": "'"$contract"'"}, {"type": "text", "text": "'"$bridge"'"}]},
    {"role": "user", "content": "When was the bridge opened?"}
  ],
  "custom_params": {"blockreuse_parts": true},
  "return_meta_info": true
}'

# The exact answer, for the same marks on the same server.
post /generate '{
  "text": "Answer from the documents.\n<<<document>>>'"$contract"'<<<document>>>'"$bridge"'<<<document>>>\nWho signed the contract?",
  "sampling_params": {"max_new_tokens": 16, "temperature": 0, "custom_params": {"blockreuse_mode": "exact"}}
}'
