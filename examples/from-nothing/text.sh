#!/usr/bin/env bash
# The text of the story: fetched, cleaned, made into questions, and packed into files that travel to the GPU machine.
#
#     bash examples/from-nothing/text.sh
#
# Needs Debian or Ubuntu with a network, and the extra `corpus` of rush. Some 600 MB are fetched; twenty minutes on two cores.
# Nothing is installed, nothing is written outside of build/from-nothing (git-ignored).
set -euo pipefail
cd "$(dirname "$0")/../.."
RUSH="${RUSH:-rush}"
PYTHON="${PYTHON:-python3}"
HERE=examples/from-nothing
WORK="${WORK:-build/from-nothing}"

[ -f "$WORK/raw/counted.json" ] || $PYTHON $HERE/gather.py --to "$WORK"

cleaned() { # PIPELINE FILES…
    local name="$1"
    shift
    [ -f "$WORK/text/$name.jsonl" ] || $RUSH data clean "$HERE/$name.toml" "$@" -o "$WORK/text/$name.jsonl"
}
mapfile -t dictionaries < <(ls "$WORK"/raw/dict-*.jsonl "$WORK"/raw/wordnet-base.jsonl)
mapfile -t books < <(ls "$WORK"/raw/*.jsonl | grep -v -e /dict- -e /wordnet-base)
cleaned words "${dictionaries[@]}"
cleaned prose "${books[@]}"

[ -f "$WORK/text/choices-synonyms.jsonl" ] || $PYTHON $HERE/questions.py --to "$WORK"

mkdir -p "$WORK/text/gathered" "$WORK/packed"
cp "$WORK/raw/counted.json" "$WORK/text/gathered/packages.json"
for name in words prose; do # what each stage removed, without the examples
    $PYTHON -c 'import json, sys; print(json.dumps([{k: s[k] for k in ("name", "documents_in", "removed")} for s in json.load(sys.stdin)["stages"]]))' \
        <"$WORK/text/$name.removed/report.json" >"$WORK/text/gathered/$name.json"
done
# Questions beside the entries that they are from, under one large window: an answer takes a few bytes.
cd "$WORK"
tar c text/words.jsonl text/{questions,pairs,test-questions,test-pairs,choices-definitions,choices-synonyms}.jsonl |
    xz --lzma2=preset=6,dict=128MiB >packed/words.tar.xz &
tar c text/prose.jsonl | xz --lzma2=preset=6,dict=128MiB >packed/prose.tar.xz
tar c text/gathered | xz >packed/gathered.tar.xz
wait
ls -l packed
