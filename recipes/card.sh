#!/usr/bin/env bash
# What docs/results/ says about speed, training cost and tasks on a card, stage by stage; each stage ends within ten minutes.
#
#   recipes/card.sh OUTPUT STAGE...        DATA=folder of gsm8k/, math/, mbpp/ and humaneval/; CHATS=file of prompts
#
# check      the GPU tests, and the fast decoders against the reference
# runtime    tokens/s and components at Dream-7B's shape: eager, graphs, and the public loop's way of working
# compiled   the same on compiled layers, with the cheaper steps of g
# llada      LLaDA-8B's shape
# quantized  int8 and fp8 weights, and products in fp8
# cost       training at LLaDA-8B's shape (Dream-7B's: recipes/training_cost.py dream)
# scaling    windows/s of one process and of one a card, on `smol`; needs OUTPUT/text (adjust trajectories)
# small      memory and time at the settings that docs/training.md has for a card of 24 GB
# tasks      GSM8K, MATH, HumanEval, MBPP and ParallelBench with `smol` (runs what the model writes, in the sandbox)
# ablations  some knobs of g's training on an equal budget, on a few trajectories made here: ONLY="shipped seed-1" picks them
# rivals     EDLM and APD beside ADJUST, n = 1,024
# law        distance to the joint law: T = 1 in bf16 and fp32, T = .6; and the rule that tunes rivals
# forms      the paper's two forms and our recipe on the forward KL, FORM_SECONDS of training each, then their K-tables
# samesize   speed at Dream-7B's shape with a g of the form that ships
set -uo pipefail
failed=0
trap 'failed=1' ERR
out=$1
shift
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
run() { python3 -m adjust_dlm.cli "$@"; }
many() { python3 -m torch.distributed.run --standalone --nproc-per-node "$gpus" -m -- adjust_dlm.cli "$@"; }
bench() { run bench runtime "$@"; }
task() { many eval "$1" --base smol --chat --shots 0 --max-new-tokens 128 --temperature 0 --batch-size 256 --decoders parallel adjust \
    --tokens-per-step 1 2 4 8 --output "$out/$1" "${@:2}"; }
sparse=adjust:sparse=true

