#!/usr/bin/env bash
# Makes a block base for GSM8K, MATH, HumanEval and MBPP from an autoregressive chat model, and a g for it
# (docs/results/coder.md has what came out).
#
#   AR=FOLDER DATA=DIR recipes/coder.sh OUTPUT [GPUS]
#
# AR is a folder or Hub id of a Qwen2, Qwen3 or Llama model with tied embeddings (ours: recipes/coder_ar.py). DATA is as in
# recipes/coder_tasks.py. Every stage resumes; INIT=FOLDER goes on from an adapter. Replies go on with as many GPUs and the
# same settings only. INVENTED user turns are sampled for chats of the model's own. CHAT=N asks `adjust adapt` for chats
# instead, of a model that writes both turns by itself. g is trained on NUM decodes at low temperatures, NUM at T = 1, and
# SAID of the replies. Times are seconds of training: ADAPT_SECONDS, TRAIN_SECONDS, BACK_SECONDS. STAGES
# picks some of: ar replies adapt joint trajectories train tables.
set -euo pipefail
out=$1
gpus=${2:-1}
mkdir -p "$out"
run() { python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m -- adjust_dlm.cli "$@"; }
stage() { [[ " ${STAGES:-ar replies adapt joint trajectories train tables} " == *" $1 "* ]]; }
here=$(dirname "$0")

asked=(--shots 0 --chat --batch-size "${EVAL_BATCH:-256}" ${LIMIT:+--limit "$LIMIT"})
tasks() { # folder, flags; a base is among them
    run eval gsm8k "${asked[@]}" --data "$DATA/gsm8k/test.jsonl" --max-new-tokens "${NEW:-320}" --output "$1/gsm8k" "${@:2}"
    run eval humaneval "${asked[@]}" --data "$DATA/humaneval/HumanEval.jsonl.gz" --max-new-tokens "${NEW:-320}" --output "$1/humaneval" --allow-code-execution "${@:2}"
    [ -n "${FEW:-}" ] && return
    run eval math "${asked[@]}" --data "$DATA/math/math500_test.jsonl" --max-new-tokens "${NEW_MATH:-512}" --output "$1/math" "${@:2}"
    run eval mbpp "${asked[@]}" --data "$DATA/mbpp/mbpp.jsonl" --max-new-tokens "${NEW:-320}" --output "$1/mbpp" --allow-code-execution "${@:2}"
}
kone=(--decoders joint --tokens-per-step 1 --temperature 0)
if stage ar; then tasks "$out/ar" --base "$AR" "${kone[@]}"; fi

if stage replies; then
    waits=()
    for ((i = 0; i < gpus; i++)); do
        CUDA_VISIBLE_DEVICES=$i python3 "$here/coder_tasks.py" replies "$AR" --data "$DATA" --output "$out/replies-$i.jsonl" --share "$i/$gpus" \
            --samples "${SAMPLES:-4}" --new-tokens "${REPLY_TOKENS:-320}" --batch-size "${REPLY_BATCH:-1024}" \
            --invented "${INVENTED:-16384}" ${LIMIT:+--limit "$LIMIT"} &
        waits+=($!)
    done
    for pid in "${waits[@]}"; do wait "$pid"; done
fi

size=${BLOCK:-16}
if stage adapt; then run adapt --ar "$AR" --output "$out/base" --block-size "$size" --causal --order left_to_right --length "${LENGTH:-512}" \
    --text 0 --chat "${CHAT:-0}" --questions 0 --lists 0 --heldout "${HELDOUT:-128}" --text-files "$out"/replies-*.jsonl --share-chat 0.3 --share-files 0.9 \
    --steps 100000 --max-seconds "${ADAPT_SECONDS:-900}" --batch-size "${BATCH:-64}" --micro-batch "${MICRO:-16}" --lora-rank "${RANK:-24}" --lora-alpha "${RANK:-24}" \
    --lr "${LR:-1.2e-3}" --warmup "${WARMUP:-50}" --sample-batch "${SAMPLE_BATCH:-2048}" --eval-every 0 \
    ${INIT:+--init "$INIT"} ${CORPUS:+--corpus "$CORPUS"}; fi

