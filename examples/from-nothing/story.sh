#!/usr/bin/env bash
# One model from nothing to a conversation, with nothing but `rush` commands:
#
#     bash examples/from-nothing/story.sh prepare pretrain        # one call of at most ten minutes on one H200
#     bash examples/from-nothing/story.sh finetune                # another one, of some five
#
# A stage that is done is not done again; an interrupted one resumes. Records (no weights) are packed into $OUT, or
# runs/from-nothing, as records.tar.gz whenever the script ends. text.sh made the text; page.py makes the page.
#
#     RUSH, PYTHON   how to call them                     LIMIT   seconds that `prepare pretrain` may take together
#     RATE           tokens/s to expect                   TINY=1  a rehearsal with a tiny model on a CPU, some minutes
#     STEPS          of pretraining, instead of what LIMIT and RATE give; what one call does not finish, the next resumes
#     PRETRAIN_CHANGES, SFT_CHANGES, DPO_CHANGES          more KEY=VALUE for a recipe, without spaces inside
set -euo pipefail
began=$SECONDS
cd "$(dirname "$0")/../.."
RUSH="${RUSH:-rush}"
PYTHON="${PYTHON:-python3}"
HERE=examples/from-nothing
WORK="${WORK:-build/from-nothing}"
RUNS="${RUNS:-runs/from-nothing}"
OUT="${OUT:-$RUNS}"
LIMIT="${LIMIT:-560}"
RATE="${RATE:-600000}"
TEXT="$WORK/text"
export RUSH_CACHE="${RUSH_CACHE:-$PWD/$WORK/cache}"
mkdir -p "$RUNS"/{done,logs,evaluations,kills} "$OUT"

STEP_TOKENS=131072
if [ -n "${TINY:-}" ]; then
    # The same stages at a size that two CPU cores manage: the techniques that run there, and little text.
    STEP_TOKENS=512
    CORPUS=(data.source=files "data.files=[\"$TEXT/corpus.jsonl\"]" data.limit=4000 data.tokenizer=train data.vocab_size=4096
        data.validation=0.01)
    PRETRAIN=(tiny model.shape.vocab_size=4096 'techniques=["loader_workers"]' batch.sequence=128 batch.micro=2
        run.validate_sequences=8)
    SFT=(model.name=tiny model.shape.vocab_size=4096 'techniques=["pack_best_fit"]' batch.micro=2 batch.sequence=256
        batch.total_tokens=512 schedule.steps=40 run.save_every=20 run.validate_every=20 run.validate_sequences=8 run.sample_every=20
        data.limit=2000)
    DPO=(model.name=tiny model.shape.vocab_size=4096 'techniques=["pad"]' batch.micro=2 batch.total_tokens=512 schedule.steps=20
        schedule.warmup=5 run.save_every=10 run.validate_every=10 run.validate_sequences=8 run.sample_every=10 data.limit=200
        optimizer.lr=1e-4)
    EVALUATE=(--limit 20 --batch 8)
else
    sources="$($PYTHON -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')"
    CORPUS=(data.source=files "data.files=[\"$TEXT/corpus.jsonl\",\"$sources/**/*.py\"]" data.tokenizer=train data.vocab_size=32768
        data.validation=0.005)
    PRETRAIN=(gpt2-124m-fp8 run.validate_sequences=256)
    SFT=()
    DPO=()
    EVALUATE=(--batch 64)
fi

read -ra more <<<"${PRETRAIN_CHANGES:-}" && PRETRAIN+=(${more[@]+"${more[@]}"})
read -ra more <<<"${SFT_CHANGES:-}" && SFT+=(${more[@]+"${more[@]}"})
read -ra more <<<"${DPO_CHANGES:-}" && DPO+=(${more[@]+"${more[@]}"})

# All records but weights, and without the paths of this machine.
pack() {
    local copy prefix
    copy="$(mktemp -d)"
    prefix="$($PYTHON -c 'import sys; print(sys.prefix)')"
    tar c --exclude=checkpoints --exclude='*.safetensors' --exclude=tensorboard --exclude=reference --exclude=tokenizer \
        --exclude=exported --exclude=done --exclude=.lock --exclude=records.tar.gz -C "$RUNS" . | tar x -C "$copy"
    find "$copy" -type f -exec sed -i "s#$PWD/##g; s#$WORK#build/from-nothing#g; s#${WORK#/}#build/from-nothing#g; s#${sources:-$PWD/}#site-packages/torch#g; s#$prefix/#python/#g" {} +
    tar czf "$OUT/records.tar.gz" -C "$copy" .
    rm -rf "$copy"
}
trap pack EXIT
trap 'kill $(jobs -p) 2>/dev/null || true; exit 143' TERM INT

