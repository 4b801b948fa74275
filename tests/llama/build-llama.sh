#!/bin/bash
# Builds the llama.cpp that the tests run (llama-server, llama-bench, ggml's RPC server) and prints the folder
# of its programs.  Kept outside the tree, keyed by everything that decides the result, so it is built once.
# usage: build-llama.sh [PYTHON]     PYTHON: an interpreter with pip (default python3)
set -euo pipefail

python=${1:-python3}
version=0.3.36 # of llama-cpp-python, whose source archive carries a whole llama.cpp tree
flags=(
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DBUILD_SHARED_LIBS=ON -DGGML_RPC=ON
    -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF
)
targets=(llama-server llama-bench ggml-rpc-server)

key=$(printf '%s\n' "$version" "${flags[@]}" "${targets[@]}" "$(uname -m)" | sha256sum | cut -c1-12)
cache=${MOE_GPU_STABILIZER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/moe-gpu-stabilizer}
home=$cache/llama.cpp-$version-$key
mkdir -p "$cache"

# Two test runs may want it at once: one builds, the other waits for it.
exec 9>"$home.lock"
flock 9
if [ ! -e "$home/complete" ]; then
    work=$(mktemp -d "$cache/build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    {
        "$python" -m pip download --quiet --no-deps --no-binary llama-cpp-python \
            --dest "$work" "llama-cpp-python==$version"
        tar -xzf "$work"/llama_cpp_python-*.tar.gz -C "$work"
        tree=$(echo "$work"/llama_cpp_python-*/vendor/llama.cpp)
        cmake -S "$tree" -B "$work/build" "${flags[@]}"
        cmake --build "$work/build" --parallel "$(nproc)" --target "${targets[@]}"
        rm -rf "$home"
        mkdir "$home"
        cp -a "$work/build/bin" "$home/"
        cp -a "$tree/include" "$tree/ggml/include" "$home/" 2>/dev/null || cp -a "$tree/include" "$home/"
        touch "$home/complete"
    } >"$home.log" 2>&1 9>&- || {
        tail -n 30 "$home.log" >&2
        echo "build-llama.sh: llama.cpp did not build; the whole log: $home.log" >&2
        exit 1
    }
fi
echo "$home/bin"
