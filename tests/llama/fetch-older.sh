#!/bin/bash
# Fetches a prebuilt llama.cpp of another make (from the npm package of node-llama-cpp) and prints the folder of its
# libraries: llama_decode without llama_process, versions within the files' names, and a libggml-cpu for each kind of
# processor, of which a program loads one.  Kept outside the tree, like the one that build-llama.sh builds.
set -euo pipefail

version=3.22.1
case $(uname -m) in
x86_64) package=linux-x64 ;;
aarch64) package=linux-arm64 ;;
*)
    echo "fetch-older.sh: there is no prebuilt llama.cpp for $(uname -m)" >&2
    exit 1
    ;;
esac
# shellcheck source=tests/cache.sh
. "$(dirname "$0")/../cache.sh"

fetch() {
    npm pack --silent "@node-llama-cpp/$package@$version"
    tar -xzf ./*.tgz
    cp -a "package/bins/$package/." "$1"
}

cached "node-llama-cpp-$version-$package" fetch
