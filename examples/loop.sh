#!/usr/bin/env bash
# One run for each slide, from a plain shell loop: for schedulers that start one command a slide.
# On one machine a single `bioptimus embed SLIDES` is faster: it loads the model once and works on
# several slides at a time. Both give the same files, and a rerun of either goes on where it was.
# DICOM series are left to `bioptimus embed`: which files are one slide, their names do not tell.
#
# usage: loop.sh SLIDES OUT [OPTIONS OF bioptimus embed]
set -uo pipefail
slides=${1:?a folder of slides} out=${2:?a folder for the results}
shift 2
slides=${slides%/}

kinds=(-false)
for extension in svs tif tiff ndpi scn mrxs bif vms vmu svslide czi; do
  kinds+=(-o -iname "*.$extension")
done
# No hidden files: macOS leaves a ._x.svs beside each x.svs that it copies to a share.
found=() results=()
while IFS= read -r -d '' slide; do
  found+=("$slide")
  name=${slide%.*}
  results+=("${name%.[oO][mM][eE]}")
done < <(find "$slides" -mindepth 1 -name '.*' -prune -o \
  -type f \( "${kinds[@]}" \) -print0 | sort -z)

# x.svs and x.tif in one folder: the second would be refused, or replace the first's result.
twice=$(printf '%s\n' ${results[@]+"${results[@]}"} | sort | uniq -d)
if [ -n "$twice" ]; then
  echo "several slides of one name: $twice; give each kind a loop and an OUT of its own" >&2
  exit 2
fi

quoted() { printf '"%s"' "${1//\"/\"\"}"; }

failed=0
for slide in ${found[@]+"${found[@]}"}; do
  code=0
  # A list of one slide, that says where it lies in the folder: so does its result in OUT.
  printf 'slide,relative_path\n%s,%s\n' "$(quoted "$slide")" "$(quoted "${slide#"$slides"/}")" |
    bioptimus embed - --out "$out" "$@" || code=$?
  case $code in
    0) ;;
    1) failed=$((failed + 1)) ;; # this slide failed; the others may not
    *) exit "$code" ;;           # 2: wrong usage; 130, 143: stopped
  esac
done

echo "$failed slides failed" >&2
[ "$failed" -eq 0 ]
