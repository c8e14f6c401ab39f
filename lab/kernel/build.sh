#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# build.sh SOURCE RESULT: builds the lab's own kernel in the unpacked source
# of Linux, which it patches, and puts "linux" and its modules into RESULT.

set -eu
recipe=$(dirname "$(realpath "$0")")
result=$(realpath -m "$2")
cd "$1"

for patch in "$recipe"/*.patch; do
    patch -p1 -i "$patch"
done
make -s ARCH=um defconfig
cat "$recipe/config" >> .config
make -s ARCH=um olddefconfig
make -s "-j$(nproc)" ARCH=um linux modules
make -s ARCH=um modules_install INSTALL_MOD_PATH="$result" INSTALL_MOD_STRIP=1
strip -o "$result/linux" linux
