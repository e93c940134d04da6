#!/usr/bin/env bash
# The text of the story: fetched, cleaned, made into questions, and packed into one file that travels to the GPU machine.
#
#     bash examples/from-nothing/text.sh
#
# Needs Debian or Ubuntu with a network, and the extra `corpus` of rush. Some 800 MB are fetched; twenty minutes on two cores.
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

# Mixed, so that the tokenizer, which is trained on the first 64 MB, sees some of everything.
[ -f "$WORK/text/corpus.jsonl" ] ||
    cat "$WORK/text/words.jsonl" "$WORK/text/prose.jsonl" | shuf --random-source=<(yes 1337) >"$WORK/text/corpus.jsonl"
[ -f "$WORK/text/choices-synonyms.jsonl" ] || $PYTHON $HERE/questions.py --to "$WORK"

mkdir -p "$WORK/text/gathered"
cp "$WORK/raw/counted.json" "$WORK/text/gathered/packages.json"
cp "$WORK/text/words.removed/report.json" "$WORK/text/gathered/words.json"
cp "$WORK/text/prose.removed/report.json" "$WORK/text/gathered/prose.json"
cd "$WORK"
# One window over everything: an answer is a few bytes beside the entry that it is from.
tar c text/corpus.jsonl text/{questions,pairs,test-questions,test-pairs,choices-definitions,choices-synonyms}.jsonl text/gathered |
    xz --lzma2=preset=6,dict=256MiB >text.tar.xz.half
mv text.tar.xz.half text.tar.xz
ls -l text.tar.xz
