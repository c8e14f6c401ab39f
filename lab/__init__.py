# SPDX-License-Identifier: Apache-2.0
"""A virtual cloud on one machine: real kernels, a real control plane.

Every node is a User Mode Linux kernel with disks, LVM, iSCSI and
cinder-volume of its own; MariaDB, RabbitMQ, Keystone and Cinder's API and
scheduler run natively. All of it lives in one network namespace that
nothing ever leaves.
"""
