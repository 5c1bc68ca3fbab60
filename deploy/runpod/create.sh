#!/usr/bin/env bash
# Creates what these files describe: RUNPOD_API_KEY=… IMAGE=docker.io/NAME/tonle:TAG bash create.sh pod|load-balancer-endpoint|queue-endpoint
# The network volume is created first; VOLUME_ID=… uses one that is there already.
# Before: create these secrets in RunPod's console: tonle_api_key (for pods: the key that callers send), hub_token (the hub's token).
# RUNPOD_API is the address of the API, for tests.
set -euo pipefail
cd "$(dirname "$0")"
kind=${1:-}
case "$kind" in
  pod|load-balancer-endpoint|queue-endpoint) ;;
  *) echo "usage: $0 pod|load-balancer-endpoint|queue-endpoint" >&2; exit 2 ;;
esac
: "${RUNPOD_API_KEY:?set it to an API key of RunPod}"
api=${RUNPOD_API:-https://api.runpod.io/v2}
image=${IMAGE:-docker.io/example/tonle:0.1.0-cuda-runpod}
if [[ $image != */* ]]; then
  echo "RunPod cannot pull $image: push it to a registry and set IMAGE, such as docker.io/NAME/$image" >&2
  exit 2
fi

# Sends a file with the names of what was created before, and prints the id in the answer.
create() {
  sed -e "s|VOLUME_ID|${VOLUME_ID:-}|" -e "s|TEMPLATE_ID|${TEMPLATE_ID:-}|" \
      -e "s|\"image\": \"[^\"]*\"|\"image\": \"$image\"|" "$2" |
    curl --silent --show-error --fail-with-body --request POST --header "Content-Type: application/json" \
      --config <(printf 'header = "Authorization: Bearer %s"\n' "$RUNPOD_API_KEY") --data-binary @- "$api/$1" |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])'
}

if [[ -z ${VOLUME_ID:-} ]]; then
  VOLUME_ID=$(create network-volumes network-volume.json)
  echo "network volume $VOLUME_ID"
fi
if [[ $kind == pod ]]; then
  TEMPLATE_ID=$(create templates pod-template.json)
  echo "template $TEMPLATE_ID"
  echo "pod $(create pods pod.json)"
else
  echo "endpoint $(create serverless "$kind.json")"
fi
