#!/usr/bin/env bash
# One run for each slide, from a plain shell loop: for schedulers that start one command a slide.
# On one machine a single `bioptimus embed SLIDES` is faster: it loads the model once and works on
# several slides at a time. Both give the same files, and a rerun of either goes on where it was.
#
# usage: loop.sh SLIDES OUT [OPTIONS OF bioptimus embed]
set -uo pipefail
slides=${1:?a folder of slides} out=${2:?a folder for the results}
shift 2

failed=0
while IFS= read -r -d '' slide; do
  code=0
  bioptimus embed "$slide" --out "$out" "$@" </dev/null || code=$?
  case $code in
    0) ;;
    1) failed=$((failed + 1)) ;; # this slide failed; the others may not
    *) exit "$code" ;;           # 2: wrong usage; 130, 143: stopped
  esac
done < <(find "$slides" -type f \( -iname '*.svs' -o -iname '*.ndpi' -o -iname '*.tif*' \) -print0 | sort -z)

echo "$failed slides failed" >&2
[ "$failed" -eq 0 ]
