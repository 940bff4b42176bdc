#!/usr/bin/env bash
# Makes a small block base from the packaged autoregressive model, and a g for it (docs/results/smol-block.md has what came out).
#
#   recipes/smol-block.sh OUTPUT [GPUS]
#
# Every stage resumes. Times below are seconds of training: ADAPT_SECONDS, TRAIN_SECONDS, DEEP_SECONDS, BACK_SECONDS, MORE_SECONDS.
# The last two stages of g take one card.
# STAGES picks some of: adapt trajectories train eval.
set -euo pipefail
out=$1
gpus=${2:-1}
run() { python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m -- adjust_dlm.cli "$@"; }
stage() { [[ " ${STAGES:-adapt trajectories train eval} " == *" $1 "* ]]; }

if stage adapt; then run adapt --output "$out/base" --block-size 16 --length 128 --text "${TEXT:-300000}" --chat "${CHAT:-100000}" \
    --questions "${QUESTIONS:-16384}" --lists 4096 --heldout 512 --share-text 0.55 --share-chat 0.3 --share-questions 0.1 --share-lists 0.05 \
    --steps 100000 --max-seconds "${ADAPT_SECONDS:-330}" --batch-size 1024 --micro-batch "${MICRO:-128}" --lora-rank 32 --lora-alpha 32 \
    --lr "${LR:-4e-3}" --order left_to_right --suffix "${SUFFIX:-0.5}" --sample-top-p 0.95 --eval-every 300 \
    ${CORPUS:+--corpus "$CORPUS"}; fi

base=${BASE:-$out/base}
if stage trajectories; then
    rows() { run trajectories --base "$base" --batch-size "${DECODE_BATCH:-1024}" --shard-rows "${DECODE_BATCH:-1024}" --output "$out/$1" "${@:2}"; }
    sets() {  # NAME TEXTS CHATS QUESTIONS
        local cool=(--temperature 0.1 --top-p 0.9 --max-new-tokens 48)  # as the paper's instruct recipe
        rows "text$1" --num "$2" --max-new-tokens 127 --suppress-eos
        rows "chat$1" --num "$3" --prompts "corpus:${CORPUS:-$base/corpus}" --seed 2 "${cool[@]}"
        rows "questions$1" --num "$4" --prompts questions --seed 3 "${cool[@]}"
    }
    rows heldout --num "${HELDOUT:-256}" --max-new-tokens 127 --suppress-eos --seed 12
    sets "" "${NUM:-16384}" "${CHATS:-8192}" "${CHATS:-8192}"
    sets -more "${MORE_TEXTS:-4096}" "${MORE_CHATS:-4096}" "${MORE_QUESTIONS:-12288}"  # the last stage's
fi

if stage train; then
    part=""  # of the trajectories
    g() { run train --base "$base" --trajectories "$out"/{text,chat,questions}"$part" --heldout-trajectories "$out/heldout" --layers 2 --mlp 0.875 \
        --features 10 20 ${ROWS:---rows 2 --next-share 1 --next-decay 0.2} --steps 100000 --eval-every 100000 --checkpoint-every 100000 --untimed 5 --output "$out/$1" --max-seconds "${@:2}"; }
    deep=(--slices 8 --slice-states 23 --rollout 7)
    g one "${TRAIN_SECONDS:-300}" --slices 16 --slice-states 19 --lr 3e-3 --warmup 50
    g deep "${DEEP_SECONDS:-130}" "${deep[@]}" --lr 1.5e-3 --init "$out/one/sampler"
    gpus=1 g back "${BACK_SECONDS:-90}" "${deep[@]}" --reverse 0.5 --lr 2e-3 --init "$out/deep/sampler"
    part=-more gpus=1 g more "${MORE_SECONDS:-50}" "${deep[@]}" --reverse 0.5 --lr 1.5e-3 --init "$out/back/sampler"
fi

if stage eval; then
    g=${SAMPLER:-$out/more/sampler}
    run eval divergence --base "$base" --sampler "$g" --n 256 --max-new-tokens 127 --tokens-per-step 2 4 8 --output "$out/law"
    run eval table --base "$base" --sampler "$g" --n "${N:-2048}" --max-new-tokens 127 --batch-size 1024 --divergence 0 --temperatures 1.0 \
        --tokens-per-step 2 4 8 --output "$out/table"
    python3 recipes/answers.py --base "$base" --sampler "$g"
fi
