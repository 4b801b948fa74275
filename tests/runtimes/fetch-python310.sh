#!/bin/bash
# Fetches a CPython 3.10, and pytest for it, and prints the folder they are in.  Debian has none; this one, from the npm
# package pyodide, is compiled to WebAssembly and runs under node: without processes, sockets, fcntl.
set -euo pipefail

version=0.22.1 # the last with Python 3.10
wheels=(pytest==8.3.5 pluggy==1.5.0 iniconfig==2.0.0 packaging==24.2 exceptiongroup==1.2.2 tomli==2.2.1
    hypothesis==6.130.5 sortedcontainers==2.4.0 attrs==25.3.0 typing-extensions==4.13.2 annotated-types==0.7.0)
python=$(command -v "${1:-python3}")
[[ $python == /* ]] || python=$PWD/$python
# shellcheck source=tests/cache.sh
. "$(dirname "$0")/../cache.sh"

fetch() {
    npm pack --silent "pyodide@$version"
    tar -xzf ./*.tgz
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --platform any \
        --python-version 3.10 --target package/site "${wheels[@]}"
    cp -a package/. "$1"
}

cached "python310-$(key "$0")" fetch
