#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# container.sh run DIRECTORY... -- COMMAND...
#
# A command as a container runs it: it sees no processes but its own, and of
# the node's files only these directories; whatever else it writes is lost with
# it. The network and System V's semaphores are the node's.

set -eu

# Passes a request to end on to a child; the child's status.
attend() {
    trap 'kill -TERM $ended 2>/dev/null || :' TERM
    status=0
    wait "$child" || status=$?
    # A signal ends the waiting, not the child.
    while kill -0 "$child" 2>/dev/null; do
        status=0
        wait "$child" || status=$?
    done
    exit "$status"
}

case $1 in
    run)
        shift
        unshare --pid --mount --cgroup --fork --kill-child \
            /bin/sh "$0" inside "$@" &
        child=$!
        # unshare itself takes no signal.
        while ! ended=$(pgrep -P "$child"); do
            kill -0 "$child"
        done
        attend
        ;;
    inside)
        shift
        mount -t tmpfs tmpfs /mnt
        mkdir /mnt/upper /mnt/work /mnt/root
        mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work \
            overlay /mnt/root
        while [ "$1" != -- ]; do
            mkdir -p "/mnt/root$1"
            mount --rbind "$1" "/mnt/root$1"
            shift
        done
        shift
        mount -t proc proc /mnt/root/proc
        mkdir -p /mnt/root/outside
        cd /mnt/root
        pivot_root . outside
        umount -l /outside
        # This shell is the first process, and reaps orphans.
        "$@" &
        child=$! ended=$!
        attend
        ;;
esac
