#!/usr/bin/env bash
# What others made and the tests meet: mosquitto_pub / mosquitto_sub and mqtt.js (tests/interop), and Spark's own Delta
# Lake (tests/pipeline), which reads the tables that the pipeline writes.
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

DELTA=4.4.0 # for the Spark of requirements-dev.lock
if ! ls tests/pipeline/jars/delta-*.jar >/dev/null 2>&1; then
    if command -v mvn >/dev/null; then
        echo "Installing Delta Lake $DELTA for Spark into tests/pipeline/jars"
        spark=$(sed -n 's/^pyspark==\([0-9]*\.[0-9]*\).*/\1/p' requirements-dev.lock)
        for artifact in "delta-spark_${spark}_2.13" delta-storage; do
            mvn -q -B org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy \
                -Dartifact="io.delta:$artifact:$DELTA" -DoutputDirectory=tests/pipeline/jars >/dev/null 2>&1
        done
    fi
    ls tests/pipeline/jars/delta-*.jar >/dev/null 2>&1 ||
        echo "Spark's own Delta Lake is missing: its test will be skipped (it needs Maven)."
fi
exit 0
