#!/bin/sh
# Puts this tree's program in the place of the one that install.sh has put on the disk, and what a boot is to run.
# Runs at each boot, before systemd does, on the board's disk (see ../init).
set -eu
share=/mnt/host
home=/opt/moe-gpu-stabilizer/venv
set -- "$home"/lib/python3*/site-packages/moe_gpu_stabilizer
site=$1
rm -rf "$site"
cp -a "$share/tree/moe_gpu_stabilizer" "$site"
"$home/bin/python" -m compileall -q "$site" # most likely the host has done that, in a tenth of the time
cp "$share/tree/systemd/moe-gpu-stabilizer.service" /usr/local/lib/systemd/system/
cp "$share/tree/tools/uninstall" /opt/moe-gpu-stabilizer/
cp "$share/tree/tests/board/guest/board-checks.service" /etc/systemd/system/
ln -sf ../board-checks.service /etc/systemd/system/multi-user.target.wants/
mkdir -p /opt/llama.cpp/build /etc/systemd/system/moe-gpu-stabilizer.service.d
[ -e /opt/llama.cpp/build/bin ] || cp -r "$share/llama.cpp" /opt/llama.cpp/build/bin
# Another BCC than the disk's, where the host gives one.
if [ -d "$share/bcc" ] && [ ! -e /opt/bcc ]; then
    cp -r "$share/bcc" /opt/bcc
    printf '[Service]\nEnvironment=LD_LIBRARY_PATH=/opt/bcc\n' >/etc/systemd/system/moe-gpu-stabilizer.service.d/bcc.conf
fi
