#!/bin/bash
# Fetches a CPython 3.10, and pytest for it, and prints the folder they are in.  Debian has none; this one, from the npm
# package pyodide, is compiled to WebAssembly and runs under node: without processes, sockets, fcntl.
set -euo pipefail

version=0.22.1 # the last with Python 3.10
wheels=(pytest==8.3.5 pluggy==1.5.0 iniconfig==2.0.0 packaging==24.2 exceptiongroup==1.2.2 tomli==2.2.1
    hypothesis==6.130.5 sortedcontainers==2.4.0 attrs==25.3.0 typing-extensions==4.13.2 annotated-types==0.7.0)
python=${1:-python3}
key=$(sha256sum <"$0" | cut -c1-12)
cache=${MOE_GPU_STABILIZER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/moe-gpu-stabilizer}
home=$cache/python310-$key
mkdir -p "$cache"

exec 9>"$home.lock"
flock 9
if [ ! -e "$home/complete" ]; then
    work=$(mktemp -d "$cache/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    {
        (cd "$work" && npm pack --silent "pyodide@$version") &&
            tar -xzf "$work"/*.tgz -C "$work" &&
            "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --platform any \
                --python-version 3.10 --target "$work/package/site" "${wheels[@]}"
    } >"$home.log" 2>&1 9>&- || {
        tail -n 30 "$home.log" >&2
        echo "fetch-python310.sh: Python 3.10 could not be had; the whole log: $home.log" >&2
        exit 1
    }
    rm -rf "$home"
    mv "$work/package" "$home"
    touch "$home/complete"
fi
echo "$home"
