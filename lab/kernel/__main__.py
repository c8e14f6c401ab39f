# SPDX-License-Identifier: Apache-2.0
"""Builds the lab's own kernel and prints where it is."""

from lab import kernel

if __name__ == '__main__':
    print(kernel.build().image)
