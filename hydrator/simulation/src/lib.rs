// SPDX-License-Identifier: Apache-2.0

//! The core over simulated disks.
