#!/bin/bash
# Makes what boots one release's arm64 kernel: vmlinuz, initrd (with gpudevfreq.ko, cross-built for it, and the few
# other modules that the board needs), and bcc, the release's BCC run-time library.  Prints the directory; kept outside
# the tree, keyed by what decides the result.
# usage: build-kernel.sh SUITE        bullseye: Linux 5.10, BCC 0.18; bookworm: Linux 6.1, BCC 0.26
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/board/common.sh
. "$here/common.sh"

release=$1
modules=(virtio_pci virtio_blk ext4 crc32c_generic 9p 9pnet_virtio governor_simpleondemand)

build() {
    local image version common kbuild bpf
    set -x
    install_packages
    prepare_apt "$release"
    image=$(dependency linux-image-arm64 'linux-image-[0-9].*')
    version=${image#linux-image-}
    version=${version%-unsigned}
    common=linux-headers-${version%-arm64}-common
    kbuild=linux-kbuild-$(echo "$version" | cut -d. -f1,2)
    fetch kernel "$image:arm64" busybox-static:arm64
    fetch headers "linux-headers-$version:arm64" "$common:all"
    fetch headers "$kbuild:$(dpkg --print-architecture)" || # since 6.1 it may be named after the whole version
        fetch headers "linux-kbuild-${version%-arm64}:$(dpkg --print-architecture)"
    build_module
    build_initrd "$1"
    cp "kernel/boot/vmlinuz-$version" "$1/vmlinuz"
    case $release in bullseye) bpf=libbpf0 ;; *) bpf=libbpf1 ;; esac
    fetch libraries libbpfcc:arm64 "$bpf:arm64"
    mkdir "$1/bcc"
    cp -a libraries/usr/lib/aarch64-linux-gnu/libb*.so.* "$1/bcc"
    rm -f "$1"/bcc/libbcc.so.* # the half with the compiler
}

build_module() {
    local tree=$PWD/headers/usr/src/linux-headers-$version
    # Debian's tree is a line that names the common one, which has links to kbuild's programs: by absolute paths.
    sed -i "s,/usr/src/,$PWD/headers/usr/src/,g" "$tree/Makefile"
    rm -f "$PWD/headers/usr/src/$common/scripts" "$PWD/headers/usr/src/$common/tools"
    for directory in scripts tools; do
        ln -s "$PWD"/headers/usr/lib/linux-kbuild-*/"$directory" "$PWD/headers/usr/src/$common/$directory"
    done
    mkdir module
    cp "$here/gpudevfreq.c" module
    echo "obj-m := gpudevfreq.o" >module/Makefile
    make -C "$tree" M="$PWD/module" ARCH=arm64 CROSS_COMPILE=aarch64-linux-gnu- \
        CC=aarch64-linux-gnu-gcc modules
}

build_initrd() {
    local root=$PWD/initrd installed=$PWD/kernel module file
    [ -d kernel/lib/modules ] || installed=$PWD/kernel/usr
    mkdir -p "$root"/{bin,proc,sys,dev,board} "$root/lib/modules/$version"
    cp kernel/bin/busybox "$root/bin/busybox" || cp kernel/usr/bin/busybox "$root/bin/busybox"
    install -m 755 "$here/init" "$root/init"
    cp module/gpudevfreq.ko "$root/lib/modules/$version"
    cp "$installed/lib/modules/$version"/modules.{builtin,builtin.modinfo,order} "$root/lib/modules/$version"
    depmod --basedir "$installed" "$version"
    for module in "${modules[@]}"; do
        # "insmod FILE" for it and for all that it needs; "builtin NAME" for what the kernel has in itself.
        modprobe --dirname "$installed" --set-version "$version" --show-depends "$module" | sed -n 's/^insmod //p'
    done | sort -u | while read -r file; do
        install -D -m 644 "$file" "$root/lib/modules/$version/${file#*"/$version/"}"
    done
    depmod --basedir "$root" "$version"
    (cd "$root" && find . | cpio --quiet --create --format newc | gzip -1) >"$1/initrd"
}

cached "board-$release-$(key "$here/common.sh" "$here/build-kernel.sh" "$here/init" "$here/gpudevfreq.c" "$release")" build
