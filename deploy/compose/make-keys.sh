#!/bin/sh
# Draws the keys that compose.yaml reads, once: callers' key, Prometheus' key for the gateway's metrics, Grafana's password.
set -eu
umask 077
cd "$(dirname "$0")"
if [ -e keys ]; then
  echo "keys/ is already there; remove it to draw new ones" >&2
  exit 1
fi
mkdir keys
draw() { head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }
caller=$(draw)
metrics=$(draw)
printf 'TONLE_API_KEY=%s,%s\n' "$caller" "$metrics" > keys/gateway.env
printf '%s' "$metrics" > keys/metrics.key
chmod 644 keys/metrics.key # another user reads it in Prometheus' container; the folder is closed to the others here
printf 'GF_SECURITY_ADMIN_PASSWORD=%s\n' "$(draw)" > keys/grafana.env
printf '*\n' > keys/.gitignore
echo "The key of callers: $caller"
