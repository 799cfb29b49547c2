#!/usr/bin/env bash
# Writes requirements-dev.lock: what `pip install .[dev]` brings today, without Tidegate itself.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
"$python" -m venv "$room"
# Held back: the newest that Delta's own connector for Spark (delta-spark 4.4) accepts.
echo "pyspark==4.2.0" > "$room/held"
"$room/bin/python" -m pip --disable-pip-version-check --quiet install --constraint "$room/held" --editable '.[dev]'
{
    echo "# The exact versions that development and CI use. Made by: make lock"
    "$room/bin/python" -m pip --disable-pip-version-check freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==' | sort -f
} > "$room/lock"
cp "$room/lock" requirements-dev.lock
echo "requirements-dev.lock: $(grep -c == requirements-dev.lock) packages"
