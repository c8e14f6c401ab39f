#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# phases.sh stack|unstack|clean DIRECTORY: calls the plugin as the script of
# this name in DevStack does, in its order, with DevStack's own functions and
# its lib/cinder.
#
# Left out is what other services need, and what starts one. DIRECTORY has in
#
# - ``devstack``: DevStack with a localrc
# - ``etc``: what is written to for /etc
#
# and DEST is in localrc.

set -o errexit

TOP_DIR=$2/devstack
ETC=$2/etc
# shellcheck disable=SC2034
FILES=$TOP_DIR/files

# shellcheck disable=SC1091
{
    source "$TOP_DIR/functions"
    source "$TOP_DIR/stackrc"
    GetDistro
    source "$TOP_DIR/lib/database"
    source "$TOP_DIR/lib/rpc_backend"
}
initialize_database_backends || true
define_database_baseurl

if [[ "$1" != clean ]]; then
    OFFLINE=True fetch_plugins
    plugin_override_defaults
fi
for name in apache tls infra lvm keystone glance nova placement cinder; do
    # shellcheck disable=SC1090
    source "$TOP_DIR/lib/$name"
done
load_plugin_settings

# DevStack has them below /etc, always.
# shellcheck disable=SC2034
{
    CINDER_CONF_DIR=$ETC/cinder
    CINDER_CONF=$CINDER_CONF_DIR/cinder.conf
    CINDER_API_PASTE_INI=$CINDER_CONF_DIR/api-paste.ini
    TEMPEST_CONFIG=$DEST/tempest.conf
    NOVA_CONF=$ETC/nova/nova.conf
}

# What serves the API is no matter of the plugin's, and writes for Apache.
function write_uwsgi_config {
    :
}
function remove_uwsgi_config {
    :
}

case $1 in
    stack)
        run_plugins stack pre-install
        configure_cinder
        # create_nova_conf makes it anew each time.
        install -D /dev/null "$NOVA_CONF"
        run_plugins stack install
        async_init
        async_runfunc init_cinder
        async_wait init_cinder
        run_plugins stack post-config
        # Here stack.sh starts cinder-volume. What LVM looks at then counts.
        cp "$ETC/lvm/lvm.conf" "$DEST/lvm.conf.at-start"
        create_volume_types
        run_plugins stack extra
        set_lvm_filter
        run_plugins stack test-config
        ;;
    unstack)
        run_plugins unstack
        export SCSI_PERSIST_DIR="$CINDER_STATE_PATH/volumes/*"
        cleanup_cinder || true
        clean_lvm_filter
        ;;
    clean)
        set +o errexit
        run_plugins clean
        cleanup_cinder
        sudo rm -rf "$CINDER_CONF_DIR" "$DATA_DIR"
        ;;
esac
