# shellcheck shell=bash
# What both builders use: Debian's mirror, and an apt of their own.

# shellcheck source=tests/cache.sh
. "$(dirname "${BASH_SOURCE[0]}")/../cache.sh"

packages=(qemu-system-arm ipxe-qemu mmdebstrap arch-test qemu-user-static binfmt-support e2fsprogs gcc-aarch64-linux-gnu
    libc6-dev-arm64-cross make cpio kmod debian-archive-keyring)

install_packages() {
    local package missing=()
    for package in "${packages[@]}"; do
        dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' ||
            missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -qq --yes --no-install-recommends "${missing[@]}"
}

# What this machine's apt takes Debian from.
debian_mirror() {
    local mirror
    # shellcheck disable=SC2016 # apt replaces these
    mirror=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' |
        sed -n '/security/d; s/^Debian //p' | head -n 1)
    [ -n "$mirror" ] || die "apt knows no mirror of Debian"
    echo "$mirror"
}

# Sets up an apt below the current directory, for other releases and machines than this one; fetch() takes packages
# from there and unpacks them.  The machine's own apt and dpkg learn nothing of it.
# usage: prepare_apt SUITE
prepare_apt() {
    mkdir -p apt/lists/partial apt/archives/partial apt/empty debs
    : >apt/status
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_mirror) $1 main" >apt/sources.list
    apt_options=(
        -o "APT::Architecture=arm64" -o "APT::Architectures::=arm64" -o "APT::Architectures::=$(dpkg --print-architecture)"
        -o "Dir::State=$PWD/apt" -o "Dir::State::Lists=$PWD/apt/lists" -o "Dir::State::Status=$PWD/apt/status"
        -o "Dir::Cache=$PWD/apt" -o "Dir::Etc::SourceList=$PWD/apt/sources.list" -o "Dir::Etc::SourceParts=$PWD/apt/empty"
        -o "APT::Sandbox::User=root" -o "Acquire::Languages=none"
    )
    apt-get "${apt_options[@]}" --quiet update
}

# usage: fetch DIRECTORY PACKAGE...
fetch() {
    local directory=$1
    shift
    rm -f debs/*.deb
    (cd debs && apt-get "${apt_options[@]}" --quiet download "$@")
    for package in debs/*.deb; do
        dpkg-deb --extract "$package" "$directory"
    done
}

# usage: dependency PACKAGE PATTERN      the name of a package it depends on
dependency() { apt-cache "${apt_options[@]}" depends "$1" | sed -n "s/^ *Depends: \($2\)\$/\1/p" | head -n 1; }
