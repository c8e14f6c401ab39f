// SPDX-License-Identifier: Apache-2.0
//! Takes from the process what it does not need to serve.
//!
//! What comes from a guest, or from a client, is parsed here, in a process that
//! root has started. So before the first of it arrives, the process gives up
//! what a parser that was led astray could be used for: its capabilities, and
//! the system calls that no server makes. Its ring is limited from the
//! beginning (`localstor_hydrator_disks::Ring`), because a filter of system
//! calls does not see what a ring is asked for.

use std::collections::BTreeMap;

use libc::{c_long, c_ulong};
use localstor_hydrator_disks::BLKDISCARD;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule,
};
use tracing::warn;

use crate::arguments::FrontendKind;

/// System calls of any server.
const CALLS: &[c_long] = &[
    // The ring, which is set up.
    libc::SYS_io_uring_enter,
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munlock,
    libc::SYS_munmap,
    // Files that are open.
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_ftruncate,
    libc::SYS_getdents64,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_writev,
    // Files by name: to look at them, and to remove what is ours at the end.
    libc::SYS_faccessat,
    libc::SYS_newfstatat,
    libc::SYS_readlinkat,
    libc::SYS_statx,
    libc::SYS_unlinkat,
    // Clients.
    libc::SYS_accept4,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    // Time, locks, signals, the end.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
];

/// What the C library makes of some of them where there are older ones.
#[cfg(target_arch = "x86_64")]
const OLDER_CALLS: &[c_long] = &[
    libc::SYS_access,
    libc::SYS_lstat,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rmdir,
    libc::SYS_stat,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_CALLS: &[c_long] = &[libc::SYS_ppoll];

/// What else it takes to fetch and deliver the data of a ublk device's requests.
const COPYING_CALLS: &[c_long] = &[libc::SYS_pread64, libc::SYS_pwrite64];

/// What else it takes to talk to the kernel's NBD client: netlink, by a library
/// that has a thread for it.
const NETLINK_CALLS: &[c_long] = &[
    libc::SYS_bind,
    libc::SYS_clone,
    libc::SYS_clone3,
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_getsockname,
    libc::SYS_prctl,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
    libc::SYS_socket,
    libc::SYS_socketpair,
];
#[cfg(target_arch = "x86_64")]
const OLDER_NETLINK_CALLS: &[c_long] = &[libc::SYS_epoll_create, libc::SYS_epoll_wait];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_NETLINK_CALLS: &[c_long] = &[];

/// All that the thread which discards does besides: it listens, answers, and
/// ends.
const DISCARDER_CALLS: &[c_long] = &[
    libc::SYS_brk,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_futex,
    libc::SYS_madvise,
    libc::SYS_munmap,
    libc::SYS_read,
    libc::SYS_recvfrom,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sendto,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// Gives up what serving a frontend of this kind does not take. A kernel that
/// does not go along is no reason not to serve.
pub(crate) fn confine(kind: FrontendKind) {
    give_up("process", needed(kind), server_rules(kind));
}

/// Gives up, for the thread that discards, all but that.
pub(crate) fn confine_discarder() {
    give_up("thread", CapabilitySet::empty(), discarder_rules());
}

fn give_up(whose: &str, needed: CapabilitySet, rules: seccompiler::Result<Rules>) {
    if let Err(error) = drop_capabilities(needed) {
        warn!("the {whose} keeps its capabilities: {error}");
    }
    let filter = rules.and_then(filter);
    if let Err(error) = filter.and_then(|program| seccompiler::apply_filter(&program)) {
        warn!("the {whose} may make any system call: {error}");
    }
}

/// The capabilities that it takes to serve: for the memory of a guest that
/// connects, which is locked as all is; and for the kernel's own devices, to
/// remove them.
fn needed(kind: FrontendKind) -> CapabilitySet {
    match kind {
        FrontendKind::Ublk | FrontendKind::Nbd => {
            CapabilitySet::IPC_LOCK | CapabilitySet::SYS_ADMIN
        }
        _ => CapabilitySet::IPC_LOCK,
    }
}

fn drop_capabilities(needed: CapabilitySet) -> rustix::io::Result<()> {
    let kept = capabilities(None)?.permitted & needed;
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)
}

/// Which calls may be made, and with what.
type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

fn server_rules(kind: FrontendKind) -> seccompiler::Result<Rules> {
    let has_none_of = |argument, bits: i32| {
        let bits = u64::from(bits as u32);
        SeccompCondition::new(
            argument,
            SeccompCmpArgLen::Dword,
            SeccompCmpOp::MaskedEq(bits),
            0,
        )
        .and_then(|condition| SeccompRule::new(vec![condition]))
    };
    let mut rules = BTreeMap::new();
    let more: &[&[c_long]] = match kind {
        FrontendKind::Ublk => &[COPYING_CALLS],
        FrontendKind::Nbd => &[NETLINK_CALLS, OLDER_NETLINK_CALLS],
        _ => &[],
    };
    for calls in [CALLS, OLDER_CALLS].iter().chain(more) {
        rules.extend(calls.iter().map(|call| (*call, vec![])));
    }
    // No new code, and no files that are changed or made.
    let code = has_none_of(2, libc::PROT_EXEC)?;
    rules.insert(libc::SYS_mmap, vec![code.clone()]);
    rules.insert(libc::SYS_mprotect, vec![code]);
    let change = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC;
    rules.insert(libc::SYS_openat, vec![has_none_of(2, change)?]);
    let settings = [libc::FIONREAD, libc::FIONBIO, libc::FIOCLEX];
    rules.insert(libc::SYS_ioctl, is_one_of(&settings)?);
    Ok(rules)
}

fn discarder_rules() -> seccompiler::Result<Rules> {
    let calls = DISCARDER_CALLS.iter().map(|call| (*call, vec![]));
    let discards = is_one_of(&[BLKDISCARD])?;
    Ok(calls.chain([(libc::SYS_ioctl, discards)]).collect())
}

/// Calls of ioctl for one of these.
fn is_one_of(names: &[c_ulong]) -> Result<Vec<SeccompRule>, BackendError> {
    let is = |name: &c_ulong| {
        SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, *name)
            .and_then(|condition| SeccompRule::new(vec![condition]))
    };
    names.iter().map(is).collect()
}

