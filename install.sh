#!/bin/bash
# Sets moe-gpu-stabilizer up.  ./install.sh --help says how.
set -euo pipefail

unset CDPATH # it would make cd say where it goes

usage() {
    cat <<'END'
usage: ./install.sh [--no-start] [--dry-run]             install the service, or upgrade it
       ./install.sh --uninstall [--purge] [--dry-run]    take it off again
       ./install.sh --demo                               show the whole path on a simulated GPU; installs no service
       ./install.sh --test [ARG...]                      run the tests; ARGs go to pytest
       ./install.sh --help

Run it as root, in a clone of the repository, on Debian 12 or 13 or Ubuntu 22.04 or 24.04.

The service is installed in /opt/moe-gpu-stabilizer, with Debian packages, and Python packages from PyPI. Run again, it
upgrades and keeps the settings in /etc/default/moe-gpu-stabilizer; if the new version does not start, the old one is put
back.

  --no-start   do not start it now; it starts at the next boot
  --dry-run    say what would be done, and do nothing
  --purge      remove the settings, too, and what "systemctl edit" has made

--demo and --test put Python packages into .venv in the clone. For the tests llama.cpp is built, and packages of other
Debian releases are unpacked, in ~/.cache/moe-gpu-stabilizer, and kernel headers are linked to where BCC looks if the
running kernel has none of its own.

exit status: 0 all is well, 1 something failed, 2 wrong usage; with --test that of pytest
END
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv

# Debian's own interpreter: only that one sees Debian's python3-systemd, python3-psutil and python3-bpfcc.
python=/usr/bin/python3

run_packages=(libbpfcc python3 python3-venv python3-psutil python3-pyelftools python3-systemd)
demo_packages=(gcc libc6-dev)
# BCC compiles probe.c afresh in the tests, a real llama.cpp is built for them, and another release's Python is fetched.
test_packages=(python3-bpfcc cmake make g++ util-linux shellcheck binutils git groff-base bash-completion libcap2-bin
    systemd-container systemd-sysv dbus patchelf)

# shellcheck source=tools/uninstall
. "$here/tools/uninstall"
# shellcheck source=tools/service.sh
. "$here/tools/service.sh"

usage_error() { die "$1" "./install.sh --help" 2; }

require_root() {
    [ "$(id -u)" = 0 ] || die "root is needed" "sudo ./install.sh${*:+ $*}"
}

require_debian() {
    command -v apt-get >/dev/null || die "this needs apt-get: Debian 12 or 13, Ubuntu 22.04 or 24.04, JetPack 6 or 7" \
        "elsewhere, install what README.md lists under \"By hand\""
}

# Kernel headers for BCC: those of the running kernel if they can be had, else any (see tools/kernel-headers).
headers_package() {
    local package
    apt-get update -qq </dev/null || true
    for package in "linux-headers-$(uname -r)" "linux-headers-$(dpkg --print-architecture)" linux-headers-generic; do
        if apt-cache show "$package" >/dev/null 2>&1; then
            say "$package"
            return
        fi
    done
    die "no package with kernel headers found" "apt-get update"
}

is_installed_package() { dpkg-query --show --showformat='${Status}' "$1" 2>/dev/null | grep -q 'install ok installed'; }

# usage: install_packages NAME...
install_packages() {
    local package missing=()
    for package in "$@"; do
        is_installed_package "$package" || missing+=("$package")
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
    # A prebuilt llama.cpp of another make, and a Python 3.10, are fetched with npm, wherever that comes from.
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
--uninstall)
    [ "$(id -u)" = 0 ] || [[ " $* " == *" --dry-run "* ]] || require_root "$@"
    shift
    uninstall "$@"
    ;;
--help | -h) usage ;;
*) install_service "$@" ;;
esac
