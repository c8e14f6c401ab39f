#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# The programs of a machine that the plugin's phases call and a test may not:
# each is a link to this file. MACHINE is a directory that stands for the
# machine. What changes something is noted in its file "calls".

name=${0##*/}

function note {
    echo "$name $*" >> "$MACHINE/calls"
}

case $name in
    sudo)
        while [[ "$1" == -* || "$1" == *=* ]]; do
            shift
        done
        arguments=()
        for argument in "$@"; do
            case $argument in
                /etc/* | /run/* | /sys/* | /var/*) arguments+=("$MACHINE$argument") ;;
                *) arguments+=("$argument") ;;
            esac
        done
        # Nothing here can belong to root.
        case $1 in
            chown) exit ;;
            install) arguments=("${arguments[@]/#root/$(id -u)}") ;;
        esac
        exec "${arguments[@]}"
        ;;
    vgs)
        test -e "$MACHINE/groups/${*: -1}"
        ;;
    pvs)
        for group in "$MACHINE"/groups/*; do
            test ! -e "$group" || echo '  /dev/loop9'
        done
        ;;
    lvs)
        cat "$MACHINE/groups/${*: -1}" 2>/dev/null
        ;;
    vgcreate)
        test $# -gt 1 || exit 3
        note "$@"
        mkdir -p "$MACHINE/groups"
        touch "$MACHINE/groups/$1"
        ;;
    vgremove)
        note "$@"
        rm "$MACHINE/groups/${*: -1}"
        ;;
    lvremove)
        # Of nothing it removes nothing.
        group=${*: -1}
        test -s "$MACHINE/groups/${group%%/*}" || exit 0
        note "$@"
        if [[ "$group" == */* ]]; then
            sed -i "/^ *${group#*/} /d" "$MACHINE/groups/${group%%/*}"
        else
            : > "$MACHINE/groups/$group"
        fi
        ;;
    losetup)
        case $1 in
            -h) echo '--direct-io' ;;
            *) echo "${LOOP_DEVICE-/dev/loop9}" ;;
        esac
        ;;
    dmsetup)
        case $1 in
            info) cat "$MACHINE/nodes" 2>/dev/null ;;
            remove)
                note "$@"
                sed -i "/^${*: -1} /d" "$MACHINE/nodes"
                ;;
        esac
        ;;
    iscsiadm)
        case "$*" in
            '-m node') cat "$MACHINE/sessions" 2>/dev/null ;;
            *) note "$@" ;;
        esac
        case "$*" in
            *'-o delete') sed -i "/${4}/d" "$MACHINE/sessions" ;;
        esac
        ;;
    rmdir)
        # As in configfs, where these go with what they belong to
        for path in "$@"; do
            /bin/rmdir "$path"/{allowed_hosts,namespaces} 2>/dev/null
            /bin/rmdir "$path"
        done
        ;;
    localstor-hydrator)
        note "$@"
        ;;
    cargo)
        echo "cargo ${CARGO_VERSION:-1.85.0} (of the test)"
        ;;
    openssl)
        echo 0
        ;;
    *)
        note "$@"
        ;;
esac
