#!/usr/bin/env bash
# Makes a small block base from the packaged autoregressive model, and a g for it (docs/blocks.md has what came out).
#
#   recipes/smol-block.sh OUTPUT
#
# Every stage resumes. Times are seconds of training on one H200; STAGES picks some of: adapt trajectories train eval.
set -euo pipefail
out=$1
run() { python3 -m adjust_dlm.cli "$@"; }
stage() { [[ " ${STAGES:-adapt trajectories train eval} " == *" $1 "* ]]; }

if stage adapt; then run adapt --output "$out/base" --block-size 16 --length 128 --text "${TEXT:-40000}" --chat "${CHAT:-4000}" --lists 3000 \
    --heldout 512 --share-text 0.6 --share-chat 0.3 --share-lists 0.1 --steps 100000 --max-seconds "${ADAPT_SECONDS:-200}" --batch-size 512 \
    --micro-batch "${MICRO:-128}" --lora-rank 32 --lora-alpha 32 --sample-top-p 0.95 --log-every 50; fi

base=${BASE:-$out/base}
if stage trajectories; then
    rows() { run trajectories --base "$base" --batch-size "${DECODE_BATCH:-2048}" --shard-rows "${DECODE_BATCH:-2048}" --output "$out/$1" "${@:2}"; }
    rows text --num "${NUM:-2048}" --max-new-tokens 127 --suppress-eos
    DECODE_BATCH=512 rows chat --num "${CHATS:-512}" --prompts "corpus:${CORPUS:-$base/corpus}" --max-new-tokens 48 --seed 2
fi

if stage train; then run train --base "$base" --trajectories "$out/text" "$out/chat" --heldout 128 --layers 2 --mlp 0.875 --features 10 20 \
    --rows 8 --slices 16 --slice-states 19 --lr 3e-3 --warmup 50 --steps 100000 --eval-every 100000 --checkpoint-every 100000 \
    --max-seconds "${TRAIN_SECONDS:-42}" --output "$out/g"; fi

if stage eval; then
    g=${SAMPLER:-$out/g/sampler}
    run eval divergence --base "$base" --sampler "$g" --n 256 --max-new-tokens 127 --tokens-per-step 2 4 8 --sources own --output "$out/law"
    run eval table --base "$base" --sampler "$g" --n 1024 --max-new-tokens 127 --batch-size 1024 --divergence 0 --temperatures 1.0 \
        --tokens-per-step 2 4 8 --output "$out/table"
    python3 recipes/answers.py --base "$base" --sampler "$g"
fi
