#!/bin/bash
# Fetches BCC's run-time library from another Debian release, or a whole Python with it, and prints the folder they are
# unpacked in.  Nothing of it is installed.  Kept outside the tree, keyed by everything that decides the result.
# usage: fetch-runtime.sh bullseye    BCC 0.18 (that of JetPack 6), for this machine's Python
#        fetch-runtime.sh trixie      BCC 0.31 with Python 3.13, its C library and pytest
set -euo pipefail

suite=${1:-}
case $suite in
bullseye)
    packages=(libbpfcc libbpf0)
    with_dependencies=()
    ;;
trixie)
    packages=(libbpfcc libbpf1 libelf1t64 libstdc++6)
    with_dependencies=(python3 python3-systemd python3-psutil python3-pyelftools python3-pydantic python3-pytest
        python3-pytest-timeout python3-hypothesis)
    ;;
*)
    echo "usage: fetch-runtime.sh bullseye|trixie" >&2
    exit 2
    ;;
esac
architecture=$(dpkg --print-architecture)
# shellcheck source=tests/cache.sh
. "$(dirname "$0")/../cache.sh"

# apt with sources and a state of its own, so that it checks signatures and sums, and the machine's stays as it is.  It
# takes no package for installed, so all that a package needs is fetched.
# usage: apt FOLDER COMMAND...
apt() {
    local folder=$1
    shift
    apt-get -qq \
        -o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=- -o Dir::Etc::Preferences=- \
        -o Dir::Etc::PreferencesParts=- -o "Dir::State=$folder/state" -o "Dir::State::status=$folder/status" \
        -o "Dir::Cache=$folder/cache" -o "APT::Architectures=$architecture" -o Acquire::Languages=none \
        -o APT::Sandbox::User=root -o APT::Install-Recommends=false "$@"
}

# The place where this machine's own packages come from has those of other releases, too.  apt knows it once it has their
# lists.
mirror() {
    local columns
    # shellcheck disable=SC2016 # these are apt's own
    columns='$(SITE) $(CODENAME) $(COMPONENT)'
    apt-get indextargets --format "$columns" 'Created-By: Packages' 'Origin: Debian' |
        awk '$3 == "main" && $2 !~ /-/ { site = $1 } END { print site }'
}

# usage: fetch DIRECTORY
fetch() {
    local root=$1 work=$PWD site library interpreter
    site=$(mirror)
    [ -n "$site" ] || { apt-get -qq update && site=$(mirror) && [ -n "$site" ]; } || die "apt knows no mirror of Debian"
    mkdir -p "$work"/{state/lists/partial,cache/archives/partial}
    touch "$work/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $suite main" >"$work/sources.list"
    apt "$work" update
    (cd "$work/cache/archives" && apt "$work" download "${packages[@]}")
    [ ${#with_dependencies[@]} = 0 ] || apt "$work" install --yes --download-only "${with_dependencies[@]}"
    for package in "$work"/cache/archives/*.deb; do
        dpkg-deb --extract "$package" "$root"
    done
    # BCC's compiler: it would need LLVM, and the fresh bytecode is to be made by this machine's own.
    find "$root" -name 'libbcc.so*' -delete
    library=$(dirname "$(find "$root/usr/lib" -name libbcc_bpf.so.0)")
    ln -sfn "${library#"$root/"}" "$root/libraries"
    [ ! -e "$root/usr/bin/python3" ] || {
        # Its programs find their libraries wherever they are started, and those that they start find this machine's.
        # RPATH, not RUNPATH: it holds for the libraries of libraries and for what is loaded later, too.
        interpreter=$(find "$library" -maxdepth 1 -name 'ld-linux*')
        patchelf --set-interpreter "$home/${interpreter#"$root/"}" --force-rpath --set-rpath "$home/libraries" \
            "$(readlink -f "$root/usr/bin/python3")"
    }
}

cached "runtime-$suite-$(key "$0" "$architecture")" fetch
