#!/usr/bin/env bash
# The foreign MQTT clients that tests/interop drives: mosquitto_pub / mosquitto_sub, and mqtt.js.
# Installs what is missing where it can, and says which tests will be skipped where it cannot.
set -uo pipefail
cd "$(dirname "$0")/.."

if ! command -v mosquitto_pub >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing mosquitto-clients"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq mosquitto-clients; } >/dev/null 2>&1
    fi
    command -v mosquitto_pub >/dev/null ||
        echo "mosquitto_pub and mosquitto_sub are missing: their tests will be skipped (Debian: mosquitto-clients)."
fi

if [ ! -d tests/interop/node_modules/mqtt ]; then
    if command -v npm >/dev/null; then
        echo "Installing mqtt.js into tests/interop"
        npm install --no-save --no-package-lock --no-audit --no-fund --silent --prefix tests/interop >/dev/null 2>&1
    fi
    [ -d tests/interop/node_modules/mqtt ] ||
        echo "mqtt.js is missing: its tests will be skipped (they need node and npm)."
fi
exit 0