# A command as one would type it.
typed() {
    local word line=""
    for word in "$@"; do
        case "$word" in
            *[!A-Za-z0-9_./=:,+%-]*) line+=" '$word'" ;;
            *) line+=" $word" ;;
        esac
    done
    line="${line# }"
    line="${line/"$RUSH"/rush}"
    echo "\$ ${line/#"$PYTHON"/python}"
}
# Run a command, its output in a log of its own; the command and its seconds go down in commands.log.
logged() { # NAME COMMAND…
    local name="$1" start=$SECONDS
    shift
    typed "$@" | tee -a "$RUNS/commands.log" >"$RUNS/logs/$name.log"
    if "$@" >>"$RUNS/logs/$name.log" 2>&1; then
        echo "  # $name: $((SECONDS - start)) s" | tee -a "$RUNS/commands.log"
    else
        echo "  # $name: FAILED after $((SECONDS - start)) s" | tee -a "$RUNS/commands.log"
        tail -n 30 "$RUNS/logs/$name.log"
        return 1
    fi
}
# The same for a command that prints one JSON value.
recorded() { # NAME COMMAND…
    local name="$1" start=$SECONDS
    shift
    typed "$@" --json >>"$RUNS/commands.log"
    if "$@" --json >"$RUNS/evaluations/$name.half" 2>"$RUNS/logs/$name.log"; then
        mv "$RUNS/evaluations/$name.half" "$RUNS/evaluations/$name.json"
        echo "  # $name: $((SECONDS - start)) s"
    else
        echo "  # $name: FAILED after $((SECONDS - start)) s"
        cat "$RUNS/logs/$name.log"
        return 1
    fi
}
all() { # wait for all jobs in the background, and fail where one did
    local failed=0 job
    for job in $(jobs -p); do wait "$job" || failed=1; done
    return $failed
}

