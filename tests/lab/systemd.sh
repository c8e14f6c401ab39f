#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# systemd.sh start: starts a systemd of its own in a node, which has another
# first process
#
# systemd.sh inside COMMAND...: runs a command where it is the first process

set -o errexit

case $1 in
    start)
        mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup
        setsid unshare --pid --mount --cgroup --uts --ipc --fork --mount-proc \
            --kill-child sh -c '
                mount -t cgroup2 none /sys/fs/cgroup
                mount -t tmpfs tmpfs /run
                mount -t tmpfs tmpfs /tmp
                container=lab exec /lib/systemd/systemd --unit=basic.target' \
            </dev/null >/dev/null 2>&1 &
        ;;
    inside)
        shift
        init=$(pgrep -x -o systemd)
        exec nsenter --target "$init" --mount --pid --cgroup --uts --ipc \
            --root --wd=/ "$@"
        ;;
esac
