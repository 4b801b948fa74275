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
cache=${MOE_GPU_STABILIZER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/moe-gpu-stabilizer}
home=$cache/node-llama-cpp-$version-$package
mkdir -p "$cache"

exec 9>"$home.lock"
flock 9
if [ ! -e "$home/complete" ]; then
    work=$(mktemp -d "$cache/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    (cd "$work" && npm pack --silent "@node-llama-cpp/$package@$version") >"$home.log" 2>&1 9>&- || {
        tail -n 30 "$home.log" >&2
        echo "fetch-older.sh: npm could not fetch @node-llama-cpp/$package" >&2
        exit 1
    }
    tar -xzf "$work"/*.tgz -C "$work"
    rm -rf "$home"
    mkdir "$home"
    cp -a "$work/package/bins/$package/." "$home/"
    touch "$home/complete"
fi
echo "$home"