/// What is not in here the kernel does not know, as far as the process is
/// concerned: for the C library that is a reason to try something else, not to
/// die.
fn filter(rules: Rules) -> seccompiler::Result<BpfProgram> {
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Errno(libc::ENOSYS as u32),
        SeccompAction::Allow,
        std::env::consts::ARCH.try_into()?,
    )?;
    Ok(filter.try_into()?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use neli::consts::socket::NlFamily;
    use neli::router::synchronous::NlRouter;
    use neli::utils::Groups;

    use super::*;

    /// What comes of something in a thread that has nothing to lose.
    fn confined<T: Send + 'static>(
        kind: FrontendKind,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        within(move || confine(kind), act)
    }

    fn within<T: Send + 'static>(
        confine: impl FnOnce() + Send + 'static,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let thread = std::thread::spawn(move || {
            confine();
            act()
        });
        thread.join().unwrap()
    }

    const UNKNOWN: Option<i32> = Some(libc::ENOSYS);

    #[test]
    fn a_server_runs_no_program_and_changes_no_file_that_it_has_not_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "old").unwrap();
        for kind in [
            FrontendKind::Ublk,
            FrontendKind::Nbd,
            FrontendKind::VhostUserBlk,
        ] {
            let path = path.clone();
            let (run, make, change, ring) = confined(kind, move || {
                (
                    Command::new("/bin/true").spawn().map(|_| ()),
                    File::create(path.with_extension("new")).map(|_| ()),
                    File::options().append(true).open(&path).map(|_| ()),
                    io_uring::IoUring::new(8).map(|_| ()),
                )
            });
            for refused in [make, change, ring] {
                assert_eq!(refused.unwrap_err().raw_os_error(), UNKNOWN);
            }
            assert!(run.is_err());
        }
    }

    #[test]
    fn a_server_reads_talks_allocates_and_cleans_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "old").unwrap();
        let (one, other) = UnixStream::pair().unwrap();
        let path = confined(FrontendKind::VhostUserBlk, move || {
            assert_eq!(std::fs::read(&path).unwrap(), b"old");
            std::io::Write::write_all(&mut &one, b"x").unwrap();
            other.set_nonblocking(true).unwrap();
            std::io::Read::read_exact(&mut &other, &mut [0]).unwrap();
            assert_eq!(vec![7u8; 64 << 20][1 << 20], 7);
            std::fs::remove_file(&path).unwrap();
            path
        });
        assert!(!path.exists());
    }

    #[test]
    fn a_server_of_nbd_talks_to_the_kernel() {
        confined(FrontendKind::Nbd, || {
            let (router, _) = NlRouter::connect(NlFamily::Generic, None, Groups::empty()).unwrap();
            // The family that is always there
            router.resolve_genl_family("nlctrl").unwrap();
        });
    }

    /// How the discard of a file fails, of which nothing can be discarded.
    fn discard(file: &File) -> Option<i32> {
        // SAFETY: BLKDISCARD reads two u64 from where its argument points.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD, &[0u64; 2]) };
        assert_eq!(result, -1);
        std::io::Error::last_os_error().raw_os_error()
    }

    #[test]
    fn the_thread_that_discards_can_do_that_and_answer() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("file")).unwrap();
        let other = file.try_clone().unwrap();
        let (mut one, mut end) = UnixStream::pair().unwrap();
        within(confine_discarder, move || {
            assert_eq!(discard(&file), Some(libc::ENOTTY));
            std::io::Write::write_all(&mut end, b"x").unwrap();
            for refused in [
                File::open("/dev/null").map(|_| ()),
                file.set_len(0),
                UnixStream::pair().map(|_| ()),
                end.set_nonblocking(true),
                io_uring::IoUring::new(8).map(|_| ()),
            ] {
                assert_eq!(refused.unwrap_err().raw_os_error(), UNKNOWN);
            }
        });
        std::io::Read::read_exact(&mut one, &mut [0]).unwrap();
        let refused = confined(FrontendKind::Nbd, move || discard(&other));
        assert_eq!(refused, UNKNOWN);
    }

    #[test]
    fn what_is_not_needed_is_gone_for_good() {
        let before = capabilities(None).unwrap().permitted;
        for (kind, kept) in [
            (FrontendKind::VhostUserBlk, CapabilitySet::IPC_LOCK),
            (FrontendKind::Socket, CapabilitySet::IPC_LOCK),
            (FrontendKind::Ublk, needed(FrontendKind::Ublk)),
        ] {
            let mine = confined(kind, move || {
                // The call that asks is none of a server's.
                std::fs::read_to_string("/proc/thread-self/status").unwrap()
            });
            let bits = |name: &str| {
                let line = mine.lines().find_map(|line| line.strip_prefix(name));
                u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
            };
            let kept = (before & kept).bits();
            assert_eq!(
                (bits("CapPrm:"), bits("CapEff:"), bits("CapInh:")),
                (kept, kept, 0)
            );
        }
    }
}
