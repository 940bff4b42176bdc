#!/usr/bin/env bash
# Makes the whole-canvas base `smol` from the packaged autoregressive one: adapt, trajectories, train, table.
#
#   recipes/smol.sh OUTPUT [GPUS]
#
# Every stage resumes, so the script can be run again after an interruption. Times below are seconds of training on
# two H200; on other machines set ADAPT_SECONDS, TRAIN_SECONDS, DEEP_SECONDS and BACK_SECONDS. STAGES picks some of: adapt trajectories
# train eval. BASE=smol CORPUS=DIR trains another g for the base that ships, with chats from the corpus in DIR.
set -euo pipefail
out=$1
gpus=${2:-1}
run() { python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m -- adjust_dlm.cli "$@"; }

text=${TEXT:-90000} chat=${CHAT:-20000} lists=${LISTS:-30000} num=${NUM:-8192} n=${N:-1024} heldout=${HELDOUT:-1024}
batch=${BATCH:-512} slices=${SLICES:-32}
compile=${COMPILE:---compile}

stage() { [[ " ${STAGES:-adapt trajectories train eval} " == *" $1 "* ]]; }

if stage adapt; then run adapt --ar "${AR:-smol}" --output "$out/base" --text "$text" --chat "$chat" --lists "$lists" --heldout "$heldout" \
    --share-text 0.7 --share-chat 0.2 --share-lists 0.1 \
    --steps "${ADAPT_STEPS:-100000}" --max-seconds "${ADAPT_SECONDS:-420}" --batch-size "$batch" \
    --lora-rank "${LORA_RANK:-64}" --lora-alpha "${LORA_RANK:-64}" --sample-top-p "${TOP_P:-0.9}" --sample-batch "${SAMPLE_BATCH:-4096}" $compile; fi

base=${BASE:-$out/base}
common=(--base "$base" --batch-size "${DECODE_BATCH:-256}" --shard-rows "${DECODE_BATCH:-256}")
if stage trajectories; then
    run trajectories "${common[@]}" --output "$out/text" --num "$num" --suppress-eos $compile
    run trajectories "${common[@]}" --output "$out/more" --num "$num" --suppress-eos --seed 11 $compile
    run trajectories "${common[@]}" --output "$out/heldout" --num "${HELDOUT_ROWS:-256}" --suppress-eos --seed 12
    run trajectories "${common[@]}" --output "$out/text-t06" --num $((num / 8)) --temperature 0.6 --suppress-eos --seed 1
    run trajectories "${common[@]}" --output "$out/chat" --num $((num / 8)) --prompts "corpus:${CORPUS:-$out/base/corpus}" \
        --max-new-tokens 64 --seed 2
    run trajectories "${common[@]}" --output "$out/lists" --num $((num / 16)) --prompts lists --max-new-tokens 48 --seed 3
fi

g=(--layers 2 --mlp 0.875 --features 10 20 --rows 32 --heldout-trajectories "$out/heldout" --steps "${TRAIN_STEPS:-100000}"
    --eval-every "${EVAL_EVERY:-1000}" --checkpoint-every 4000 $compile)
data=(--base "$base" --trajectories "$out/text" "$out/text-t06" "$out/chat" "$out/lists")
if stage train; then
    run train "${data[@]}" "${g[@]}" --output "$out/train" --slices "$slices" --lr 3e-3 --warmup 100 \
        --untimed 20 --max-seconds "${TRAIN_SECONDS:-480}"
    run train "${data[@]}" "${g[@]}" --output "$out/deep" --slices $((slices / 2)) --lr 1e-3 --init "$out/train/sampler" \
        --rollout 7 --slice-states 15 --untimed 20 --max-seconds "${DEEP_SECONDS:-170}"
    run train "${data[@]}" "$out/more" "${g[@]}" --output "$out/back" --slices $((slices / 2)) --lr 2e-3 --init "$out/deep/sampler" \
        --rollout 7 --slice-states 15 --reverse 0.9 --untimed 20 --max-seconds "${BACK_SECONDS:-260}"
fi

if stage eval; then run eval table --base "$base" --sampler "$out/back/sampler" --output "$out/table" --n "$n" --judge "${AR:-smol}" \
    --batch-size "${DECODE_BATCH:-256}" --buckets "${BUCKETS:-0}"; fi
