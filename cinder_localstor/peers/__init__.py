# SPDX-License-Identifier: Apache-2.0
"""Who the peers are, and the RPC between them."""
