#!/usr/bin/env bash
# Twenty samples of each kind of canvas from the default model, by each decoder, as one Markdown page to be read.
#
#   recipes/smol-samples.sh OUTPUT
set -euo pipefail
out=$1
k=4
chat=(
    "What is the capital of France?" "How many days are in a week?" "Name three colors." "Why is the sky blue?"
    "What do bees make?" "Write a short story about a dog." "What is 2 + 3?" "Explain what a computer is."
    "Give me a tip for better sleep." "What is the largest planet?" "How do I boil an egg?" "Write a poem about the sea."
    "What is photosynthesis?" "Who wrote Hamlet?" "Say hello in Spanish." "What is a prime number?"
    "Suggest a name for a cat." "How do airplanes fly?" "What is the opposite of hot?" "Describe a rainy day."
)
mapfile -d '' -t lists < <(python3 -c "
from itertools import islice
from adjust_dlm.data.lists import list_tasks
print(*(task.prompt for task in islice(list_tasks(0, held_out=True), 20)), sep='\\0', end='\\0')")
for decoder in joint parallel adjust; do
    common=(--decoder "$decoder" --tokens-per-step $k --batch-size 20 --base "${BASE:-smol-block}")
    # g was trained on rows of seed 0
    adjust generate "${common[@]}" --num-samples 20 --max-new-tokens 64 --suppress-eos --temperature 1 --seed 1000 --output "$out/text-$decoder"
    adjust generate "${chat[@]}" "${common[@]}" --max-new-tokens 48 --temperature 0.6 --output "$out/chat-$decoder"
    adjust generate "${lists[@]}" "${common[@]}" --max-new-tokens 40 --temperature 0 --output "$out/lists-$decoder"
done
python3 - "$out" <<'PY' > "$out/samples.md"
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
said = {"text": "64 new tokens, T = 1, no end tokens", "chat": "48 new tokens, T = 0.6", "lists": "40 new tokens, T = 0"}
print("# Twenty samples of each kind from the default model\n\nK = 4 for parallel and ADJUST, nothing picked; "
      "made by `recipes/smol-samples.sh OUT`.")
for kind, settings in said.items():
    print(f"\n## {kind}: {settings}")
    names = ("joint", "parallel", "adjust")
    read = {d: [json.loads(x) for x in (out / f"{kind}-{d}/samples.jsonl").read_text().splitlines()] for d in names}
    for row in range(20):
        prompt = read["joint"][row]["prompt"].replace("\n", " / ")
        print(f"\n**{row}** {prompt}\n")
        for d in names:
            print(f"- {d}: `{json.dumps(read[d][row]['text'], ensure_ascii=False)[1:-1].replace('`', chr(39))}`")
PY
