# SPDX-License-Identifier: Apache-2.0
"""What lies under the handle of a volume.

The handle ``/dev/mapper/<volume name>-handle`` is always linear::

    standing:  handle = linear(LV)
    moving:    handle = linear(engine node)
                            engine node = clone(region map, LV, source node)
                                source node = multipath(imported disk)

so all that ever happens to a handle is the swap of one linear table for
another.  A clone node is never reloaded (hazard H26).  The source node makes
reads wait while the source is away, and lets a source that had to be connected
again take the old one's place under a living clone.
"""
