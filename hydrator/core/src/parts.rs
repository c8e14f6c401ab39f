// SPDX-License-Identifier: Apache-2.0

//! What requests and copies both go through.

use crate::context::Context;
use crate::journal::Journal;
use crate::regions::Regions;
use crate::source::Source;

/// What requests and copies both go through.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) cx: Context,
    pub(crate) regions: Regions,
    pub(crate) journal: Journal,
    pub(crate) source: Source,
}

impl Parts {
    /// Have the core's own flush submitted.
    pub(crate) fn flush(&mut self) {
        self.journal.flush(&mut self.regions, &mut self.cx);
    }
}
