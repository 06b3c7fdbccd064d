#!/bin/bash
# The GPU part of the recipe in two runs of at most eight minutes, on a machine without network.
#   run.sh first  CARRY WORK OUT   speech by festival on all cores; meanwhile thinker, then codec; then all codes
#   run.sh second CARRY WORK OUT   talker and code predictor; if CARRY has festival and the encoder, meanwhile more
#                                  speech from chunk MORE on, which training takes in; and its codes
# CARRY holds what `pack`, `tokenizer` and `rows` made (first), or what `trim` and an earlier run made (second): codes,
# embedding, tokenizer; festival and encoder for more speech; the talker to go on from (TALKER_ARGS=--go-on).
# OUT gets what the next step needs, each file below 16 MiB; larger ones in parts, to be put together by `cat`.
set -uo pipefail
step=${1:?first or second} carry=${2:?} work=${3:?} out=${4:?}
python=${PYTHON:-python3}
export PYTHONPATH=$carry/overlay:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
export TORCHINDUCTOR_COMPILE_THREADS=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
mkdir -p "$work" "$out"
nano() { "$python" -m recipes.nano --work "$work" "$@"; }

if [ "$step" = first ]; then
  audio=${AUDIO:-/tmp/nano-audio}
  cp -n "$carry"/tokenizer.json "$carry"/thinker-rows.npz "$work"/
  {
    OMP_NUM_THREADS=1 nice -n 10 "$python" -m recipes.nano --work "$work" corpus --audio "$audio" \
      --festival "$carry/festival.tar.xz" --workers "${WORKERS:-13}" --seconds "${CORPUS_SECONDS:-390}" ||
      nano corpus --audio "$audio" --packed "$carry/opus" --seconds 0
  } >"$out/corpus.log" 2>&1 &
  speaking=$!
  nano thinker --seconds "${THINKER_SECONDS:-150}" ${THINKER_ARGS:-} >"$out/thinker.log" 2>&1 &
  thinking=$!
  limit=${CODEC_SECONDS:-435}
  nano codec --audio "$audio" --seconds "$limit" ${CODEC_ARGS:-} 2>&1 | tee "$out/codec.log" ||
    nano codec --audio "$audio" --seconds $((limit - SECONDS)) --no-compile ${CODEC_ARGS:-} 2>&1 | tee -a "$out/codec.log"
  status=$?
  wait $thinking || nano thinker --eager --seconds 60 >>"$out/thinker.log" 2>&1 || status=1
  kill $speaking 2>/dev/null
  tail -n 12 "$out/thinker.log"
  tail -n 3 "$out/corpus.log"
  cp "$work"/{thinker,code2wav,encoder}.safetensors "$work"/codes-[0-9].npy "$out"/
  tar -C "$work" -cf "$out/small.tar" tokenizer.json codes-index.npz $(cd "$work" && ls report-*.json) -C "$out" codec.log thinker.log corpus.log
  rm -f "$out"/*.log
else
  audio=${AUDIO:-/tmp/nano-audio} speaking= growing=
  cp -n "$carry"/*.safetensors "$carry"/codes-*.np[yz] "$carry"/tokenizer.json "$work"/ 2>/dev/null
  [ -f "$carry/talker.safetensors.part-aa" ] && cat "$carry"/talker.safetensors.part-* >"$work/talker.safetensors"
  mkdir -p "$audio"
  if [ -f "$carry/festival.tar.xz" ]; then
    OMP_NUM_THREADS=1 nice -n 10 "$python" -m recipes.nano --work "$work" corpus --audio "$audio" \
      --first "${MORE:-420}" --festival "$carry/festival.tar.xz" --workers "${WORKERS:-12}" \
      --seconds "${CORPUS_SECONDS:-340}" >"$out/corpus.log" 2>&1 &
    speaking=$! growing="--audio $audio"
  fi
  limit=${TALKER_SECONDS:-400}
  nano talker --seconds "$limit" $growing ${TALKER_ARGS:-} 2>&1 | tee "$out/talker.log" ||
    nano talker --eager --seconds $((limit - SECONDS)) ${TALKER_ARGS:-} 2>&1 | tee -a "$out/talker.log"
  status=$?
  [ -n "$speaking" ] && kill $speaking 2>/dev/null && tail -n 2 "$out/corpus.log"
  for file in talker talker-last; do split -b 15M "$work/$file.safetensors" "$out/$file.safetensors.part-"; done
  ls "$work"/codes-[5-9].npy >/dev/null 2>&1 && cp "$work"/codes-[5-9].npy "$work"/codes-index-5.npz "$out"/
  tar -C "$work" -cf "$out/small.tar" $(cd "$work" && ls report-*.json) -C "$out" talker.log
  rm -f "$out"/*.log
fi
chmod 644 "$out"/*
ls -l "$out"
exit $status
