#!/bin/bash
# Makes the board's disk: Debian for arm64 with systemd, and this program installed by its own install.sh, whose Python
# packages come from wheels that pip fetches here.  The program's own files are those of this moment only until a board
# boots (see prepare.sh): the disk need not be made anew for each change of them.  Prints the file; kept outside the
# tree, keyed by what decides the result.
# usage: build-image.sh PYTHON        PYTHON: an interpreter in whose venv the program is installed, and with pip
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tree=$(cd "$here/../.." && pwd)
# shellcheck source=tests/board/common.sh
. "$here/common.sh"

python=$(command -v "$1")
[[ $python == /* ]] || python=$PWD/$python
suite=bookworm
suite_python=3.11
disk=3G
include=systemd-sysv,udev,kmod,libbpfcc,python3,python3-venv,python3-psutil,python3-pyelftools,python3-systemd
unused=(apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_reap.service getty.target
    systemd-logind.service systemd-udev-trigger.service)

build() {
    set -x
    install_packages
    download_wheels
    # A mount namespace of its own: what is mounted in there is gone with it.
    unshare --mount "$BASH" "$here/build-image.sh" "$python" debootstrap
    mke2fs -q -t ext4 -E lazy_itable_init=1 -d root "$1/disk" "$disk"
}

# What pyproject.toml asks for, and what builds the program itself.
download_wheels() {
    local wanted
    mapfile -t wanted < <("$python" -c 'from importlib.metadata import requires
print(*(one for one in requires("moe-gpu-stabilizer") if "extra ==" not in one), sep="\n")')
    "$python" -m pip download --quiet --dest wheels --only-binary :all: --platform manylinux_2_17_aarch64 \
        --platform manylinux2014_aarch64 --python-version "$suite_python" "${wanted[@]}" setuptools wheel
}

# In the current directory, as root, in a mount namespace.
debootstrap() {
    set -x
    # The kernel hands arm64 programs to qemu.
    [ -e /proc/sys/fs/binfmt_misc/register ] || mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    [ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || update-binfmts --enable qemu-aarch64
    # BCC's compiler is the largest part of it, and never used at run time.
    mmdebstrap --mode=root --architectures=arm64 --variant=minbase "--include=$include" \
        --aptopt='APT::Install-Recommends "0"' --aptopt='Acquire::Languages "none"' --dpkgopt=force-unsafe-io \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/lib/llvm-*' \
        --dpkgopt='path-exclude=/usr/lib/*/libLLVM*' --dpkgopt='path-exclude=/usr/lib/*/libclang*' \
        "$suite" root "deb $(debian_mirror) $suite main"
    mkdir -p root/mnt/{host,source,wheels} root/var/log/journal
    : >root/etc/fstab
    echo board >root/etc/hostname
    # Without an id systemd takes each boot for the first one.
    tr -d - </proc/sys/kernel/random/uuid >root/etc/machine-id
    # What takes time and does nothing here: timers, a console to log in, dbus's logind, udev's look at devices.
    for unit in "${unused[@]}"; do
        ln -sf /dev/null "root/etc/systemd/system/$unit"
    done
    mount --bind "$tree" root/mnt/source
    mount --bind wheels root/mnt/wheels
    mount -t proc proc root/proc
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin PIP_NO_INDEX=1 PIP_FIND_LINKS=/mnt/wheels \
        chroot root /mnt/source/install.sh --no-start
    umount root/mnt/source root/mnt/wheels root/proc
}

if [ "${2:-}" = debootstrap ]; then
    debootstrap
    exit
fi
inputs=("$here/common.sh" "$here/build-image.sh" "$(grep -E '^(requires|dependencies) ' "$tree/pyproject.toml")"
    "$tree/install.sh" "$tree/tools/service.sh" "$tree/tools/uninstall")
cached "board-disk-$(key "${inputs[@]}")" build