base=${BASE:-$out/base}
if stage joint; then tasks "$out/joint" --base "$base" "${kone[@]}"; fi

if stage trajectories; then
    rows() { run trajectories --base "$base" --batch-size "${DECODE_BATCH:-512}" --shard-rows "$((4 * ${DECODE_BATCH:-512}))" --output "$out/$1" "${@:2}"; }
    python3 "$here/coder_tasks.py" prompts "$out"/replies-*.jsonl --output "$out"
    OMP_NUM_THREADS=1 python3 "$here/coder_tasks.py" rows "$out"/replies-*.jsonl --base "$base" --output "$out/said" --limit "${SAID:-16384}" --new-tokens "${ROW_TOKENS:-256}" &
    said=$!
    cool=(--chat --temperature 0.1 0.2 --top-p 0.9 --max-new-tokens "${ROW_TOKENS:-256}")  # as the paper's instruct recipe
    rows cool --num "${NUM:-8192}" --prompts "$out/prompts.jsonl" "${cool[@]}"
    rows warm --num "${NUM:-8192}" --prompts "$out/prompts.jsonl" --chat --max-new-tokens "${ROW_TOKENS:-256}" --seed 1
    rows heldout --num "${HELDOUT:-128}" --prompts "$out/heldout-prompts.jsonl" "${cool[@]}" --seed 12
    wait "$said"
fi

if stage train; then
    g() { run train --base "$base" --trajectories "$out"/{cool,warm,said} --heldout-trajectories "$out/heldout" --layers "${LAYERS:-1}" --mlp "${MLP:-0.75}" \
        --features ${FEATURES:-8 16} --rows 2 --next-share 1 --next-decay 0.2 --steps 100000 --eval-every 100000 --checkpoint-every 100000 --untimed 5 \
        --output "$out/$1" --max-seconds "${@:2}"; }
    new=${ROW_TOKENS:-256}
    g one "${TRAIN_SECONDS:-400}" --slices 16 --slice-states $((new + 3)) --lr 2e-3 --warmup 50
    g back "${BACK_SECONDS:-200}" --slices 8 --slice-states $((new + 7)) --rollout 7 --reverse 0.5 --lr 1e-3 --init "$out/one/sampler"
fi

if stage tables; then
    g=${SAMPLER:-$out/back/sampler}
    every=(--base "$base" --sampler "$g" --decoders joint:tokens_per_step=1 parallel adjust {threshold,cascade}:block_length=8,tau={0.9,0.8} factor:block_length=8,f=1 entropy_bound:block_length=8,gamma=0.1 adaptive:block_length=8,gamma=0.4 verified:depth={4,8} --tokens-per-step 2 4 8)
    for temperature in ${TEMPERATURES:-0 0.2}; do tasks "$out/t$temperature" "${every[@]}" --temperature "$temperature"; done
    run eval humaneval "${asked[@]}" --data "$DATA/humaneval/HumanEval.jsonl.gz" --max-new-tokens "${NEW:-320}" --output "$out/t1" --allow-code-execution \
        "${every[@]}" --temperature 1 --top-p 1 --num-samples "${PASS_SAMPLES:-10}" --ks 1 "${PASS_SAMPLES:-10}"
    paired() { # folder, metric: each decoder against joint, problem by problem
        local others=()
        for file in "$1"/samples-*.jsonl; do [[ $file == */samples-joint* ]] || others+=("$file"); done
        python3 -m adjust_dlm.cli eval paired "$1"/samples-joint*.jsonl "${others[@]}" --metric "$2" --output "$1/paired"
    }
    for folder in "$out"/t*/{gsm8k,math,humaneval,mbpp} "$out/t1"; do
        case $folder in *gsm8k) metric=value ;; *math) metric=math_verify ;; *) metric=pass@1 ;; esac
        if [ -f "$folder/result.json" ]; then paired "$folder" "$metric"; fi
    done
fi
