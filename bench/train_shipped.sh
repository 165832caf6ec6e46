#!/usr/bin/env bash
# Trains the drafters that ship with the embedded target: texts, five trainings at once, export.
#
#     bench/train_shipped.sh [FOLDER]
#
# Wants one GPU of 80 GB or more; on one NVIDIA H200 it takes 20 minutes. The texts are seven shards
# of what 3.3 minutes allow (9.6 million tokens there); what was stopped resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
FOLDER=${1:-runs/shipped}
PYTHON=${PYTHON:-python3}
mkdir -p "$FOLDER"

for seed in 11 12 13 14 15 16 17; do
  "$PYTHON" -m slipstream texts --out "$FOLDER/texts" --tokens 3000000 --users 256 \
    --seed "$seed" --minutes 3.3 &
done
wait

train() {
  local method=$1
  shift
  "$PYTHON" -m slipstream train "$method" --texts "$FOLDER/texts" --out "$FOLDER/$method" \
    --minutes 13.2 --batch 32 --lr 3e-3 --optimizer muon "$@" > "$FOLDER/$method.log" 2>&1 &
}

BLOCK="--draft-len 7 --layers 2 --inner 320 --anchors 32"
train mtp --draft-len 3 --inner 768 --anchors 48
train eagle3 --draft-len 4 --inner 768 --anchors 48 --draft-vocab 8192
train dflash $BLOCK
train dflash2 $BLOCK --rank 16
train dspark $BLOCK --rank 16
wait

for method in mtp eagle3 dflash dflash2 dspark; do
  "$PYTHON" -m slipstream export "$method:$FOLDER/$method" --compact \
    --out "slipstream/shipped/smollm2-135m/$method"
done
