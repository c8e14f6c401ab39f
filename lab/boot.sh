#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The first process of a node. The machine's own file system is the node's
# root, read-only; what the node writes lands on an overlay in its memory and
# is lost with the power, as /run would be. What a machine keeps is on disks.

set -eu
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/root

say() { echo "lab: $*"; }

power_off() {
    say "boot failed: $*"
    sync
    echo o > /proc/sysrq-trigger
    while :; do sleep 60; done
}

build_root() {
    mount -t tmpfs -o mode=755 tmpfs /mnt
    mkdir /mnt/upper /mnt/work /mnt/root
    modules=$LAB_KERNEL_MODULES/$(uname -r)
    # Built in, in the lab's own kernel.
    grep -qw overlay /proc/filesystems ||
        insmod "$modules/kernel/fs/overlayfs/overlay.ko"
    mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work \
        overlay /mnt/root
    cd /mnt/root
    mount -t proc proc proc
    mount -t sysfs sysfs sys
    mount -t devtmpfs devtmpfs dev
    mkdir -p dev/pts dev/shm lib/modules
    mount -t devpts devpts dev/pts
    for directory in dev/shm run tmp; do
        mount -t tmpfs tmpfs "$directory"
    done
    chmod 1777 tmp dev/shm
    ln -sfn "$modules" "lib/modules/$(uname -r)"
    # Not through the overlay: that remembers files which have changed
    # since, and the driver's source is edited while the lab runs.
    for directory in $LAB_READABLE; do
        mkdir -p ".$directory"
        mount -t hostfs -o "ro,$directory" none ".$directory"
    done
    mkdir -p ".$LAB_DIRECTORY"
    mount -t hostfs -o "$LAB_DIRECTORY" none ".$LAB_DIRECTORY"
}

start_devices() {
    modprobe -a $LAB_MODULES || power_off "a kernel module is missing"
    mount -t configfs configfs /sys/kernel/config
    /lib/systemd/systemd-udevd --daemon
    udevadm trigger --action=add --subsystem-match=block \
        --subsystem-match=misc
    udevadm settle --timeout=30
}

start_network() {
    # Built in, in the lab's own kernel.
    [ -e /proc/net/if_inet6 ] || modprobe ipv6
    ip -batch - <<END
link set lo up
link set vec0 up
address add $LAB_ADDRESS dev vec0
address add $LAB_IPV6_ADDRESS dev vec0 nodad
END
}

case ${1-} in
    inside)
        . "$LAB_NODE/boot.env"
        cp -a "$LAB_NODE/files/." /
        hostname "$LAB_NAME"
        start_network || power_off "no network"
        start_devices
        # In a shell of its own: an error would end this one, and the kernel
        # with it.
        sh "$LAB_NODE/disks.sh" || power_off "the disks cannot be used"
        say "ready"
        # This shell stays: it reaps the orphans of the node.
        while :; do
            "$LAB_PYTHON" -ISE "$LAB_SOURCE/agent.py" \
                "${LAB_ADDRESS%/*}" "$LAB_PORT" || :
            say "the agent ended"
            sleep 1
        done
        ;;
    *)
        mount -t proc proc /proc
        for word in $(cat /proc/cmdline); do
            case $word in
                lab_node=*) LAB_NODE=${word#*=} ;;
            esac
        done
        export LAB_NODE
        . "$LAB_NODE/boot.env"
        build_root
        exec chroot /mnt/root /bin/sh "$LAB_SOURCE/boot.sh" inside
        ;;
esac
