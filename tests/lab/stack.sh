#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# stack.sh machine VENV DEVSTACK PLUGIN WHEELS [TREE...]: makes a node a machine for
# DevStack's stack.sh, with a systemd in it and a user, in whose DEST are the
# trees that DevStack would clone, as they are, and what it would install
#
# stack.sh prepare DATA_DIR: makes that DevStack's, with what is read as its localrc
#
# stack.sh stacked COMMAND: runs that as systemd's children run, by DevStack's
# user, in its directory

set -o errexit

DEST=/opt/stack
SYSTEMD=${0%/*}/systemd.sh

# Programs that the lab has others for, and those that take a network
function replace_programs {
    local venv=$1 wheels=$2
    rm -f /usr/local/bin/sudo
    printf '#!/bin/sh\necho cargo 1.85.0\n' > /usr/local/bin/cargo
    chmod 755 /usr/local/bin/cargo
    ln -s "$venv" $DEST/venv
    # It installs bindep without asking for OFFLINE.
    cp -a "$wheels" $DEST/wheels
    printf '[global]\nno-index = true\nfind-links = %s\n' $DEST/wheels \
        > /etc/pip.conf
    mkdir -p $DEST/requirements/.venv/bin
    ln -s /bin/true $DEST/requirements/.venv/bin/edit-constraints
}

# The file as it comes with LVM has this line.
function reset_lvm_filter {
    sed -i 's/^ *global_filter = .*/    # global_filter = [ "a|.*|" ]/' \
        /etc/lvm/lvm.conf
}

# DevStack takes nothing but the names from it.
function write_requirements {
    "$1/bin/uv" pip freeze --quiet --python "$1/bin/python" \
        > $DEST/requirements/global-requirements.txt
    touch $DEST/requirements/upper-constraints.txt
}

function make_tree {
    local tree=$1
    git -C "$tree" init --quiet
    git -C "$tree" add --all --force
    git -C "$tree" -c user.name=stack -c user.email=stack@localhost \
        commit --quiet --message 'As released'
}

function start_systemd {
    "$SYSTEMD" start
    until "$SYSTEMD" inside systemctl --quiet is-active basic.target; do
        sleep 1
    done 2>/dev/null
    # As their packages start them when DevStack installs these
    "$SYSTEMD" inside systemctl start dbus systemd-logind rabbitmq-server \
        mariadb memcached apache2
}

# The kernel of a node keeps a file of the machine's open for each that it
# remembers, and has memory for more than the machine lets it open.
function forget_files {
    while echo 2 > /proc/sys/vm/drop_caches; do
        sleep 300
    done
} </dev/null >/dev/null 2>&1

function make_machine {
    local venv=$1 devstack=$2 plugin=$3 wheels=$4 tree
    shift 4
    useradd --create-home --shell /bin/bash --home-dir $DEST stack
    echo 'stack ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/50_stack_sh
    # Its user reads the environment, wherever that is.
    chmod 755 $DEST /root
    replace_programs "$venv" "$wheels"
    reset_lvm_filter
    write_requirements "$venv"
    for tree; do
        # A folder of the cache: one has the tree's name, and what it is
        cp -a "$tree"/* $DEST/
    done
    for tree in "$DEST"/*/setup.cfg $DEST/requirements; do
        make_tree "${tree%/setup.cfg}"
    done
    git config --system --add safe.directory '*'
    ln -s "$plugin" $DEST/cinder-localstor
    cp -a "$devstack" $DEST/devstack
    chmod -R u+w $DEST/devstack
    chown -R stack: $DEST
    # A node's kernel has less room for addresses, and no io_uring for others.
    cat > /etc/mysql/mariadb.conf.d/99-lab.cnf <<'END'
[mariadb]
innodb_buffer_pool_size_max = 256M
innodb_buffer_pool_size = 128M
innodb_use_native_aio = 0
END
    start_systemd
    forget_files &
}

# Needs a file system upon a disk, where DATA_DIR is.
function prepare {
    local venv
    venv=$(readlink $DEST/venv)
    cat > $DEST/devstack/localrc
    mkdir -p "$1"
    ln -sfn "$venv" "$1/venv"
    # DevStack looks for one program there, wherever its DATA_DIR is.
    ln -sfn "$1" $DEST/data
    chown -R -h stack: $DEST/devstack/localrc $DEST/data "$1"
    modprobe loop
}

case $1 in
    machine)
        shift
        make_machine "$@"
        ;;
    prepare)
        prepare "$2"
        ;;
    stacked)
        "$SYSTEMD" inside su - stack -c "cd devstack && $2"
        ;;
esac
