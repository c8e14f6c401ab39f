#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# What DevStack calls in each of its phases. lib/cinder does most: it calls
# the functions *_cinder_backend_localstor, makes a volume type for each
# backend, and runs cinder-volume. So nothing is left for the phase "extra"; in
# "unstack" it is enough for the backends that the functions are there.

# shellcheck source=devstack/lib/localstor
source "$LOCALSTOR_DIR/devstack/lib/localstor"

case "$1 ${2:-}" in
    'stack pre-install')
        install_localstor_packages
        ;;
    'stack install')
        install_localstor
        ;;
    'stack post-config')
        check_localstor_volume_groups
        configure_localstor
        configure_localstor_nova
        configure_localstor_scheduler
        configure_localstor_nova_scheduler
        ;;
    'stack test-config')
        configure_localstor_tempest
        ;;
    'unstack ')
        cleanup_localstor_nova
        ;;
    'clean ')
        cleanup_localstor
        ;;
esac