prepare() {
    local packed
    if [ ! -f "$TEXT/prose.jsonl" ]; then
        for packed in "$WORK"/packed/*.tar.xz; do
            $PYTHON -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$packed" "$WORK" &
        done
        all
    fi
    [ -f "$TEXT/words.jsonl" ] && [ -f "$TEXT/prose.jsonl" ] || { echo "there is no text in $WORK/packed; text.sh makes it" >&2; return 3; }
    # Mixed, so that the tokenizer, which is trained on the first 64 MB, sees some of everything.
    if [ ! -f "$TEXT/corpus.jsonl" ]; then
        cat "$TEXT/words.jsonl" "$TEXT/prose.jsonl" | shuf --random-source=<(yes 1337) >"$TEXT/corpus.half"
        mv "$TEXT/corpus.half" "$TEXT/corpus.jsonl"
    fi
    cp -r "$TEXT/gathered" "$RUNS/" 2>/dev/null || true
    # A second call finds what is prepared, and prints its counts.
    logged prepare $RUSH data prepare "${PRETRAIN[@]}" "${CORPUS[@]}"
    recorded corpus $RUSH data prepare "${PRETRAIN[@]}" "${CORPUS[@]}"
}

# As many steps as the time gives: three starts of the process, each with its compilation, and the steps done twice go off.
pretrain() {
    local run="$RUNS/pretrain" left steps save first second
    if [ ! -f "$RUNS/steps" ]; then
        left=$((LIMIT - (SECONDS - began) - ${STARTS:-150}))
        steps=$((left * RATE / STEP_TOKENS / 20 * 20))
        echo "${STEPS:-$steps}" >"$RUNS/steps"
    fi
    steps=$(cat "$RUNS/steps")
    save=$((steps / 20))
    first=$((steps * 3 / 10 + save / 2))
    second=$((steps * 7 / 10 + save / 2))
    local recipe=("${PRETRAIN[@]}" "${CORPUS[@]}" batch.total_tokens=$STEP_TOKENS schedule.steps="$steps" schedule.warmup=$((steps / 20))
        run.save_every=$save run.validate_every=$save run.sample_every=$((steps / 10))
        "run.sample_prompt=A dictionary is" --out "$run" --resume)
    [ -f "$RUNS/kills/1.jsonl" ] ||
        logged pretrain-1 $PYTHON $HERE/killing.py --run "$run" --at $first --keep "$RUNS/kills/1.jsonl" -- $RUSH train "${recipe[@]}"
    [ -f "$RUNS/kills/2.jsonl" ] ||
        logged pretrain-2 $PYTHON $HERE/killing.py --run "$run" --at $second --keep "$RUNS/kills/2.jsonl" -- $RUSH train "${recipe[@]}"
    logged pretrain-3 $RUSH train --out "$run" --resume
}

sft() {
    logged sft $RUSH train $HERE/sft.toml model.init_from="$RUNS/pretrain" "data.files=[\"$TEXT/questions.jsonl\"]" ${SFT[@]+"${SFT[@]}"} \
        --out "$RUNS/sft" --resume
}

dpo() {
    logged dpo $RUSH train $HERE/dpo.toml model.init_from="$RUNS/sft" "data.files=[\"$TEXT/pairs.jsonl\"]" ${DPO[@]+"${DPO[@]}"} \
        --out "$RUNS/dpo" --resume
}

judge() { # RUN, and what it is held against: the two multiple choices, side by side
    local name="$1"
    recorded "$name-definitions" $RUSH evaluate "$RUNS/$name" --choices "$TEXT/choices-definitions.jsonl" --answers 0 "${EVALUATE[@]}" &
    recorded "$name-synonyms" $RUSH evaluate "$RUNS/$name" --choices "$TEXT/choices-synonyms.jsonl" --answers 0 "${EVALUATE[@]}" &
}

wrote() { # NAME PROMPT: how the pretrained model continues
    $RUSH generate "$RUNS/pretrain" --prompt "$2" --max-tokens 80 --temperature 0.7 >"$RUNS/evaluations/wrote-$1.txt" 2>"$RUNS/logs/wrote-$1.log" &
}

chatted() { # RUN
    logged "chat-$1" $PYTHON $HERE/transcript.py $HERE/chat.txt -- $RUSH chat "$RUNS/$1" --temperature 0 --max-tokens 80
    cp "$RUNS/logs/chat-$1.log" "$RUNS/evaluations/chat-$1.txt"
}

after_pretrain() {
    judge pretrain
    wrote word "butterfly (noun):"
    wrote debian "Debian is a"
    wrote novel "It is a truth universally acknowledged, that"
    wrote code "def read_file(path):"
    all
}

after_sft() {
    judge sft
    recorded sft-questions $RUSH evaluate "$RUNS/sft" --against "$RUNS/pretrain" --data "$TEXT/test-questions.jsonl" --answers 8 "${EVALUATE[@]}" &
    chatted sft &
    all
}

after_dpo() {
    judge dpo
    recorded dpo-pairs $RUSH evaluate "$RUNS/dpo" --against "$RUNS/sft" --data "$TEXT/test-pairs.jsonl" --answers 8 "${EVALUATE[@]}" &
    recorded dpo-questions $RUSH evaluate "$RUNS/dpo" --data "$TEXT/test-questions.jsonl" --answers 0 "${EVALUATE[@]}" &
    chatted dpo &
    export_model &
    all
}

export_model() {
    rm -rf "$RUNS/exported"
    logged export $RUSH export "$RUNS/dpo" --to "$RUNS/exported" --dtype float32
    logged same-logits $PYTHON $HERE/same_logits.py "$RUNS/dpo" "$RUNS/exported" "$RUNS/evaluations/logits.json"
}

stage() { # a stage once (no && here: it would switch off set -e inside)
    if [ -f "$RUNS/done/$1" ]; then return; fi
    "$1"
    touch "$RUNS/done/$1"
}

for wanted in "$@"; do
    case "$wanted" in
        prepare | pretrain | after_pretrain | sft | after_sft | dpo | after_dpo) stage "$wanted" ;;
        finetune) for one in after_pretrain sft after_sft dpo after_dpo; do stage $one; done ;;
        *) echo "no stage $wanted; there are prepare, pretrain, after_pretrain, sft, after_sft, dpo, after_dpo and finetune" >&2; exit 2 ;;
    esac
done
echo "done in $((SECONDS - began)) s"
