// SPDX-License-Identifier: Apache-2.0

//! The rules, by name, so that the tests can drop each of them and see whether
//! they notice. Without the feature `mutants` all of them are compiled in for
//! good.

/// A rule that keeps a moving volume correct.
#[cfg_attr(not(feature = "mutants"), allow(unreachable_pub, dead_code))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A write to what is not settled completes when its intent is handed out.
    IntentBeforeCompletion,
    /// What is handed out is kept until it is written, whatever becomes of the
    /// process, and of the write: the kernel drops what it has not begun with, and
    /// may fail what it has.
    KeepIntents,
    /// It completes when its data are written.
    DataBeforeCompletion,
    /// With FUA, the data are written with FUA.
    FuaData,
    /// With FUA, the intent is written with FUA.
    FuaIntent,
    /// With FUA, the write completes when its intent is written.
    FuaAfterIntent,
    /// A guest's flush flushes the destination.
    FlushData,
    /// A guest's flush flushes the metadata.
    FlushMetadata,
    /// A guest's flush waits until the intents are written of what was answered
    /// before it came.
    FlushAfterIntents,
    /// A flush waits for second writes in flight.
    Drain,
    /// It waits until their intents are written.
    DrainIntents,
    /// A flush that has failed is not tried again: the disk may have dropped
    /// what it was to make durable, and would say that all is well.
    FailedFlushIsFinal,
    /// Recovery believes an intent only if the content has its checksum.
    Compare,
    /// Recovery flushes both disks before it compares.
    FlushBeforeRecovery,
    /// Recovery records what is local before it empties the journal.
    RecordBeforeNewEpoch,
    /// Recovery flushes the bitmap before it empties the journal.
    FlushBeforeNewEpoch,
    /// Recovery makes the journal's old blocks void.
    NewEpoch,
    /// Recovery believes all intents that are settled.
    SettledIsLocal,
    /// Recovery does not look at blocks of the journal before its tail.
    Tail,
    /// Intents are settled only after a flush that followed their completion.
    SettleAfterFlush,
    /// Only intents before the first write in flight are settled.
    SettleBelowInFlight,
    /// A second write waits until what is owed is settled.
    SecondWriteWaits,
    /// So it does when the earlier write had FUA.
    SecondWriteAfterFua,
    /// The data of a write over what is local are handed out after its intent.
    OverwriteBehindIntent,
    /// The settled record it waits for is durable before it goes on.
    SettledRecordDurable,
    /// A block that was copied is recorded only after a flush of the
    /// destination.
    FlushBeforeHydratedBit,
    /// A guest's write to a copied block without its bit is a first write.
    HydratedIsNotSettled,
    /// A guest's write to a copied block waits while its bit is being written.
    HydratedBitInFlight,
    /// What the guest writes while a copy is read is not copied.
    CopyExcludesWritten,
    /// A guest's write waits while the block's copy is written.
    WriteWaitsForCopy,
    /// A write waits for another one to the same unsettled block.
    OneWriteAtATime,
    /// The rest of a partly written block comes from where it is valid.
    CopyUp,
    /// A large discard is recorded only after a flush of the destination.
    FlushBeforeZeroRecord,
    /// A large discard waits until what it overwrites is settled.
    ZeroWaitsForSettled,
    /// The journal's tail moves only after the bitmap was flushed.
    FlushBeforeTail,
    /// The bitmap is written before the journal's tail moves.
    BitmapBeforeTail,
    /// It moves only after what is condensed was written.
    CondensedBeforeTail,
    /// What is condensed is written with FUA.
    FuaCondensed,
    /// Before the switch-over nothing is copied.
    NothingBeforeStart,
    /// Zeros are left out only on a destination that nobody has written to.
    HolesOnlyWhenNew,
    /// An intent whose data could not be written is taken back.
    FailedWriteIsVoid,
    /// What is to be verified is local only when it was compared.
    VerifyBeforeLocal,
    /// It is compared only after a flush of the destination.
    FlushBeforeVerify,
    /// What the guest writes while a copy waits or is compared is left out.
    VerifyExcludesWritten,
    /// What differs from the source does not become local.
    DifferenceStaysRemote,
}

#[cfg(feature = "mutants")]
impl Rule {
    /// All of them.
    pub const ALL: [Self; 45] = [
        Self::IntentBeforeCompletion,
        Self::KeepIntents,
        Self::DataBeforeCompletion,
        Self::FuaData,
        Self::FuaIntent,
        Self::FuaAfterIntent,
        Self::FlushData,
        Self::FlushMetadata,
        Self::FlushAfterIntents,
        Self::Drain,
        Self::DrainIntents,
        Self::FailedFlushIsFinal,
        Self::Compare,
        Self::FlushBeforeRecovery,
        Self::RecordBeforeNewEpoch,
        Self::FlushBeforeNewEpoch,
        Self::NewEpoch,
        Self::SettledIsLocal,
        Self::Tail,
        Self::SettleAfterFlush,
        Self::SettleBelowInFlight,
        Self::SecondWriteWaits,
        Self::SecondWriteAfterFua,
        Self::OverwriteBehindIntent,
        Self::SettledRecordDurable,
        Self::FlushBeforeHydratedBit,
        Self::HydratedIsNotSettled,
        Self::HydratedBitInFlight,
        Self::CopyExcludesWritten,
        Self::WriteWaitsForCopy,
        Self::OneWriteAtATime,
        Self::CopyUp,
        Self::FlushBeforeZeroRecord,
        Self::ZeroWaitsForSettled,
        Self::FlushBeforeTail,
        Self::BitmapBeforeTail,
        Self::CondensedBeforeTail,
        Self::FuaCondensed,
        Self::NothingBeforeStart,
        Self::HolesOnlyWhenNew,
        Self::FailedWriteIsVoid,
        Self::VerifyBeforeLocal,
        Self::FlushBeforeVerify,
        Self::VerifyExcludesWritten,
        Self::DifferenceStaysRemote,
    ];
}

/// Which rules hold: all of them, but for the one that a test has dropped.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rules {
    #[cfg(feature = "mutants")]
    pub(crate) dropped: Option<Rule>,
}

impl Rules {
    #[inline]
    #[cfg(feature = "mutants")]
    pub(crate) fn keep(self, rule: Rule) -> bool {
        self.dropped != Some(rule)
    }

    #[inline]
    #[cfg(not(feature = "mutants"))]
    pub(crate) const fn keep(self, _: Rule) -> bool {
        true
    }
}