for stage in "$@"; do
    echo "== $stage, $(date +%T)"
    case $stage in
    check)
        python3 -m pytest -q -m gpu tests/test_gpu.py
        python3 -m pytest -q tests/test_kernels_layer.py
        python3 recipes/fast_check.py ;;
    runtime) bench --base dream-7b-shape --forms eager fast public --decoders parallel adjust "$sparse" components --seconds 240 \
        --output "$out/runtime" ;;
    compiled) bench --base dream-7b-shape --forms compiled --decoders parallel adjust "$sparse" components --seconds 240 \
        --output "$out/compiled" ;;
    llada) bench --base llada-8b-shape --order entropy --forms fast --decoders parallel adjust "$sparse" components --seconds 150 \
        --output "$out/llada" ;;
    quantized) for kind in fp8-dynamic int8 fp8; do bench --base dream-7b-shape --quantize $kind --forms fast compiled --decoders parallel \
        "$sparse" components --batch-sizes 1 32 --seconds 100 --output "$out/$kind"; done ;;
    cost) python3 recipes/training_cost.py llada --output "$out/llada-cost.json" ;;
    scaling) for world in 1 "$gpus"; do python3 -m torch.distributed.run --standalone --nproc-per-node "$world" -m -- adjust_dlm.cli train \
        --trajectories "$out/text" --output "$out/scaling-$world" --slices 32 --rows 32 --compile --untimed 20 --max-seconds 25 \
        --steps 100000 --eval-every 100000 --checkpoint-every 100000; done ;;
    small) python3 recipes/training_cost.py dream --slices 1 --states 7 --batch 64 --forms sliced --seconds 60 --output "$out/small.json" ;;
    tasks)
        run eval parallelbench --base smol --tasks all --n 100 --tokens-per-step 1 2 4 8 --decoders parallel adjust --batch-size 256 --output "$out/parallelbench"
        task gsm8k --data "$DATA/gsm8k/test.jsonl"
        task math --data "$DATA/math/math_test_5000.jsonl" --per-subject 50
        task humaneval --data "$DATA/humaneval/HumanEval.jsonl.gz" --allow-code-execution
        task mbpp --data "$DATA/mbpp/mbpp.jsonl" --allow-code-execution ;;
    ablations)
        rows() { run trajectories --base smol --batch-size 256 --shard-rows 256 --output "$out/$1" --num "$2" "${@:3}"; }
        rows text 2048 --suppress-eos
        rows text-t06 256 --temperature 0.6 --suppress-eos --seed 1
        rows chat 256 --prompts "$CHATS" --chat --max-new-tokens 64 --seed 2
        rows lists 128 --prompts lists --max-new-tokens 48 --seed 3
        for ((card = 0; card < gpus; card++)); do CUDA_VISIBLE_DEVICES=$card python3 recipes/ablations.py --trajectories "$out"/{text,text-t06,chat,lists} \
            --output "$out/ablations" --share "$card/$gpus" --seconds 30 --slices 32 --ks 4 --n 1024 --heldout 256 --stop-after 440 \
            --only ${ONLY:-shipped seed-1 seed-2 text-alone no-ends all-rows slices-8} & done
        wait ;;
    rivals) many eval table --base smol --n 1024 --temperatures 1.0 --tokens-per-step 2 4 --variants edlm:tokens_per_step=2 edlm:tokens_per_step=4 \
        apd:lookahead=32,mixture=0.5 "adjust:tokens_per_step=4,sparse=true" --output "$out/rivals" ;;
    law)
        run eval divergence --base smol --n 256 --decoders joint parallel adjust adjust:candidates=0 --output "$out/law-bf16"
        run eval divergence --base smol --n 256 --dtype float32 --output "$out/law-fp32"
        run eval divergence --base smol --n 256 --temperatures 0.6 --output "$out/law-t06"
        rules=()
        for rival in parallel:tokens_per_step={2,4,8} threshold:score=likeliest,tau={0.6,0.3,0.15} entropy_bound:gamma={1,4,16}; do
            rules+=("$rival" "$rival",temperature=0.9 "$rival",top_p=0.95)  # lower ones only where these are nearer
        done
        run eval divergence --base smol --n 64 --seed 5 --sources own --decoders "${rules[@]}" --output "$out/law-rivals" ;;
    forms)
        run trajectories --base smol --batch-size 256 --shard-rows 256 --suppress-eos --num 2048 --seed 20 --output "$out/forms-text"
        run trajectories --base smol --batch-size 256 --shard-rows 256 --suppress-eos --num 256 --seed 22 --output "$out/forms-heldout"
        form() { run train --base smol --trajectories "$out/forms-text" --heldout-trajectories "$out/forms-heldout" --suppress-eos --steps 1000000 \
            --eval-every 1000000 --checkpoint-every 2000 --max-seconds "${FORM_SECONDS:-120}" --output "$out/form-$1" "${@:2}"; }
        form printed --preset printed
        form released --preset released
        form forward --layers 2 --mlp 0.875 --features 10 20 --rows 32 --slices 32 --lr 3e-3 --warmup 100
        for g in printed released forward; do run eval table --base smol --n 1024 --divergence 128 --temperatures 1.0 --sampler "$out/form-$g/sampler" \
            --output "$out/forms" && cp "$out/forms/result.json" "$out/forms/$g.json"; done ;;
    samesize) bench --base dream-7b-shape --sampler src/adjust_dlm/models/smol-sampler --forms fast \
        --decoders parallel adjust adjust:candidates=0 "$sparse" --batch-sizes 8 32 1 --seconds 105 --output "$out/samesize" ;;
    *) echo "$stage is no stage; see the head of $0" >&2 && exit 2 ;;
    esac
done
exit $failed
