#!/usr/bin/env bash
# Every study on several devices, on one machine with 8 GPUs. Some 110 trials of about half a minute make an hour:
#
#     bash results/studies-8-gpus/commands.sh                # all of them
#     bash results/studies-8-gpus/commands.sh scale links    # some of them: scale, links, ladders, race, page
#
# Each study writes its record into its own folder below $OUT, by default this one. What is done is not done again, and an
# interrupted study resumes: run the same line again. At the end docs/several-devices.md is written from the records.
#
#     RUSH, PYTHON   how to call them                 DEVICES  GPUs to use, a power of two from 2; 8
#     OUT            where the records go             TINY=1   a rehearsal with tiny stand-ins on CPU ranks
#     DATA           words that name the text         LIST=1   only print the commands, without running them
set -euo pipefail
cd "$(dirname "$0")/../.."
RUSH="${RUSH:-rush}"
PYTHON="${PYTHON:-python3}"
OUT="${OUT:-results/studies-8-gpus}"
DEVICES="${DEVICES:-8}"
given="${DATA:-}"
read -ra DATA <<<"${given:-data.source=python-stdlib data.tokenizer=train data.vocab_size=32768}"
counts=1
for ((count = 2; count <= DEVICES; count *= 2)); do counts+=",$count"; done

if [ -n "${TINY:-}" ]; then
    # The same commands with a model that a CPU trains: they show that every study runs, resumes and is drawn.
    read -ra DATA <<<"$given"
    SMALL=(tiny batch.micro=1 batch.sequence=64 model.shape.num_layers=2 "batch.total_tokens=$((128 * DEVICES))")
    LARGE=(llama-tiny batch.micro=1 batch.sequence=64 "batch.total_tokens=$((128 * DEVICES))")
    QUICK=(measure.processes=1 measure.windows=2 measure.window_ms=10.0 measure.warmup_max_steps=2 parity.steps=2)
    LIMITS=(0:24gb:results/studies-8-gpus/tiny-limit.toml)
    RACER=(tiny)
    RACE=(batch.micro=1 batch.sequence=64 model.shape.num_layers=1 "batch.total_tokens=$((64 * DEVICES))" run.validate_sequences=4)
    TOKENS=$((64 * DEVICES * 8))
else
    # 1B in mixed precision: ddp fits. 8B: only shards fit, so it is laid out without one device to compare with.
    MIXED='techniques=["amp_bf16","flash_attention","fused_adamw",{name="compile",scope="block"}]'
    SMALL=(llama-3.2-1b "$MIXED" batch.micro=4 "batch.total_tokens=$((8192 * 4 * DEVICES))")
    LARGE=(llama-3.1-8b "$MIXED" techniques+=checkpoint_selective batch.micro=1 batch.sequence=4096
        "batch.total_tokens=$((4096 * 4 * DEVICES))" 'parity.changes={"model.shape.num_layers" = 2}')
    QUICK=(measure.processes=2 measure.windows=6 measure.warmup_max_steps=12)
    LIMITS=(0:80gb:llama-3.2-1b-80gb 1:24gb:llama-3.2-1b-24gb)
    RACER=(llama-3.2-1b "$MIXED")
    RACE=(batch.micro=4 "batch.total_tokens=$((2048 * 4 * DEVICES))" run.validate_sequences=64)
    TOKENS=40000000
fi

# Run a command, or say that it is done: a file that is written after it tells so.
study() { # NAME COMMAND…
    local name="$1" start=$SECONDS
    shift
    if [ -n "${LIST:-}" ]; then
        printf '%q ' "$@"
        echo
        return
    fi
    mkdir -p "$OUT"
    if [ -f "$OUT/.done-$name" ]; then
        echo "$name: done before"
        return
    fi
    echo "$name: $*"
    "$@"
    touch "$OUT/.done-$name"
    echo "$name: $((SECONDS - start)) s"
}

# Strong and weak scaling of every layout on 1, 2, 4, 8 devices, with parity, exposed communication and memory.
scale() {
    study scale-1b "$RUSH" scale "${SMALL[@]}" ${DATA[@]+"${DATA[@]}"} "${QUICK[@]}" --devices "$counts" \
        --layouts ddp,zero2,zero3,tp,pp --group-of-one --no-links --out "$OUT/scale-1b"
    study scale-cp "$RUSH" scale "${SMALL[@]}" ${DATA[@]+"${DATA[@]}"} "${QUICK[@]}" --devices "1,$DEVICES" \
        --layouts cp,hybrid,zero3xtp2 --no-links --out "$OUT/scale-cp"
    study scale-8b "$RUSH" scale "${LARGE[@]}" ${DATA[@]+"${DATA[@]}"} "${QUICK[@]}" --devices "$((DEVICES / 2)),$DEVICES" \
        --layouts zero2,zero3,zero3xtp2 --no-links --out "$OUT/scale-8b"
}

# NVLink against the way through host memory: the same job with peer-to-peer access and without (NCCL_P2P_DISABLE=1), and
# what the collectives carry over message sizes, both ways.
links() {
    study links "$RUSH" scale "${SMALL[@]}" ${DATA[@]+"${DATA[@]}"} "${QUICK[@]}" --devices "1,$DEVICES" \
        --layouts ddp,zero2,zero3 --without-peers --out "$OUT/links"
}

# Checkpointing into a larger batch at 80 and at 24 GB, each on a GPU of its own, at the same time.
ladders() {
    local one limit failed=0
    for one in "${LIMITS[@]}"; do
        limit="${one#*:}"
        study "ladder-${limit%%:*}" env CUDA_VISIBLE_DEVICES="${one%%:*}" "$RUSH" ladder "${limit#*:}" \
            ${DATA[@]+"${DATA[@]}"} --out "$OUT/llama-3.2-1b-${limit%%:*}" &
        if [ -n "${LIST:-}${TINY:-}" ]; then wait $! || failed=1; fi
    done
    for one in $(jobs -p); do wait "$one" || failed=1; done
    return $failed
}

# ZeRO-2 against ZeRO-3 to the same loss.
race() {
    study race-zero "$RUSH" race ${DATA[@]+"${DATA[@]}"} "${RACE[@]}" "layout.fsdp=$DEVICES" \
        "${RACER[@]}" 'techniques+={name="fsdp",stage="gradients"}' \
        "${RACER[@]}" 'techniques+={name="fsdp",stage="parameters"}' \
        --tokens "$TOKENS" --legs 2 --points 8 --out "$OUT/race-zero"
}

page() {
    if [ -z "${LIST:-}" ] && [ -z "${TINY:-}" ]; then "$PYTHON" scripts/several_devices_page.py; fi
}

for step in "${@:-}"; do
    case "$step" in
        "") scale && links && ladders && race && page ;;
        scale | links | ladders | race | page) "$step" ;;
        *) echo "there is no study $step; allowed: scale, links, ladders, race, page" >&2 && exit 2 ;;
    esac
done
