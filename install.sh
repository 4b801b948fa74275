#!/bin/bash
# Sets moe-gpu-stabilizer up.  ./install.sh --help says how.
set -euo pipefail

usage() {
    cat <<'END'
usage: ./install.sh --demo          set up, and show the whole path on a simulated GPU
       ./install.sh --test [ARG...] set up, and run the tests; ARGs go to pytest
       ./install.sh --help

Run it as root, in a clone of the repository, on Debian 12 or 13 or Ubuntu 22.04 or 24.04. It installs Debian packages,
and Python packages into .venv in the clone. For the tests it also builds llama.cpp in ~/.cache/moe-gpu-stabilizer, and
links kernel headers to where BCC looks if the running kernel has none of its own. Nothing else is changed.

exit status: 0 all is well, 1 something failed, 2 wrong usage; with --test that of pytest
END
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv

# Debian's own interpreter: only that one sees Debian's python3-systemd, python3-psutil and python3-bpfcc.
python=/usr/bin/python3

run_packages=(libbpfcc python3 python3-venv python3-psutil python3-pyelftools python3-systemd)
demo_packages=(gcc libc6-dev)
# BCC compiles probe.c afresh in the tests, and a real llama.cpp is built for them.
test_packages=(python3-bpfcc cmake make g++ util-linux shellcheck binutils)

say() { printf '%s\n' "$*"; }

die() {
    printf 'install.sh: %s\n' "$1" >&2
    [ -z "${2:-}" ] || printf '  -> %s\n' "$2" >&2
    exit 1
}

usage_error() {
    printf 'install.sh: %s\n\n' "$1" >&2
    usage >&2
    exit 2
}

require_root() {
    [ "$(id -u)" = 0 ] || die "root is needed, to install packages and to attach uprobes" "sudo ./install.sh $*"
}

require_debian() {
    command -v apt-get >/dev/null || die "this needs apt-get: Debian 12 or 13, Ubuntu 22.04 or 24.04, JetPack 6 or 7" \
        "elsewhere, install what README.md lists under \"By hand\""
}

# Kernel headers for BCC: those of the running kernel if they can be had, else any (see tools/kernel-headers).
headers_package() {
    local name
    apt-get update -qq </dev/null || true
    for name in "linux-headers-$(uname -r)" "linux-headers-$(dpkg --print-architecture)" linux-headers-generic; do
        if apt-cache show "$name" >/dev/null 2>&1; then
            say "$name"
            return
        fi
    done
    die "no package with kernel headers found" "apt-get update"
}

is_installed() { dpkg-query --show --showformat='${Status}' "$1" 2>/dev/null | grep -q 'install ok installed'; }

# usage: install_packages NAME...
install_packages() {
    local name missing=()
    for name in "$@"; do
        is_installed "$name" || missing+=("$name")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && apt-get install -qq --yes --no-install-recommends "${missing[@]}"; } </dev/null >/dev/null ||
        die "apt-get could not install ${missing[*]}" "is the network there? run it by hand: apt-get install ${missing[*]}"
}

# What .venv holds: the clone's place, the extra, pyproject.toml.
venv_stamp() { printf '%s' "$here${1:+[$1]} $(sha256sum <"$here/pyproject.toml")"; }

# Python packages that Debian does not carry, or only too old.  Done again only when something of that has changed; one with
# the test packages serves for all.
# usage: make_venv [EXTRA]
make_venv() {
    local wanted="$here${1:+[$1]}" stamp=$venv/.installed found
    found=$(cat "$stamp" 2>/dev/null) || true
    [ "$found" != "$(venv_stamp "${1:-}")" ] && [ "$found" != "$(venv_stamp test)" ] || return 0
    say "setting up $venv"
    rm -f "$stamp"
    "$python" -m venv --system-site-packages "$venv" || die "cannot make $venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$wanted" </dev/null ||
        die "pip could not install what pyproject.toml names" "is the network there?"
    venv_stamp "${1:-}" >"$stamp"
}

demo() {
    require_root --demo
    require_debian
    install_packages "${run_packages[@]}" "${demo_packages[@]}"
    make_venv
    exec "$venv/bin/python" -m moe_gpu_stabilizer --demo
}

run_tests() {
    require_root --test
    require_debian
    install_packages "${run_packages[@]}" "${demo_packages[@]}" "${test_packages[@]}"
    # A prebuilt llama.cpp of another make is fetched with npm, wherever that comes from.
    command -v npm >/dev/null || install_packages npm
    [ -e "/lib/modules/$(uname -r)/build" ] || install_packages "$(headers_package)"
    make_venv test
    cd "$here"
    exec "$venv/bin/python" -m pytest "$@"
}

case ${1:-} in
--demo)
    [ $# -eq 1 ] || usage_error "--demo takes nothing more"
    demo
    ;;
--test)
    shift
    run_tests "$@"
    ;;
--help | -h) usage ;;
"") usage_error "what is to be done?" ;;
*) usage_error "what is '$1'?" ;;
esac
