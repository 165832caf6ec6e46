#!/usr/bin/env bash
# Trains the drafters that ship with the embedded target: texts, five trainings at once, export.
#
#     bench/train_shipped.sh [FOLDER]
#
# Wants one GPU of 80 GB or more; on one NVIDIA H200 it takes 35 minutes. Two rounds, as they were
# made: the second has three times the texts, and larger networks that begin as the first round's. It
# made EAGLE-3 larger and no better, so the first round's ships.
# `slipstream texts` has changed since: its prompts quote real code and documents and keep the lab's
# out, which those of the drafters that ship did not wholly (docs/log.md, sixth session).
# Processes that share a GPU do twice as much under NVIDIA's MPS: `nvidia-cuda-mps-control -d` first
# (docs/log.md). Whatever was stopped goes on where it was.
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER=${1:-runs/shipped}
PYTHON=${PYTHON:-python3}
mkdir -p "$FOLDER"

texts() { # minutes, seeds...
  local minutes=$1 seed
  shift
  for seed in "$@"; do
    "$PYTHON" -m slipstream texts --out "$FOLDER/texts" --tokens 3000000 --users 256 \
      --seed "$seed" --minutes "$minutes" &
  done
  wait
}

train() { # round, minutes, method, more...
  local out="$FOLDER/$1/$3" minutes=$2 method=$3
  shift 3
  "$PYTHON" -m slipstream train "$method" --texts "$FOLDER/texts" --out "$out" \
    --minutes "$minutes" --batch 32 --lr 3e-3 --optimizer muon "$@" > "$out.log" 2>&1 &
}

export_all() { # round, folder, methods...
  local round=$1 folder=$2 method
  shift 2
  for method in "$@"; do
    "$PYTHON" -m slipstream export "$method:$FOLDER/$round/$method" --compact --out "$folder/$method"
  done
}

first() {
  local block="--draft-len 7 --layers 2 --inner 320 --anchors 32"
  texts 3.3 11 12 13 14 15 16 17
  train first 13.2 mtp --draft-len 3 --inner 768 --anchors 48
  train first 13.2 eagle3 --draft-len 4 --inner 768 --anchors 48 --draft-vocab 8192
  train first 13.2 dflash $block
  train first 13.2 dflash2 $block --rank 16
  train first 13.2 dspark $block --rank 16
  wait
  export_all first "$FOLDER/small" mtp eagle3 dflash dflash2 dspark
}

second() {
  local small="$FOLDER/small"
  local block="--draft-len 7 --anchors 32 --draft-vocab 12288"
  texts 3.8 21 22 23 24 25 26 27
  train second 11 mtp --from "$small/mtp" --draft-len 3 --anchors 48 --inner 1152 \
    --draft-vocab 8192
  train second 11 dflash --from "$small/dflash" $block --layers 3 --inner 432
  train second 11 dflash2 --from "$small/dflash2" $block --layers 2 --inner 480 --rank 16
  train second 11 dspark --from "$small/dspark" $block --layers 2 --inner 576 --rank 16
  wait
  export_all second slipstream/shipped/smollm2-135m mtp dflash dflash2 dspark
  export_all first slipstream/shipped/smollm2-135m eagle3
}

mkdir -p "$FOLDER/first" "$FOLDER/second"
first
second
